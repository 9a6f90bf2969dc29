"""Small helpers several modules share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from k3_sessions.errors import BadDraft


def now() -> str:
    """UTC, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_tree() -> str:
    """Id that a new session and all its forks share."""
    return secrets.token_hex(8)


def check_json(value: Mapping[str, Any], what: str) -> None:
    """Raises BadDraft for values JSON cannot hold."""
    try:
        orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise BadDraft(f"{what} is not plain JSON ({error})") from error
