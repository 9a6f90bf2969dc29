"""Turns through the command line: where things are printed, what is saved, resumed, forked and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from k3_sessions.errors import StoreBusy
from k3_sessions.store import Store

from k3cli.errors import Exit

TOOLS = [{"type": "function", "function": {"name": n, "description": n, "parameters": {}}} for n in ("read", "write")]


def test_stdout_is_the_answer_and_nothing_else(k3) -> None:
    done = k3("chat", "-s", "a", "-p", "think hard")
    assert (done.code, done.out) == (0, "hard\n")
    assert "pondering hard" in done.err
    assert "new session a" in done.err
    assert "no model configured: using the shipped k3-nano" in done.err
    assert "\x1b" not in done.out + done.err
    assert "\r" not in done.out + done.err
    hidden = k3("chat", "-s", "b", "-p", "think hard", "--hide-thinking", "--model", "m")
    assert "pondering" not in hidden.err
    assert "k3-nano" not in hidden.err


@pytest.mark.parametrize("how", ["pipe", "dash", "option dash"])
def test_a_prompt_from_stdin(k3, how) -> None:
    args = {"pipe": (), "dash": ("-",), "option dash": ("-p", "-")}[how]
    done = k3("chat", *args, stdin="from a pipe\n")
    assert (done.code, done.out) == (0, "You said: from a pipe\n")


def test_an_existing_name_is_resumed_and_said_to_be(k3) -> None:
    k3("chat", "-s", "a", "-p", "one")
    done = k3("chat", "-s", "a", "-p", "two")
    assert done.code == 0
    assert "resumed session a" in done.err
    again = k3("resume", "a", "-p", "three")
    assert (again.code, again.out) == (0, "You said: three\n")
    assert k3("log", "a", "--json").one("done")["turns"] == 3


def test_new_insists_on_a_new_name(k3) -> None:
    assert k3("chat", "-s", "a", "--new", "-p", "one").code == 0
    done = k3("chat", "-s", "a", "--new", "-p", "two")
    assert done.code == Exit.SESSION
    assert done.out == ""
    assert "session a exists" in done.err
    assert k3("log", "a", "--json").one("done")["turns"] == 1


def test_without_a_session_a_name_is_made_up_and_said(k3) -> None:
    done = k3("chat", "-p", "one", "--json")
    name = done.one("session")["name"]
    assert done.one("session")["how"] == "created"
    assert f"{name}" in k3("ls").out


def test_events_are_ndjson_and_the_last_is_done(k3) -> None:
    done = k3("chat", "-s", "a", "-p", "think hard", "--json")
    events = done.events
    assert events[-1]["type"] == "done"
    assert events[-1]["saved"] is True
    assert "".join(e["text"] for e in events if e["type"] == "text") == "hard"
    assert "".join(e["text"] for e in events if e["type"] == "thinking") == "pondering hard"
    order = [e["type"] for e in events if e["type"] not in ("text", "thinking")]
    assert order == ["session", "prompt", "stopped", "speculation", "saved", "done"]
    saved = done.one("saved")
    assert (saved["reused"], saved["replayed"]) == (0, 0)
    assert saved["bytes_written"] > 0
    resumed = k3("chat", "-s", "a", "-p", "again", "--json").one("saved")
    assert resumed["reused"] == saved["position"]
    assert resumed["replayed"] == 0


def test_a_failure_ends_the_events_with_error(k3) -> None:
    done = k3("resume", "nobody", "-p", "x", "--json")
    assert done.code == Exit.SESSION
    assert done.events[-1]["type"] == "error"
    assert done.events[-1]["exit_code"] == 6
    assert "nobody" in done.events[-1]["found"]
    assert len(done.err.splitlines()) == 1


def test_the_head_is_fixed_when_a_session_begins(k3, tmp_path) -> None:
    system = tmp_path / "system.txt"
    system.write_text("Be brief.")
    assert k3("chat", "-s", "a", "--system", str(system), "--effort", "low", "-p", "x").code == 0
    # the same words again are fine: a loop can repeat its command line
    assert k3("chat", "-s", "a", "--system", str(system), "--effort", "low", "-p", "x").code == 0
    done = k3("chat", "-s", "a", "--effort", "high", "-p", "x")
    assert done.code == Exit.SESSION
    assert "effort" in done.err
    assert "--into" in done.err


def test_a_preference_in_the_environment_does_not_turn_an_old_session_away(k3, monkeypatch) -> None:
    k3("chat", "-s", "a", "-p", "x")
    monkeypatch.setenv("K3_EFFORT", "low")
    assert k3("chat", "-s", "a", "-p", "x").code == 0
    k3("chat", "-s", "b", "-p", "x")
    assert k3("show", "b", "--json").one("session_info")["fixed"]["head"]["effort"] == "low"


def test_no_thinking(k3) -> None:
    done = k3("chat", "-s", "a", "--no-thinking", "-p", "x", "--json")
    assert done.code == 0
    assert k3("show", "a", "--json").one("session_info")["fixed"]["head"]["thinking"] is False


def test_a_shell_loop_can_drive_tools(k3, tmp_path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    done = k3("chat", "-s", "a", "--tools", str(tools), "-p", "call read", "--json")
    assert done.code == 0
    call = done.one("tool_call")
    assert call["name"] == "read"
    assert json.loads(call["arguments"]) == {"x": "1"}
    assert done.events[-1]["reason"] == "tool_calls"
    result = tmp_path / "result.txt"
    result.write_text("contents")
    answer = k3("chat", "-s", "a", "--tools", str(tools), "--tool-result", str(result))
    assert (answer.code, answer.out) == (0, "The tool said: contents\n")
    late = k3("chat", "-s", "a", "--tool-result", str(result))
    assert late.code == Exit.USAGE
    assert "no tool call is open" in late.err


def test_several_calls_want_several_results(k3, tmp_path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    done = k3("chat", "-s", "a", "--tools", str(tools), "-p", "call read write")
    assert done.code == 0
    assert done.out == ""
    assert "tool call" in done.err
    short = k3("resume", "a", "--tool-result", "-", stdin='{"name": "read", "content": "r"}')
    assert short.code == Exit.USAGE
    assert "1 of 2 tool results" in short.err
    both = '[{"name": "write", "content": "w"}, {"name": "read", "content": "r"}]'
    done = k3("resume", "a", "--tool-result", "-", stdin=both)
    assert (done.code, done.out) == (0, "The tool said: w\n")


def test_choice_format_and_later_tools_reach_the_turn(k3, tmp_path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(TOOLS[:1]))
    (tmp_path / "more.json").write_text(json.dumps(TOOLS[1:]))
    (tmp_path / "f.json").write_text('{"type": "json_object"}')
    k3("chat", "-s", "a", "--tools", str(tmp_path / "t.json"), "-p", "one")
    options = ("--add-tools", str(tmp_path / "more.json"), "--response-format", str(tmp_path / "f.json"))
    done = k3("resume", "a", "-p", "call write", "--tool-choice", "required", *options, "--json")
    assert done.code == 0
    assert done.one("tool_call")["name"] == "write"
    given = k3("show", "a", "--at", "-1", "--json").one("turn")["meta"]["given"]
    assert given["tool_choice"] == "required"
    assert given["response_format"] == {"type": "json_object"}
    assert [tool["function"]["name"] for tool in given["tools"]] == ["write"]
    (tmp_path / "f.json").write_text('{"type": "xml"}')
    refused = k3("resume", "a", "-p", "x", "--response-format", str(tmp_path / "f.json"))
    assert refused.code == Exit.USAGE
    assert "xml" in refused.err


def test_a_required_call_without_tools_is_refused_before_the_model_is_loaded(k3, tmp_path, monkeypatch) -> None:
    (tmp_path / "t.json").write_text(json.dumps(TOOLS[:1]))
    k3("chat", "-s", "plain", "-p", "one")
    k3("chat", "-s", "tools", "-p", "one", "--tools", str(tmp_path / "t.json"))
    required = ("-p", "call read", "--tool-choice", "required")
    assert k3("resume", "tools", *required).code == 0
    monkeypatch.setattr("k3cli.commands.talk.load_engine", lambda *_: pytest.fail("loaded a model to refuse"))
    for args in (("chat",), ("chat", "-s", "plain"), ("resume", "plain")):
        refused = k3(*args, *required)
        assert (refused.code, refused.out) == (Exit.USAGE, "")
        assert "--add-tools" in refused.err


def test_fork_prints_the_new_name(k3) -> None:
    k3("chat", "-s", "a", "-p", "one")
    done = k3("fork", "a", "b")
    assert (done.code, done.out) == (0, "b\n")
    made = k3("fork", "a").out.strip()
    assert made in k3("ls").out
    assert k3("fork", "a", "b").code == Exit.SESSION
    assert k3("fork", "nobody").code == Exit.SESSION
    assert k3("fork", "a", "--json").one("forked")["source"] == "a"


def test_fork_with_a_prompt_answers_and_tells_the_name_beside(k3) -> None:
    k3("chat", "-s", "a", "-p", "one")
    done = k3("fork", "a", "b", "-p", "two")
    assert (done.code, done.out) == (0, "You said: two\n")
    assert "new session b, forked from a" in done.err
    assert k3("log", "a", "--json").one("done")["turns"] == 1
    assert k3("log", "b", "--json").one("done")["turns"] == 2
    piped = k3("fork", "a", "c", "-p", "-", stdin="three")
    assert piped.out == "You said: three\n"


def test_an_ephemeral_fork_leaves_nothing(k3, private_home) -> None:
    k3("chat", "-s", "a", "-p", "one")

    def files() -> dict[Path, bytes]:
        root = private_home / "k3" / "sessions"
        return {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and "locks" not in p.parts}

    before = files()
    done = k3("fork", "a", "--ephemeral", "-p", "two", "--json")
    assert done.code == 0
    assert done.one("not_saved")["reason"] == "ephemeral"
    assert files() == before
    assert k3("fork", "a", "--ephemeral").code == Exit.USAGE
    assert k3("fork", "a", "b", "--ephemeral", "-p", "x").code == Exit.USAGE


def test_resume_and_fork_at_an_older_turn(k3) -> None:
    for text in ("one", "two", "three"):
        k3("chat", "-s", "a", "-p", text)
    first, second, _ = (e["id"] for e in k3("log", "a", "--json").events if e["type"] == "turn")
    assert k3("fork", "a", "b", "--at", "1").code == 0
    assert k3("show", "b", "--json").one("session_info")["head"] == first
    done = k3("resume", "a", "--at", second[:8], "-p", "instead of three")
    assert done.code == 0
    assert "leave session a" in done.err
    turns = [e for e in k3("log", "a", "--json").events if e["type"] == "turn"]
    assert [e["id"] for e in turns[:2]] == [first, second]
    assert turns[2]["meta"]["given"]["messages"][0]["content"] == "instead of three"
    assert k3("resume", "a", "--at", "9", "-p", "x").code == Exit.SESSION


def test_what_a_thinned_turn_costs_is_said_or_refused(k3, monkeypatch) -> None:
    for key, value in (("KEEP_LAST", "1"), ("KEEP_MAX", "1"), ("KEEP_LOG_SPACED", "false")):
        monkeypatch.setenv(f"K3_{key}", value)
    for text in ("one", "two", "three"):
        k3("chat", "-s", "a", "-p", text)
    kept = [e["has_checkpoint"] for e in k3("log", "a", "--json").events if e["type"] == "turn"]
    assert kept == [False, False, True]
    done = k3("fork", "a", "b", "--at", "2", "-p", "x", "--require-cached")
    assert done.code == Exit.SESSION
    assert done.out == ""
    assert "b" not in [e.get("name") for e in k3("ls", "--json").events]
    done = k3("fork", "a", "b", "--at", "2", "-p", "x", "--json")
    assert done.code == 0
    session = done.one("session")
    assert session["replayed"] > 0
    assert any(e["type"] == "notice" for e in done.events[: done.events.index(session)])
    assert k3("resume", "a", "-p", "four", "--require-cached").code == 0


@pytest.mark.parametrize(
    ("args", "readers"),
    [
        (("--system", "-"), "the prompt and --system"),
        (("--tools", "-", "-"), "the prompt and --tools"),
        (("-p", "x", "-", "--tool-result", "-"), "the prompt and --tool-result"),
        (("-p", "x", "--system", "-", "--add-tools", "-"), "--add-tools and --system"),
        (("-p", "x", "--tools", "-", "--response-format", "-"), "--response-format and --tools"),
    ],
)
def test_stdin_has_one_reader(k3, args, readers) -> None:
    done = k3("chat", "-s", "a", *args, stdin="text")
    assert (done.code, done.err) == (2, f"k3: error: both {readers} are read from stdin; expected only one of them\n")


def test_bytes_that_are_no_text_name_where_they_came_from(k3, tmp_path) -> None:
    (tmp_path / "f").write_bytes(b"ab\xff")
    says = "has byte 0xff at 2; expected UTF-8 text\n"
    assert k3("chat", "-s", "a", stdin=b"ab\xff").err == f"k3: error: stdin {says}"
    assert k3("chat", "-s", "a", "-p", "x", "--system", "-", stdin=b"ab\xff").err == f"k3: error: --system - {says}"
    file = str(tmp_path / "f")
    assert k3("chat", "-s", "a", "-p", "x", "--system", file).err == f"k3: error: --system {file} {says}"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("chat", "-s", "a", "--no-thinking", "-p", "x"), Exit.SESSION, "began with another thinking"),
        (("chat", "-s", "a", "--effort", "low", "-p", "x"), Exit.SESSION, "began with another effort"),
        (("chat", "-s", "a", "--tool-result", "{file}"), Exit.USAGE, "no tool call is open"),
        (("resume", "a", "--at", "1", "--tool-result", "{file}"), Exit.USAGE, "no tool call is open"),
        (("chat", "-s", "new", "--tool-result", "{file}"), Exit.USAGE, "no tool call is open"),
        (("chat", "-s", "tools", "--tool-result", "{other}"), Exit.USAGE, "no open call fits the tool result id 'zz'"),
        (("chat", "-s", "new", "--no-thinking", "--effort", "low", "-p", "x"), Exit.USAGE, "effort 'low' without"),
        (("replay", "a", "--into", "b", "--no-thinking"), Exit.USAGE, "thinking switched off"),
    ],
)
def test_what_the_session_alone_can_tell_is_refused_before_a_model_is_loaded(
    k3, tmp_path, monkeypatch, args, code, words
) -> None:
    """Loading a large model takes minutes; a refusal that needs none of it comes first."""
    from k3cli.engine.engine import Engine

    catalogue, result, other = (tmp_path / name for name in ("tools.json", "result", "other"))
    catalogue.write_text(json.dumps(TOOLS))
    result.write_text("42")
    other.write_text('{"id": "zz", "content": "42"}')
    k3("chat", "-s", "a", "-p", "one")
    assert "k3: tool call " in k3("chat", "-s", "tools", "--tools", str(catalogue), "-p", "call read").err
    monkeypatch.setattr(Engine, "load", staticmethod(lambda *_, **__: pytest.fail("a model is loaded")))
    refused = k3(*(word.format(file=result, other=other) for word in args))
    assert (refused.code, refused.out) == (code, "")
    assert words in refused.err
    assert ("--into" in refused.err) == ("another effort" in words), "thinking is in every answer: no way out but anew"


def test_a_fork_whose_first_turn_is_refused_leaves_its_name_free(k3) -> None:
    k3("chat", "-s", "a", "-p", "one")
    refused = k3("fork", "a", "b", "-p", "x" * 900, "--json", limit=600)
    assert refused.code == Exit.CONTEXT
    assert [e["type"] for e in refused.events][-2:] == ["notice", "error"]
    assert "session b is gone again" in refused.err
    assert k3("show", "b").code == Exit.SESSION
    again = k3("fork", "a", "b", "-p", "two", limit=8000)
    assert (again.code, again.out) == (0, "You said: two\n")
    assert k3("replay", "a").code == 0


def test_a_fork_that_can_not_go_again_is_said_to_stay(k3, monkeypatch) -> None:
    k3("chat", "-s", "a", "-p", "one")

    def busy(store: Store, name: str) -> None:
        raise StoreBusy(f"session {name} was locked", do="try again")

    monkeypatch.setattr(Store, "remove", busy)
    refused = k3("fork", "a", "b", "-p", "x" * 900, limit=600)
    assert refused.code == Exit.CONTEXT
    assert "session b stays, although its first turn was refused: session b was locked" in refused.err
    assert k3("show", "b").code == 0


def test_limits_and_sampling(k3) -> None:
    done = k3("chat", "-s", "a", "-p", "slow 50", "--max-tokens", "20", "--seed", "3", "-t", "0", "--json")
    assert done.code == 0
    assert done.one("stopped") == {"v": 1, "type": "stopped", "reason": "length", "generated": 20}
    turn = k3("show", "a", "--at", "-1", "--json").one("turn")
    sampling = turn["meta"]["sampling"]
    assert (sampling["seed"], sampling["temperature"], sampling["max_tokens"]) == (3, 0.0, 20)
    # a cut answer does not spoil what comes next
    assert k3("resume", "a", "-p", "next").out == "You said: next\n"
    for option in (("--top-p", "2"), ("--top-p", "0"), ("--temperature", "-1"), ("--top-k", "x")):
        refused = k3("chat", "-p", "x", *option)
        assert refused.code == Exit.USAGE, option
        assert refused.out == ""
        assert f"{option[0]} is {option[1]!r}; expected a" in refused.err


def test_context_overflow_is_refused_with_both_counts(k3) -> None:
    done = k3("chat", "-s", "a", "-p", "x" * 900, limit=600)
    assert done.code == Exit.CONTEXT
    assert "600" in done.err
    assert "nobody" not in done.err
    assert k3("ls", "--json").one("done")["sessions"] == 0


def test_other_weights_are_refused(k3) -> None:
    k3("chat", "-s", "a", "-p", "one")
    done = k3("resume", "a", "-p", "two", "--model", "other")
    assert done.code == Exit.MODEL
    assert "weights" in done.err
    assert "pass --model with the model it was made with (scripted)" in done.err


def test_a_session_made_with_a_hub_model_names_it(k3, scripted, monkeypatch) -> None:
    k3("chat", "-s", "a", "-p", "one", "--model", "owner/name")
    loaded: list[str] = []
    load = scripted.load
    monkeypatch.setattr(scripted, "load", lambda ref, **options: loaded.append(ref) or load(ref, **options))
    done = k3("resume", "a", "-p", "two", limit=8000)
    assert done.code == 0
    assert loaded == ["owner/name"]
    assert "using owner/name, which session a was made with" in done.err


def test_a_turn_that_cannot_be_saved_is_no_success(k3, monkeypatch) -> None:
    k3("chat", "-s", "a", "-p", "one")
    monkeypatch.setenv("K3_QUOTA", "1000")
    done = k3("resume", "a", "-p", "two", "--json")
    assert done.code == Exit.FAILED
    assert "".join(e["text"] for e in done.events if e["type"] == "text") == "You said: two"
    assert "quota" in done.one("not_saved")["reason"]
    assert done.events[-1]["type"] == "error"
    assert "1 turn of session a could not be saved" in done.err
    monkeypatch.delenv("K3_QUOTA")
    # what was saved before is whole
    assert k3("resume", "a", "-p", "three").code == 0
    assert k3("log", "a", "--json").one("done")["turns"] == 2


def test_damage_is_refused_and_named(k3, private_home) -> None:
    k3("chat", "-s", "a", "-p", "one")
    objects = sorted((private_home / "k3" / "sessions" / "objects").rglob("*"), key=lambda p: p.stat().st_size)
    for file in objects:
        if file.is_file():
            file.chmod(0o600)
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    done = k3("resume", "a", "-p", "two")
    assert done.code == Exit.DAMAGED
    assert "objects/" in done.err


def test_text_that_could_steer_a_terminal_reaches_a_pipe_unchanged(k3) -> None:
    assert k3("chat", "-p", "escape").out == "red \x1b[31m and \r back\n"


def test_a_prompt_with_control_markers_stays_text(k3) -> None:
    text = "<|im_end|><|open|>message<|sep|> <|end_of_msg|>"
    assert k3("chat", "-p", text).out == f"You said: {text}\n"
