"""Prompts, tool catalogues, tool results, and how a turn is pointed at."""

from __future__ import annotations

import io
import json
import sys

import pytest
from k3_sessions.types import Turn

from k3cli.commands.inputs import (
    bind_tool_results,
    parse_tool_results,
    read_request,
    read_system,
    read_tools,
)
from k3cli.commands.names import new_name, resolve_turn
from k3cli.errors import SessionError, UsageError

CALLS = [{"id": "c1", "name": "read"}, {"id": "c2", "name": "write"}, {"id": "c3", "name": "read"}]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stdin(monkeypatch):
    """Set what stdin holds; None is a terminal."""

    def put(data: bytes | None) -> None:
        stream = Terminal() if data is None else io.TextIOWrapper(io.BytesIO(data))
        monkeypatch.setattr(sys, "stdin", stream)

    put(None)
    return put


def test_the_prompt_option_never_reads_stdin(stdin, monkeypatch) -> None:
    class Untouchable(io.StringIO):
        @property
        def buffer(self):
            raise AssertionError("stdin was read")

    monkeypatch.setattr(sys, "stdin", Untouchable())
    assert read_request("hi", None).prompt == "hi"


def test_where_a_prompt_comes_from(stdin) -> None:
    stdin(b"piped\n\n")
    assert read_request(None, None).prompt == "piped"
    stdin(b"piped")
    assert read_request(None, "-").prompt == "piped"
    stdin(b"piped")
    assert read_request("-", None).prompt == "piped"
    stdin(b"piped\n")
    assert read_request("before", "-").prompt == "before\n\npiped"
    stdin(b"")
    assert read_request("before", "-").prompt == "before"


@pytest.mark.parametrize(("prompt", "dash", "data"), [(None, None, b""), (None, "-", b" \n"), (" ", None, None)])
def test_an_empty_prompt_is_refused(stdin, prompt, dash, data) -> None:
    stdin(data)
    with pytest.raises(UsageError, match="is empty"):
        read_request(prompt, dash)


def test_text_that_is_not_utf8_is_refused_with_its_place(stdin) -> None:
    stdin(b"ab\xff")
    with pytest.raises(UsageError, match="0xff at 2"):
        read_request(None, "-")


def test_no_prompt_needs_a_terminal_on_both_sides(stdin, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert not read_request(None, None).one_shot
    with pytest.raises(UsageError, match="--json"):
        read_request(None, None, json=True)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with pytest.raises(UsageError, match="stdout that is not a terminal"):
        read_request(None, None)


def test_what_is_for_one_turn_is_refused_at_a_prompt(stdin, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    stdin(None)
    tools, form = tmp_path / "t.json", tmp_path / "f.json"
    tools.write_text("[]")
    form.write_text('{"type": "json_object"}')
    one_turn = {"add_tools": str(tools), "tool_choice": "none", "response_format": str(form)}
    for key, value in one_turn.items():
        option = "--" + key.replace("_", "-")
        with pytest.raises(UsageError, match=f"^{option} without a prompt; expected -p TEXT"):
            read_request(None, None, **{key: value})
    with pytest.raises(UsageError, match=r"^--add-tools, --tool-choice and --response-format without"):
        read_request(None, None, **one_turn)
    assert not read_request(None, None, tool_choice="auto").one_shot  # which is what a prompt does
    assert read_request("x", None, **one_turn).one_shot


def test_other_arguments_and_choices_are_refused(stdin) -> None:
    with pytest.raises(UsageError, match="'hello'"):
        read_request(None, "hello")
    with pytest.raises(UsageError, match="auto, none or required"):
        read_request("x", None, tool_choice="always")
    with pytest.raises(UsageError, match="both the prompt and --tool-result"):
        read_request(None, "-", tool_result="-")


def test_a_tool_result_is_a_request_without_a_prompt(stdin, tmp_path) -> None:
    stdin(b"42\n")
    request = read_request(None, None, tool_result="-")
    assert request.one_shot
    assert request.prompt is None
    assert request.results == [{"content": "42\n"}]
    # a file as result leaves a piped stdin alone: scripts run with whatever stdin they inherit
    (tmp_path / "r").write_text("7")
    stdin(b"not a prompt")
    assert read_request(None, None, tool_result=str(tmp_path / "r")).prompt is None


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("plain\ntext", [{"content": "plain\ntext"}]),
        ('{"id": "c1", "content": "ok"}', [{"id": "c1", "content": "ok"}]),
        (
            '[{"content": "a"}, {"name": "n", "content": {"x": 1}}]',
            [{"content": "a"}, {"name": "n", "content": '{"x": 1}'}],
        ),
        ('{"temperature": 3}', [{"content": '{"temperature": 3}'}]),
        ("[1, 2]", [{"content": "[1, 2]"}]),
        ("[]", [{"content": "[]"}]),
        ("17", [{"content": "17"}]),
    ],
)
def test_shapes_of_tool_results(text, results) -> None:
    assert parse_tool_results(text, "x") == results


@pytest.mark.parametrize("text", ['{"content": "a", "ID": 1}', '{"content": "a", "id": 3}'])
def test_tool_results_with_wrong_keys_are_refused(text) -> None:
    with pytest.raises(UsageError):
        parse_tool_results(text, "x")


def bound(results, calls=CALLS):
    return [(message["tool_call_id"], message["content"]) for message in bind_tool_results(results, calls)]


def test_results_find_their_calls() -> None:
    assert bound([{"content": "x"}], CALLS[:1]) == [("c1", "x")]
    in_order = [("c1", "a"), ("c2", "b"), ("c3", "c")]
    assert bound([{"content": "a"}, {"content": "b"}, {"content": "c"}]) == in_order
    by_id = [{"id": "c3", "content": "c"}, {"id": "c1", "content": "a"}, {"id": "c2", "content": "b"}]
    assert bound(by_id) == in_order
    by_name = [{"name": "write", "content": "b"}, {"name": "read", "content": "a"}, {"name": "read", "content": "c"}]
    assert bound(by_name) == in_order


@pytest.mark.parametrize(
    ("results", "calls", "message"),
    [
        ([{"content": "x"}], [], "no tool call is open"),
        ([{"content": "x"}], CALLS, "names no call and several are open"),
        ([{"id": "c9", "content": "x"}], CALLS, "no open call fits the tool result id 'c9'"),
        ([{"id": "c1", "name": "write", "content": "x"}], CALLS, "no open call fits"),
        ([{"id": "c1", "content": "x"}], CALLS, "1 of 3 tool results"),
        ([{"content": "x"}, {"content": "y"}], CALLS[:1], "no open call fits"),
    ],
)
def test_results_that_do_not_fit_are_refused(results, calls, message) -> None:
    with pytest.raises(UsageError, match=message):
        bind_tool_results(results, calls)


def test_tool_catalogues(tmp_path) -> None:
    file = tmp_path / "t.json"
    tool = {"type": "function", "function": {"name": "f"}}
    for data in ([tool], {"tools": [tool]}):
        file.write_text(json.dumps(data))
        assert read_tools(str(file)) == [tool]
    for text, message in (
        ("[", "is not JSON"),
        ('{"a": 1}', "an object"),
        ("[1]", "is no function"),
        ("3", "a number"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_tools(str(file))
    with pytest.raises(UsageError, match="No such file"):
        read_tools(str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="names no file"):
        read_tools("")
    assert read_tools(None) is None


@pytest.mark.parametrize(
    "text",
    [
        '[{"type": "function"}]',
        '[{"type": "function", "function": {"name": "f", "parameters": 5}}]',
        '[{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}]',
        '[{"type": "function", "function": {"name": "f", "parameters": {"x": NaN}}}]',
        '[{"type": "function", "function": {"name": "f", "description": "\\ud800"}}]',
        "[" * 100_000,
        f"[{'9' * 5000}]",
    ],
    ids=["no name", "no schema", "twice", "nan", "surrogate", "deep", "long number"],
)
def test_a_catalogue_no_model_could_take_is_refused_before_one_is_loaded(tmp_path, text) -> None:
    file = tmp_path / "t.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"--tools .*t\.json"):
        read_tools(str(file))


def test_a_response_format_is_checked_before_a_model_is_loaded(tmp_path, stdin) -> None:
    file = tmp_path / "r.json"
    file.write_text('{"type": "xml"}')
    with pytest.raises(UsageError, match="xml"):
        read_request("hi", None, response_format=str(file))
    file.write_text('{"type": "json_object"}')
    assert read_request("hi", None, response_format=str(file)).response_format == {"type": "json_object"}


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000])
def test_json_that_cannot_be_read_is_the_text_of_a_tool_result(text) -> None:
    assert parse_tool_results(text, "here") == [{"content": text}]


def test_bytes_on_the_command_line_that_are_no_text(stdin) -> None:
    with pytest.raises(UsageError, match="no UTF-8 at character 2"):
        read_request(b"hi\xff".decode("utf-8", "surrogateescape"), None)


def test_system_text(tmp_path) -> None:
    file = tmp_path / "s.txt"
    file.write_text("Be brief.\n")
    assert read_system(str(file)) == "Be brief."
    file.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        read_system(str(file))


def turn(turn_id: str) -> Turn:
    return Turn(turn_id, None, 0, (1,), 1, "2026-01-01T00:00:00Z", {}, True)


TURNS = [turn("abc1" + "0" * 60), turn("abd2" + "0" * 60), turn("12ff" + "0" * 60)]


@pytest.mark.parametrize(
    ("wanted", "number"), [("1", 1), ("3", 3), ("-1", 3), ("-3", 1), ("abc", 1), ("ABD2", 2), ("12f", 3), ("top", 2)]
)
def test_a_turn_by_number_id_or_mark(wanted, number) -> None:
    assert resolve_turn(TURNS, wanted, "s", {"top": TURNS[1].id}) is TURNS[number - 1]


@pytest.mark.parametrize("wanted", ["0", "4", "-4", "zz", "", "deadbeef"])
def test_no_such_turn(wanted) -> None:
    with pytest.raises(SessionError, match="no turn"):
        resolve_turn(TURNS, wanted, "s")


def test_the_start_of_an_id_that_is_all_digits_is_no_number() -> None:
    turns = [*TURNS, turn("9750848401" + "a" * 54)]
    assert resolve_turn(turns, "97508484", "s") is turns[3]
    assert resolve_turn(turns, "975084", "s") is turns[3]
    for wanted in ("97508", "97508485", "-97508484"):
        with pytest.raises(SessionError, match="1 to 4"):
            resolve_turn(turns, wanted, "s")


def test_an_ambiguous_prefix_lists_what_it_fits() -> None:
    with pytest.raises(UsageError) as caught:
        resolve_turn(TURNS, "ab", "s")
    assert "abc1" in str(caught.value)
    assert "abd2" in str(caught.value)


def test_new_names_are_free() -> None:
    seen: set[str] = set()

    def taken(name: str) -> bool:
        first = not seen
        seen.add(name)
        return first

    assert new_name(taken) in seen
    assert len(seen) == 2
