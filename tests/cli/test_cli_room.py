"""A quota with real commands: the state of the least recent session gives way, what is pinned, marked or open stays."""

from __future__ import annotations

import pytest

from k3cli.errors import Exit

LONG = "word " * 80


def allocated(k3) -> int:
    return k3("du", "--json").one("done")["allocated"]


def evicted(done) -> list[str]:
    return [event["message"].split()[4] for event in done.events if event.get("code") == "evicted"]


def turns(k3, name: str) -> list[str]:
    return [event["id"] for event in k3("log", name, "--json").events if event["type"] == "turn"]


def shown(k3, name: str) -> dict:
    return k3("show", name, "--json").events[0]


@pytest.fixture
def full(k3, monkeypatch):
    """Sessions old, marked and newer, in this order, and a quota with room for one turn more."""
    for name in ("old", "marked", "newer"):
        assert k3("chat", "-s", name, "-p", f"{name} {LONG}").code == 0
        assert k3("resume", name, "-p", "more").code == 0
    assert k3("mark", "marked", "keep").code == 0
    quota = allocated(k3) + 64 * 1024 + 16 * 1024
    monkeypatch.setenv("K3_QUOTA", str(quota))
    return quota


def test_the_least_recent_session_gives_its_state_and_keeps_its_turns(k3, full) -> None:
    ids = turns(k3, "old")
    gone: list[str] = []
    for number in range(12):
        done = k3("chat", "-s", "new", "-p", f"{number} {LONG}", "--json")
        assert done.code == 0
        assert allocated(k3) <= full
        gone += evicted(done)
        if shown(k3, "old").get("evicted"):
            break
    assert gone[0] == "old"
    assert turns(k3, "old") == ids
    assert k3("verify").code == 0
    assert k3("gc", "--dry-run", "--json").one("done")["files"] == 0
    assert k3("resume", "old", "-p", "again", "--require-cached").code == Exit.SESSION
    marked = k3("resume", "marked", "-p", "again", "--json")
    assert marked.one("session")["replayed"] == 0
    done = k3("resume", "old", "-p", "again", "--json")
    assert done.code == 0
    assert done.one("session")["replayed"] > 0
    assert turns(k3, "old")[:2] == ids
    assert k3("replay", "old").code == 0


def test_an_open_session_keeps_its_state(k3, full, terminal) -> None:
    chat = terminal("resume", "old")
    chat.expect("k3>")
    gone: list[str] = []
    for number in range(6):
        done = k3("chat", "-s", "new", "-p", f"{number} {LONG}", "--json")
        gone += evicted(done)
    assert gone
    assert "old" not in gone
    chat.send("still there\r")
    chat.expect("You said: still there")
    chat.send("/quit\r")
    chat.close()
    assert k3("verify").code == 0
