"""What a conversation says while it works: frozen events, each with the NDJSON object that scripts read.

`SCHEMA` is the `v` of every object. A field is only ever added; a change of meaning raises `SCHEMA`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from k3cli.errors import K3Error

SCHEMA = 1
"""Version of the event objects, the `v` field."""


@dataclass(frozen=True)
class Event:
    """Base of all events. `type` names the event in JSON; the dataclass fields are its other keys."""

    type: ClassVar[str] = "event"

    def to_json(self) -> dict[str, Any]:
        """The NDJSON object: `v`, `type`, then every field, in declaration order."""
        return {"v": SCHEMA, "type": self.type} | {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class SessionOpened(Event):
    """A session is ready for a turn.

    how: "created", "resumed", "forked" or "ephemeral" (nothing of it is kept on disk).
    turn: id of the newest turn it continues, None for an empty session. source: the session forked from.
    tokens: ids in the history, pending ones included. reused: tokens whose state came from the store.
    replayed: tokens evaluated again to get there. pending: tokens that the next turn evaluates first.
    """

    type: ClassVar[str] = "session"
    name: str | None
    how: str
    turn: str | None
    source: str | None
    tokens: int
    reused: int
    replayed: int
    pending: int


@dataclass(frozen=True)
class Notice(Event):
    """Something to know, already dealt with by the program. `code` is stable, `message` is for people."""

    type: ClassVar[str] = "notice"
    code: str
    message: str


@dataclass(frozen=True)
class Progress(Event):
    """Work that takes time: `done` of `total` `unit` in this `stage` ("restore", "replay", "prefill", "score")."""

    type: ClassVar[str] = "progress"
    stage: str
    done: int
    total: int
    unit: str = "tokens"


@dataclass(frozen=True)
class Prompt(Event):
    """What the turn is about to do, before anything is evaluated.

    reused: history tokens whose state is already there. prefill: tokens to evaluate before the first new one (pending
    tokens of the turn before included). room: tokens the answer may have at most.
    """

    type: ClassVar[str] = "prompt"
    reused: int
    prefill: int
    room: int


@dataclass(frozen=True)
class Thinking(Event):
    """A piece of the thinking channel."""

    type: ClassVar[str] = "thinking"
    text: str


@dataclass(frozen=True)
class Text(Event):
    """A piece of the answer."""

    type: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class ToolCall(Event):
    """A complete tool call. `arguments` is the JSON text as assembled from the model's ids; `index` starts at 1."""

    type: ClassVar[str] = "tool_call"
    id: str
    name: str
    arguments: str
    index: int


@dataclass(frozen=True)
class Malformed(Event):
    """The model left the chat format; what could be kept was kept."""

    type: ClassVar[str] = "malformed"
    reason: str
    detail: str


@dataclass(frozen=True)
class Stopped(Event):
    """The answer ended. reason: "stop", "tool_calls", "length" or "cancelled"; `generated` counts sampled tokens."""

    type: ClassVar[str] = "stopped"
    reason: str
    generated: int


@dataclass(frozen=True)
class Speculation(Event):
    """How the answer was decoded; tokens are the same with any drafter.

    drafter: its name, "off" without one. failed: why it, or one of two, was turned off during this session, None if
    neither was.
    window: most rows a step may have. steps, tokens: verify steps, and the tokens they evaluated. acceptance: for each
    place in a window, the share of drafts that were right, given those before them were. tested: how many that is of.
    rows: how many steps had 1, 2, ... rows. seconds: in `draft`, `verify` (drawing included) and `commit`. inputs: what
    the number of rows is decided from: `step_seconds` of one row; `cost` of 1, 2, ... rows in such steps, and which of
    those were `timed` and not only assumed; `draft_price`, such steps that asking a draft model takes (0 until it was
    asked twice), and `draft_wins`, those it wins; the `hit_rates` of the drafter where it measures them;
    `draft_context`, the tokens a draft model has seen: after a resume, those evaluated since.
    """

    type: ClassVar[str] = "speculation"
    drafter: str
    failed: str | None
    window: int
    steps: int
    tokens: int
    tokens_per_step: float
    acceptance: list[float]
    tested: list[int]
    rows: list[int]
    seconds: dict[str, float]
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Saved(Event):
    """The turn is durable.

    turn: its id. position: tokens evaluated into the stored state; pending: sampled but not evaluated.
    reused: tokens of the history not evaluated in this turn; replayed: tokens evaluated again since the session was
    opened or last saved (0 at a turn end); prefilled: new prompt tokens and the pending ones; generated: sampled ones.
    bytes_written / bytes_pages / bytes_checkpoint: as stored. seconds: time spent saving.
    turns: how many turns this save made durable (more than one after a failed save).
    """

    type: ClassVar[str] = "saved"
    session: str
    turn: str
    position: int
    pending: int
    reused: int
    replayed: int
    prefilled: int
    generated: int
    bytes_written: int
    bytes_pages: int
    bytes_checkpoint: int
    seconds: float
    turns: int = 1


@dataclass(frozen=True)
class NotSaved(Event):
    """The turn lives in memory only. reason: "ephemeral" (asked for), or the failure; `queued` turns await a save."""

    type: ClassVar[str] = "not_saved"
    reason: str
    reused: int
    replayed: int
    prefilled: int
    generated: int
    queued: int


@dataclass(frozen=True)
class Done(Event):
    """Last event of a turn. `turn` is None when it was not saved. Rates are tokens per second, 0 when nothing ran."""

    type: ClassVar[str] = "done"
    reason: str
    turn: str | None
    saved: bool
    prefill_rate: float
    decode_rate: float


@dataclass(frozen=True)
class Failed(Event):
    """Last event when the command failed: the parts of the error and the exit code."""

    type: ClassVar[str] = "error"
    found: str
    expected: str | None
    do: str | None
    exit_code: int

    @classmethod
    def of(cls, error: K3Error) -> Failed:
        """The event that describes `error`."""
        return cls(error.found, error.expected, error.do, int(error.exit_code))


@dataclass(frozen=True)
class TurnReplayed(Event):
    """One recorded turn was generated again.

    tokens: generated ids compared. state: "equal", "different", or "no checkpoint" (thinned: nothing to compare with).
    """

    type: ClassVar[str] = "turn_replayed"
    turn: str
    number: int
    tokens: int
    state: str


@dataclass(frozen=True)
class Difference(Event):
    """First place where a replay left the record.

    position: index of the token, or the position whose state differs. field and layer name the state field (None for a
    token). recorded / got: token ids (None for state). margin: top-1 minus top-2 of the perturbed scores at that
    position (logits at temperature 0, else logits / temperature plus noise); near zero it is a tie broken by rounding.
    max_abs: largest absolute difference of the state field.
    """

    type: ClassVar[str] = "difference"
    turn: str
    number: int
    position: int
    recorded: int | None
    got: int | None
    margin: float | None
    field: str | None = None
    layer: int | None = None
    max_abs: float | None = None


@dataclass(frozen=True)
class Score(Event):
    """Log-likelihood of one recorded turn under the current model.

    nats: sum of log p over the `tokens` generated ids; perplexity: exp(-nats / tokens). prompt_nats, prompt_tokens:
    the same for the ids that were given. Turns without generated ids have perplexity None.
    """

    type: ClassVar[str] = "score"
    turn: str
    number: int
    tokens: int
    nats: float
    perplexity: float | None
    prompt_tokens: int
    prompt_nats: float
