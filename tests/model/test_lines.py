"""Messages of rank 0 to ranks on the same machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from k3cli.model.lines import Lines


@pytest.fixture(params=[0.0, 0.2], ids=["woken", "looking out"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Lines, list[Lines]]]:
    """Rank 0's end, and those of two others."""
    pairs = [socket.socketpair() for _ in range(2)]
    zero = Lines([mine for mine, _ in pairs])
    others = [Lines([theirs], request.param) for _, theirs in pairs]
    yield zero, others
    for end in (zero, *others):
        end.close()


def test_every_message_to_everybody_in_order(ends: tuple[Lines, list[Lines]]):
    zero, others = ends
    messages = [bytes([number]) * size for number, size in enumerate((1, 256, 5_000, 256))]
    for message in messages:
        zero.post(message, 1.0)
    for other in others:
        assert [other.fetch(len(message)) for message in messages] == messages


def test_a_late_message_is_waited_for(ends: tuple[Lines, list[Lines]]):
    zero, (first, _) = ends
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(first.fetch(6)))
    waiting.start()
    time.sleep(0.3)  # longer than it looks out
    zero.post(b"abc", 1.0)
    zero.post(b"def", 1.0)
    waiting.join(5)
    assert found == [b"abcdef"]


def test_an_end_that_is_gone(ends: tuple[Lines, list[Lines]]):
    zero, (first, second) = ends
    first.close()
    with pytest.raises(RuntimeError, match="connection to a peer broke"):
        zero.post(b"abc", 1.0)
    zero.close()
    with pytest.raises(RuntimeError, match="has ended"):
        second.fetch(3)


def test_an_end_that_takes_nothing(ends: tuple[Lines, list[Lines]]):
    zero, _ = ends
    began, full = time.monotonic(), bytes(8 << 20)  # more than a socket holds
    with pytest.raises(RuntimeError, match="timed out"):
        zero.post(full, 0.2)
    assert time.monotonic() - began < 5
