"""`k3 replay`: equal runs end with 0, different ones with 7 and the place; scores and new sessions."""

from __future__ import annotations

import pytest

from k3cli.errors import Exit


@pytest.fixture
def talked(k3):
    for text in ("one", "think two", "three"):
        k3("chat", "-s", "a", "-p", text)
    return k3


def test_a_replay_that_is_equal(talked) -> None:
    done = talked("replay", "a")
    assert done.code == 0
    assert "replay of a is equal: 3 turns" in done.out
    assert [line.split(":")[0].split()[1] for line in done.out.splitlines()[:3]] == ["1", "2", "3"]
    events = talked("replay", "a", "--json").events
    assert events[-1]["type"] == "done"
    assert events[-1]["equal"] is True
    assert events[-1]["checkpoints"] == 3
    assert events[-1]["tokens"] > 100


def test_part_of_a_session(talked) -> None:
    done = talked("replay", "a", "--from", "2", "--to", "-2", "--json")
    assert done.code == 0
    assert [e["number"] for e in done.events if e["type"] == "turn_replayed"] == [2]
    assert talked("replay", "a", "--from", "3", "--to", "1").code == Exit.USAGE
    assert talked("replay", "a", "--from", "9").code == Exit.SESSION


def test_a_replay_that_differs_says_where(talked, scripted, monkeypatch) -> None:
    plain = scripted.ScriptedModel._reply

    def other(self, prompt, thinking):
        reply = plain(self, prompt, thinking)
        if self._asked(prompt) == "three":
            reply[-20] = 65
        return reply

    monkeypatch.setattr(scripted.ScriptedModel, "_reply", other)
    done = talked("replay", "a")
    assert done.code == Exit.REPLAY_DIFFERS
    lines = done.out.splitlines()
    assert "differs at position" in lines[2]
    assert "65 generated" in lines[2]
    assert "margin" in lines[2]
    assert "first in turn 3" in done.err
    as_events = talked("replay", "a", "--json")
    assert as_events.code == Exit.REPLAY_DIFFERS
    assert as_events.one("difference")["got"] == 65
    assert as_events.events[-1]["type"] == "error"
    assert as_events.events[-1]["exit_code"] == 7


def test_a_state_that_differs_is_found(talked, scripted, monkeypatch) -> None:
    def other(self):
        found = plain(self)
        found["recurrent"][0, 1] += 1
        return found

    plain = scripted.ScriptedState.checkpoint
    monkeypatch.setattr(scripted.ScriptedState, "checkpoint", other)
    done = talked("replay", "a", "--from", "1", "--to", "1")
    assert done.code == Exit.REPLAY_DIFFERS
    assert "state field recurrent of layer 0, by up to 1" in done.out


def test_other_weights_cannot_replay_but_score(talked) -> None:
    assert talked("replay", "a", "--model", "other").code == Exit.MODEL
    done = talked("replay", "a", "--score", "--model", "other", "--json")
    assert done.code == 0
    scores = [e for e in done.events if e["type"] == "score"]
    assert [e["number"] for e in scores] == [1, 2, 3]
    assert all(e["nats"] <= 0 and e["perplexity"] == pytest.approx(1, abs=1e-3) for e in scores)
    assert "perplexity 1.000" in talked("replay", "a", "--score").out


def test_into_a_new_session_under_other_weights(talked) -> None:
    done = talked("replay", "a", "--into", "b", "--model", "other")
    assert (done.code, done.out) == (0, "b\n")
    assert talked("resume", "b", "-p", "more", "--model", "other").out == "You said: more\n"
    assert talked("resume", "b", "-p", "more").code == Exit.MODEL
    assert talked("replay", "a", "--into", "b", "--model", "other").code == Exit.SESSION


def test_into_a_new_session_with_another_head(talked) -> None:
    done = talked("replay", "a", "--into", "b", "--effort", "low", "--json")
    assert done.code == 0
    assert done.events[-1] == {"v": 1, "type": "done", "name": "b"}
    assert talked("show", "b", "--json").one("session_info")["fixed"]["head"]["effort"] == "low"
    assert "one" in talked("replay", "b", "--show").out
