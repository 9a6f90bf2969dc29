"""What every chat format offers: messages to ids, append-only, and the parser for what the model answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from k3cli.chat import messages as shapes
from k3cli.chat.specials import MODEL_FAMILIES, Family
from k3cli.chat.tokenizer import Tokenizer
from k3cli.errors import DamagedError, ModelError, UsageError

if TYPE_CHECKING:
    from k3cli.chat.parser import StreamParser
    from k3cli.chat.transcript import TranscriptEntry


@dataclass
class RenderContext:
    """What rendering the next message needs to know of the past. `render_messages` keeps it up to date.

    thinking: whether assistant messages carry the thinking channel. calls: (id, name) of the calls of the newest
    assistant message, in order; an id may be None. tool_index: tool messages since then. tool_names: all tools
    declared so far.
    """

    thinking: bool
    calls: tuple[tuple[str | None, str], ...] = ()
    tool_index: int = 0
    tool_names: tuple[str, ...] = ()

    def copy(self) -> RenderContext:
        return RenderContext(**vars(self))

    def reply(self, message: Mapping[str, Any]) -> None:
        """Take note of an assistant message, rendered or generated (`StreamParser.message()`)."""
        calls = message.get("tool_calls") or ()
        self.calls = tuple((call.get("id"), call["function"]["name"]) for call in calls)
        self.tool_index = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data for a turn's record."""
        return {
            "thinking": self.thinking,
            "calls": [list(call) for call in self.calls],
            "tool_index": self.tool_index,
            "tool_names": list(self.tool_names),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RenderContext:
        """The inverse of `to_json`. DamagedError when it is not that."""
        try:
            calls = tuple((call_id, name) for call_id, name in data["calls"])
            return cls(data["thinking"], calls, data["tool_index"], tuple(data["tool_names"]))
        except (KeyError, TypeError, ValueError) as problem:
            raise DamagedError(
                f"a recorded render context cannot be read ({type(problem).__name__}: {problem})",
                "thinking, calls, tool_index, tool_names",
                "use the version of k3 that wrote the session",
            ) from None


class Renderer(ABC):
    """One chat format over one tokenizer. Stateless: what changes during a conversation is in `RenderContext`.

    A prompt is `render_head`, then `render_messages` for each batch of new messages, `render_tail`,
    `generation_prompt`; after the answer, `close_turn` when it was cut, and `context.reply(message)`.
    """

    family: ClassVar[Family]
    format_version: ClassVar[str]
    """Part of a session's identity; changes when the same messages would give other ids."""
    default_thinking: ClassVar[bool]
    default_effort: ClassVar[str | None]

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.family != self.family:
            raise ModelError(
                f"a tokenizer with {tokenizer.family} special tokens ({tokenizer.family_reason})",
                f"{self.family} special tokens for this chat format",
                "use the tokenizer files that belong to the model",
            )
        self.tokenizer = tokenizer

    @property
    @abstractmethod
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer. They belong to it; sample nothing after them."""

    @abstractmethod
    def render_head(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
        effort: str | None = None,
        system: str | None = None,
    ) -> list[int]:
        """Ids of the head of a prompt: tool catalogue, thinking effort (only when thinking), system text.

        thinking None is the format's default; effort None leaves the declaration out. UsageError for what the format
        cannot say.
        """

    def render_message(self, message: Mapping[str, Any], context: RenderContext) -> list[int]:
        """Ids of one message, as it stands (tool results are not sorted). Updates `context` unless it raises."""
        return self._message(shapes.check_message(message, "message"), context, "message")

    def render_messages(self, messages: Sequence[Mapping[str, Any]], context: RenderContext) -> list[int]:
        """Ids of new messages, to be appended to the history. Updates `context`; when it raises, nothing changed.

        Runs of tool results are put in the order of their calls where the format asks for it, so hand over all
        results of a turn at once. Raises UsageError naming the message.
        """
        work = context.copy()
        ids: list[int] = []
        for number, message in self._in_order(shapes.check_messages(messages), work):
            ids += self._message(message, work, f"messages[{number}]")
        vars(context).update(vars(work))
        return ids

    @abstractmethod
    def _message(self, message: Mapping[str, Any], context: RenderContext, where: str) -> list[int]:
        """Ids of one message that was checked. Updates `context` unless it raises. where: what errors call it."""

    def _in_order(
        self, messages: Sequence[Mapping[str, Any]], context: RenderContext
    ) -> Iterable[tuple[int, Mapping[str, Any]]]:
        """Messages and their numbers in the order of the format. `context` is always that behind the last one taken."""
        return enumerate(messages)

    @abstractmethod
    def render_tail(
        self, tool_choice: str | None, response_format: Mapping[str, Any] | None, context: RenderContext
    ) -> list[int]:
        """Ids of what a request asks of the next answer. They stay in the history where they were evaluated."""

    @abstractmethod
    def generation_prompt(self, thinking: bool | None = None) -> list[int]:
        """Ids that open the assistant message which the model then writes."""

    @abstractmethod
    def parser(self, thinking: bool | None = None, mint: Callable[[], str] | None = None) -> StreamParser:
        """A parser for the answer after `generation_prompt(thinking)`. `mint` makes ids of tool calls (random ones)."""

    @abstractmethod
    def parse_transcript(self, ids: Sequence[int]) -> list[TranscriptEntry]:
        """A history back to messages, for people to read. Never raises for odd content: problems are in the entries."""

    def new_context(self, thinking: bool | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> RenderContext:
        """The context right after `render_head(tools, thinking, ...)`."""
        return RenderContext(self._thinking(thinking), tool_names=shapes.tool_names(tools))

    def close_turn(self, parser: StreamParser) -> list[int]:
        """Ids that end an answer which was cut (length, cancel), so that the history stays well formed.

        Empty after an answer that ended by itself. Evaluate and keep them like sampled ids.
        """
        return parser.close_ids()

    def render(self, conversation: Mapping[str, Any]) -> list[int]:
        """A whole prompt at once: an object as `messages.check_request` describes, generation prompt included."""
        request = shapes.check_request(conversation, thinking=self.default_thinking, effort=self.default_effort)
        context = self.new_context(request.thinking, request.tools)
        return [
            *self.render_head(request.tools, request.thinking, request.effort),
            *self.render_messages(request.messages, context),
            *self.render_tail(request.tool_choice, request.response_format, context),
            *self.generation_prompt(request.thinking),
        ]

    def _thinking(self, thinking: bool | None) -> bool:
        return self.default_thinking if thinking is None else thinking


def check_tail(
    tool_choice: str | None, response_format: Mapping[str, Any] | None, context: RenderContext
) -> tuple[str | None, Mapping[str, Any] | None]:
    """Checked arguments of `render_tail`: known values, and tools to require a call of."""
    choice = shapes.check_tool_choice(tool_choice)
    if choice == "required" and not context.tool_names:
        raise UsageError(
            "tool_choice is 'required' and no tool is declared", "at least one tool", "declare tools first"
        )
    return choice, shapes.check_response_format(response_format)


def renderer_for(model_type: str, tokenizer: Tokenizer) -> Renderer:
    """The renderer of a model: by `model_type` of config.json, checked against the tokenizer's special tokens.

    A text-only K3 checkpoint may call itself kimi_linear; a tokenizer_config.json with K3's names then decides.
    ModelError for an unknown type, or when model and tokenizer belong to different families.
    """
    if model_type not in MODEL_FAMILIES:
        raise ModelError(f"model_type {model_type!r} has no known chat format", f"one of {', '.join(MODEL_FAMILIES)}")
    if MODEL_FAMILIES[model_type] == "k3" and tokenizer.family != "k3":
        raise ModelError(
            f"model_type {model_type} with {tokenizer.family} special tokens ({tokenizer.family_reason})",
            "k3 special tokens",
            "use the tokenizer files that belong to the model",
        )
    return renderer_of(tokenizer)


def renderer_of(tokenizer: Tokenizer) -> Renderer:
    """The renderer that the special tokens of a vocabulary call for."""
    from k3cli.chat.k2 import K2Renderer
    from k3cli.chat.xtml import XtmlRenderer

    return XtmlRenderer(tokenizer) if tokenizer.family == "k3" else K2Renderer(tokenizer)
