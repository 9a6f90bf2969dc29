"""What sits at the head of a prompt: fixed when a session begins, inherited by its forks, never rendered again."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from k3cli.engine.sampling import MAX_SEED
from k3cli.errors import DamagedError, SessionError, UsageError

OPTIONS = ("system", "tools", "thinking", "effort")
"""The options of a head that a user can ask for."""


@dataclass(frozen=True)
class Head:
    """The fixed part of a session.

    system: system text, None for none. tools: OpenAI-style tool list as given. thinking: whether answers begin in the
    thinking channel. effort: thinking effort, None leaves the declaration out. seed: the session's sampling seed
    (never part of the prompt).
    """

    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = False
    effort: str | None = None
    seed: int = 0

    @classmethod
    def new(cls, asked: Mapping[str, Any] | None = None, *, thinking: bool = False, effort: str | None = None) -> Head:
        """A head for a new session: the asked options over the format's defaults, with a fresh random seed.

        thinking, effort: those defaults. Without thinking there is no effort unless it is asked for, which is refused.
        """
        wanted = {key: value for key, value in _known(asked).items() if value is not None}
        if "tools" in wanted:
            wanted["tools"] = tuple(wanted["tools"])
        head = replace(cls(thinking=thinking, effort=effort, seed=secrets.randbelow(MAX_SEED)), **wanted)
        if head.thinking:
            return head
        if "effort" in wanted:
            raise UsageError(f"effort {head.effort!r} without thinking", "thinking on, or no effort")
        return replace(head, effort=None)

    def require(self, asked: Mapping[str, Any] | None, session: str) -> None:
        """Refuse options that differ from this head (SessionError naming each). None values count as not asked."""
        wanted = {k: v for k, v in _known(asked).items() if v is not None}
        have = self.to_json()
        other = [k for k, v in wanted.items() if _plain(v) != _plain(have[k])]
        if other:
            again = f", or evaluate this one again under a new head with `k3 replay {session} --into NEW`"
            raise SessionError(
                f"session {session!r} began with another {' and '.join(other)}",
                "the head it was created with, which is part of the evaluated prompt",
                # thinking stands in every recorded answer: no head changes that
                "start a new session" + ("" if "thinking" in other else again),
            )

    def evaluated_under(self, asked: Mapping[str, Any] | None) -> Head:
        """This head with `asked` in it, for the same answers evaluated anew. UsageError when thinking is switched."""
        wanted = {key: value for key, value in _known(asked).items() if value is not None}
        fresh = replace(self, **wanted | ({"tools": tuple(wanted["tools"])} if "tools" in wanted else {}))
        if fresh.thinking != self.thinking:
            raise UsageError(
                f"thinking switched {'on' if fresh.thinking else 'off'}",
                "as recorded in every answer",
                "start a new session for the other way",
            )
        return fresh

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"tools": [dict(tool) for tool in self.tools]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Head:
        """The inverse of `to_json`. DamagedError when keys are missing or unknown."""
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            raise DamagedError(
                f"the session's head has the keys {', '.join(sorted(data)) or '(none)'}",
                ", ".join(sorted(names)),
                "run `k3 verify`, or use the version of k3 that wrote the session",
            )
        return cls(**(dict(data) | {"tools": tuple(data["tools"])}))


def _known(asked: Mapping[str, Any] | None) -> Mapping[str, Any]:
    unknown = sorted(set(asked or ()) - set(OPTIONS))
    if unknown:
        raise UsageError(f"unknown head option {', '.join(unknown)}", ", ".join(OPTIONS))
    return asked or {}


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=list)
