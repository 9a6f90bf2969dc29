"""Streaming parser of K3: channels, calls, cuts at every id, disorder; and histories read back."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3cli.chat.arguments import is_json_object
from k3cli.chat.events import (
    ChatEvent,
    End,
    Malformed,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallStart,
)
from k3cli.chat.parser import StreamParser
from k3cli.chat.renderer import Renderer
from k3cli.chat.tokenizer import Tokenizer

MARKER = re.compile(r"(<\|(?:open|close|sep|end_of_msg|media_pad)\|>|\[EOS\])")
CALL = (
    '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Par"is🙂'
    '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3.0<|close|>argument<|sep|>'
    "<|close|>call<|sep|>"
)
EMPTY_CALL = '<|open|>call tool="now &amp; &quot;then&quot;" index="2"<|sep|><|close|>call<|sep|>'
END = "<|close|>message<|sep|><|end_of_msg|>"
BLOCK = '<|open|>json type="object"<|sep|>{}<|close|>json<|sep|>'
NULL = '<|open|>argument key="a" type="null"<|sep|>null<|close|>argument<|sep|>'
FULL = (
    "Need weather.<|close|>think<|sep|><|open|>response<|sep|>Läuft 🙂<|close|>response<|sep|>"
    f"<|open|>tools<|sep|>{CALL}{EMPTY_CALL}<|close|>tools<|sep|>{END}"
)
CITY_CALL = ("get_weather", '{"city": "Par\\"is🙂", "days": 3.0}')


def to_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of an answer written with its markers."""
    ids: list[int] = []
    for piece in MARKER.split(text):
        ids += [tokenizer.special(piece)] if MARKER.fullmatch(piece) else tokenizer.encode_text(piece)
    return ids


def run(parser: StreamParser, ids: list[int], reason: str = "length") -> list[ChatEvent]:
    events = [event for token in ids for event in parser.feed(token)]
    return events + parser.finish(reason)


def read(renderer: Renderer, text: str, *, thinking: bool = True) -> tuple[StreamParser, list[ChatEvent]]:
    parser = renderer.parser(thinking, mint=iter(map("c{}".format, range(1, 99))).__next__)
    return parser, run(parser, to_ids(renderer.tokenizer, text))


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def reasons(events: list[ChatEvent]) -> list[str]:
    return [event.reason for event in events if isinstance(event, Malformed)]


class TestWellFormed:
    def test_thinking_response_and_calls(self, xtml: Renderer) -> None:
        parser, events = read(xtml, FULL)
        assert "".join(e.text for e in events if isinstance(e, ThinkingDelta)) == "Need weather."
        assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "Läuft 🙂"
        assert [e for e in events if isinstance(e, ToolCall)] == [
            ToolCall(1, "c1", *CITY_CALL),
            ToolCall(2, "c2", 'now & "then"', "{}"),
        ]
        assert [(e.index, e.name) for e in events if isinstance(e, ToolCallStart)] == [
            (1, "get_weather"),
            (2, 'now & "then"'),
        ]
        assert events[-1] == End("stop")
        assert reasons(events) == []
        assert parser.close_ids() == []
        assert parser.finish("length") == [], "the end is reported once"
        message = parser.message()
        assert (message["content"], message["reasoning_content"]) == ("Läuft 🙂", "Need weather.")
        assert calls_of(message) == [CITY_CALL, ('now & "then"', "{}")]

    def test_arguments_stream_in_pieces_that_join_to_the_whole(self, xtml: Renderer) -> None:
        _, events = read(xtml, FULL)
        for call in (e for e in events if isinstance(e, ToolCall)):
            pieces = [e.text for e in events if isinstance(e, ToolCallDelta) and e.index == call.index]
            assert "".join(pieces) == call.arguments_json
        assert sum(isinstance(e, ToolCallDelta) and e.index == 1 for e in events) > 6

    def test_not_thinking(self, xtml: Renderer) -> None:
        parser, events = read(xtml, f"hi<|close|>response<|sep|>{END}", thinking=False)
        assert parser.message() == {"role": "assistant", "content": "hi"}
        assert reasons(events) == []

    def test_json_block_is_the_whole_arguments(self, xtml: Renderer) -> None:
        block = '<|open|>json type="object"<|sep|>{"a": [1,\n2]}<|close|>json<|sep|>'
        text = f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{block}<|close|>call<|sep|>{END}'
        parser, events = read(xtml, text)
        assert calls_of(parser.message()) == [("f", '{"a": [1,\n2]}')]
        assert reasons(events) == []

    def test_markers_typed_as_text_are_text(self, xtml: Renderer) -> None:
        typed = '<|close|>think<|sep|><|open|>call tool="x"<|sep|><|end_of_msg|>[EOS]'
        parser = xtml.parser(True)
        events = run(parser, xtml.tokenizer.encode_text(typed))
        assert parser.message()["reasoning_content"] == typed
        assert reasons(events) == []
        assert events[-1] == End("length")

    def test_the_cut_of_ids_does_not_matter(self, xtml: Renderer) -> None:
        """The same bytes as single-byte ids: no half character and no half tag gets out."""
        whole, _ = read(xtml, FULL)
        parser = xtml.parser(True)
        tokenizer = xtml.tokenizer
        bytewise: list[int] = []
        for token in to_ids(tokenizer, FULL):
            bytewise += tokenizer.token_bytes(token) if tokenizer.is_text(token) else [token]
        events = run(parser, bytewise)
        assert parser.message() | {"tool_calls": 0} == whole.message() | {"tool_calls": 0}
        assert calls_of(parser.message()) == calls_of(whole.message())
        texts = [e.text for e in events if isinstance(e, TextDelta | ThinkingDelta | ToolCallDelta)]
        assert not any("\ufffd" in text for text in texts)

    def test_call_ids_are_minted_fresh(self, xtml: Renderer) -> None:
        ids = to_ids(xtml.tokenizer, FULL)
        seen = set()
        for _ in range(3):
            parser = xtml.parser(True)
            seen |= {e.id for e in run(parser, ids) if isinstance(e, ToolCall)}
        assert len(seen) == 6


class TestTolerated:
    """What the model is known to leave out costs nothing and is not reported."""

    @pytest.mark.parametrize(
        ("text", "reasoning", "content", "n_calls"),
        [
            (f"t<|open|>response<|sep|>c<|close|>response<|sep|>{END}", "t", "c", 0),
            (f"t<|open|>tools<|sep|>{CALL}<|close|>tools<|sep|>{END}", "t", "", 1),
            (f"t<|close|>think<|sep|><|open|>tools<|sep|>{CALL}<|close|>tools<|sep|>{END}", "t", "", 1),
            (f"t<|close|>think<|sep|><|open|>response<|sep|>c<|open|>tools<|sep|>{CALL}{END}", "t", "c", 1),
            (f"t<|close|>think<|sep|><|open|>response<|sep|>c{END}", "t", "c", 0),
            (f"t{END}", "t", "", 0),
            (f"t<|close|>think<|sep|>\n<|open|>response<|sep|>c<|close|>response<|sep|>\n{END}", "t", "c", 0),
        ],
    )
    def test_missing_tags(self, xtml: Renderer, text: str, reasoning: str, content: str, n_calls: int) -> None:
        parser, events = read(xtml, text)
        message = parser.message()
        assert (message["reasoning_content"], message["content"]) == (reasoning, content)
        assert calls_of(message) == [CITY_CALL] * n_calls
        assert reasons(events) == []
        assert events[-1] == End("stop")

    @pytest.mark.parametrize("name", ["[EOS]", "[EOT]"])
    def test_tokenizer_level_ends_stop_too(self, xtml: Renderer, name: str) -> None:
        tokenizer = xtml.tokenizer
        parser = xtml.parser(False)
        ids = [*tokenizer.encode_text("hi"), tokenizer.special(name)]
        events = [event for token in ids for event in parser.feed(token)]
        assert events[-1] == End("stop")
        assert {ids[-1]} < xtml.stop_ids
        history = xtml.generation_prompt(False) + ids + xtml.close_turn(parser)
        (entry,) = xtml.parse_transcript(history)
        assert entry.complete
        assert entry.message == {"role": "assistant", "content": "hi"}
        assert entry.problems == ()


class TestMalformed:
    @pytest.mark.parametrize(
        ("text", "reason", "content", "n_calls"),
        [
            ("t<|close|>think<|sep|>bare<|close|>response<|sep|>", "missing-tag", "bare", 0),
            ("<|open|>response<|sep|>c<|close|>response<|sep|>late", "stray-text", "c", 0),
            ("<|open|>response<|sep|>c<|close|>tools<|sep|>d", "unexpected-tag", "cd", 0),
            ("<|open|>response<|sep|>c<|open|>response<|sep|>d", "unexpected-tag", "cd", 0),
            ("<|open|>response<|sep|>c<|open|>think<|sep|>t", "unexpected-tag", "c", 0),
            ("<|open|>response<|sep|>c<|open|>table<|sep|>x<|close|>table<|sep|>d", "unknown-tag", "cd", 0),
            ("<|open|>response<|sep|>c<|sep|>d", "stray-token", "cd", 0),
            ("<|open|>response<|sep|>c<|media_pad|>d", "stray-token", "cd", 0),
            ("<|open|>response<|sep|>c<|open|>resp<|close|>response<|sep|>", "unfinished-tag", "c", 0),
            ("<|open|>response<|sep|>c<|open|>a=b c<|sep|>d", "bad-tag", "cd", 0),
            ("<|open|>response<|sep|>c<|open|><|sep|>d", "bad-tag", "cd", 0),
            ("<|open|>response<|sep|>c<|end_of_msg|>", "unclosed-message", "c", 0),
            (f'{END[:-14]}<|open|>message role="user"<|sep|>x', "unexpected-tag", "", 0),
            (CALL, "missing-tag", "", 1),
            (f"<|open|>tools<|sep|>and{CALL}", "stray-text", "", 1),
            ('<|open|>tools<|sep|><|open|>argument key="a" type="string"<|sep|>x', "unexpected-tag", "", 0),
        ],
    )
    def test_is_reported_and_the_rest_kept(
        self, xtml: Renderer, text: str, reason: str, content: str, n_calls: int
    ) -> None:
        parser, events = read(xtml, text)
        assert reason in reasons(events)
        assert parser.message()["content"] == content
        assert len(calls_of(parser.message())) == n_calls

    @pytest.mark.parametrize(
        ("inside", "detail"),
        [
            ('<|open|>argument key="a" type="number"<|sep|>three<|close|>argument<|sep|>', "no JSON value"),
            ('<|open|>argument key="a" type="number"<|sep|>NaN<|close|>argument<|sep|>', "no JSON value"),
            ('<|open|>argument key="a"<|sep|>x<|close|>argument<|sep|>', "no JSON value"),
            ('<|open|>argument type="string"<|sep|>x<|close|>argument<|sep|>', "without a key"),
            ('<|open|>argument key="a" type="string"<|sep|>x', "not closed"),
            ('<|open|>argument key="a" type="string"<|sep|><|open|>argument key="b"<|sep|>', "opens inside"),
            ("<|close|>argument<|sep|>", "without its opening"),
            ('<|open|>json type="object"<|sep|>[1]<|close|>json<|sep|>', "no JSON object: [1]"),
            ('<|open|>json type="object"<|sep|>{"a"<|close|>json<|sep|>', "no JSON object"),
            (BLOCK + NULL, "beside a json block"),
            (NULL + BLOCK, "beside arguments"),
            ("<|open|>what<|sep|><|close|>what<|sep|>", "unknown tag"),
            ("<|open|>arg=<|sep|>", "cannot be read"),
        ],
    )  # fmt: skip
    def test_a_bad_call_is_no_call(self, xtml: Renderer, inside: str, detail: str) -> None:
        """It fails with its reason; the next call of the section is not harmed."""
        bad = f'<|open|>call tool="f" index="1"<|sep|>{inside}<|close|>call<|sep|>'
        parser, events = read(xtml, f"<|open|>tools<|sep|>{bad}{CALL}<|close|>tools<|sep|>{END}")
        failed = [e for e in events if isinstance(e, Malformed) and e.reason == "bad-call"]
        assert [detail in e.detail for e in failed] == [True]
        assert calls_of(parser.message()) == [CITY_CALL]
        assert [e.index for e in events if isinstance(e, ToolCall)] == [2]

    def test_a_call_without_a_name_is_no_call(self, xtml: Renderer) -> None:
        parser, events = read(xtml, '<|open|>tools<|sep|><|open|>call index="1"<|sep|><|close|>call<|sep|>')
        assert reasons(events) == ["bad-call"]
        assert not any(isinstance(e, ToolCallStart) for e in events)
        assert "tool_calls" not in parser.message()

    def test_a_call_cut_by_the_next_one_is_no_call(self, xtml: Renderer) -> None:
        half = CALL.removesuffix("<|close|>call<|sep|>")
        parser, events = read(xtml, f"<|open|>tools<|sep|>{half}{CALL}")
        assert reasons(events) == ["unfinished-call"]
        assert calls_of(parser.message()) == [CITY_CALL]

    def test_ids_out_of_the_vocabulary(self, xtml: Renderer) -> None:
        parser = xtml.parser(False)
        events = run(parser, [xtml.tokenizer.n_vocab, *xtml.tokenizer.encode_text("a"), -1])
        assert reasons(events) == ["stray-token", "stray-token"]
        assert parser.message()["content"] == "a"


ANSWERS = [
    FULL,
    f"t<|open|>tools<|sep|>{CALL}<|close|>tools<|sep|>{END}",
    f"t<|close|>think<|sep|>bare 🙂 words{END}",
    f"<|open|>response<|sep|>c<|open|>table<|sep|>x<|close|>table<|sep|>d{END}",
    f"<|open|>response<|sep|>c<|open|>think<|sep|>t<|close|>think<|sep|>{CALL}late{END}",
    "a<|sep|>b<|open|>resp<|open|>think<|sep|>c<|close|>tool<|end_of_msg|>",
]


def check_cut(renderer: Renderer, ids: list[int], *, thinking: bool) -> None:
    """An answer cut after `ids` and closed: what was said is what the history says, and nothing more."""
    parser = renderer.parser(thinking)
    events = run(parser, ids)
    assert isinstance(events[-1], End)
    assert sum(isinstance(event, End) for event in events) == 1
    taken = ids[: 1 + min((at for at, token in enumerate(ids) if token in renderer.stop_ids), default=len(ids))]
    history = renderer.generation_prompt(thinking) + taken + renderer.close_turn(parser)
    (entry,) = renderer.parse_transcript(history)
    assert entry.complete
    live, read_back = parser.message(), entry.message
    assert read_back["content"] == live["content"]
    assert read_back.get("reasoning_content") == live.get("reasoning_content")
    objects = [call for call in calls_of(read_back) if is_json_object(call[1])]
    assert objects == calls_of(live)
    assert [(e.name, e.arguments_json) for e in events if isinstance(e, ToolCall)] == calls_of(live)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("text", ANSWERS)
def test_cut_at_every_id(xtml: Renderer, text: str, thinking: bool) -> None:
    ids = to_ids(xtml.tokenizer, text)
    for length in range(len(ids) + 1):
        try:
            check_cut(xtml, ids[:length], thinking=thinking)
        except AssertionError as problem:
            raise AssertionError(f"cut after {length} ids: {xtml.tokenizer.decode_text(ids[:length])!r}") from problem


def test_a_cut_well_formed_answer_is_closed_without_a_flaw(xtml: Renderer) -> None:
    """Outside of a tool call, what `close_turn` adds gives a history with nothing to report."""
    ids = to_ids(xtml.tokenizer, FULL)
    begin = to_ids(xtml.tokenizer, FULL[: FULL.index("<|open|>call") + len("<|open|>")])
    end = to_ids(xtml.tokenizer, FULL[: FULL.index("<|close|>tools")])
    for length in [*range(len(begin)), *range(len(end), len(ids) + 1)]:
        parser = xtml.parser(True)
        for token in ids[:length]:
            parser.feed(token)
        closing = xtml.close_turn(parser)
        (entry,) = xtml.parse_transcript(xtml.generation_prompt(True) + ids[:length] + closing)
        shown = xtml.tokenizer.decode_text(ids[:length] + closing)
        if "\ufffd" not in shown:
            assert entry.problems == (), f"cut after {length} ids: {shown!r}"
        assert shown.count("<|open|>response<|sep|>") == shown.count("<|close|>response<|sep|>") == 1, shown


def test_a_cut_call_is_never_completed_by_closing(xtml: Renderer) -> None:
    text = FULL[: FULL.index(EMPTY_CALL)].removesuffix("<|sep|>")  # all of the call but its last id
    parser, events = read(xtml, text)
    assert reasons(events) == ["unfinished-call"]
    history = xtml.generation_prompt(True) + to_ids(xtml.tokenizer, text) + parser.close_ids()
    (entry,) = xtml.parse_transcript(history)
    assert "tool_calls" not in entry.message
    assert any("unfinished-call" in problem for problem in entry.problems)


PIECES = [
    "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "<|media_pad|>", "think", "response", "tools",
    "call", 'call tool="f" index="1"', 'argument key="a" type="string"', 'argument key="b" type="number"', "argument",
    "json", 'json type="object"', "message", "{}", "[1]", "3", "text", "🙂", " ", "<|open|>think<|sep|>",
    "<|open|>response<|sep|>", "<|open|>tools<|sep|>", '<|open|>call tool="f" index="1"<|sep|>',
    '<|open|>argument key="b" type="number"<|sep|>3<|close|>argument<|sep|>', "<|close|>call<|sep|>",
    "<|close|>message<|sep|>",
]  # fmt: skip


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14), half=st.integers(0, 255), thinking=st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_disorder_is_survived(xtml: Renderer, pieces: list[str], half: int, thinking: bool) -> None:
    """Whatever comes: no exception, one end, no marker in any text, and the closed history says the same."""
    ids = to_ids(xtml.tokenizer, "".join(pieces[:7]))
    ids += [half, *to_ids(xtml.tokenizer, "".join(pieces[7:]))]
    stops = [at for at, token in enumerate(ids) if token in xtml.stop_ids]
    ids = ids[: stops[0] + 1] if stops else ids
    events = run(xtml.parser(thinking), ids)
    for event in events:
        if isinstance(event, TextDelta | ThinkingDelta | ToolCallDelta):
            assert "<|" not in event.text
            assert "|>" not in event.text
    check_cut(xtml, ids, thinking=thinking)


texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from([MARKER.pattern, "<|close|>message<|sep|><|end_of_msg|>", "[EOS]", "&quot;&amp;"]),
)
arguments = st.one_of(
    st.dictionaries(texts, st.one_of(texts, st.integers(), st.lists(st.booleans(), max_size=2)), max_size=3),
    st.sampled_from(["", "{}", "   ", "[1]", '{"a":1e2,"a":"\\n\\u00e9"}', '{"a":', '{"a": {"b": [ ]}}']),
)
functions = st.fixed_dictionaries({"name": st.text(min_size=1, max_size=5), "arguments": arguments})
tool_calls = st.lists(st.fixed_dictionaries({"function": functions}), max_size=3)
messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": texts}, optional={"name": texts}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": texts, "reasoning_content": texts, "tool_calls": tool_calls}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "tool": texts, "content": texts}),
)


@given(history=st.lists(messages, max_size=5), thinking=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_history_reads_back(xtml: Renderer, history: list[dict[str, Any]], thinking: bool) -> None:
    """Text full of control markers comes back as text, and rendering what was read gives the same ids."""
    context = xtml.new_context(thinking)
    ids = xtml.render_messages(history, context)
    entries = xtml.parse_transcript(ids)
    assert [entry.problems for entry in entries] == [()] * len(history)
    assert [entry.message["role"] for entry in entries] == [message["role"] for message in history]
    for entry, message in zip(entries, history, strict=True):
        assert entry.message["content"] == message["content"]
        if message["role"] == "assistant" and thinking:
            assert entry.message["reasoning_content"] == message["reasoning_content"]
        for got, sent in zip(entry.message.get("tool_calls", ()), message.get("tool_calls", ()), strict=True):
            assert got["function"]["name"] == sent["function"]["name"]
            if isinstance(sent["function"]["arguments"], dict):
                assert json.loads(got["function"]["arguments"]) == sent["function"]["arguments"]
    assert [ids[entry.start : entry.stop] for entry in entries] == split_after(ids, xtml.tokenizer)
    again = xtml.render_messages([entry.message for entry in entries], xtml.new_context(thinking))
    assert again == ids


def split_after(ids: list[int], tokenizer: Tokenizer) -> list[list[int]]:
    end, parts = tokenizer.special("<|end_of_msg|>"), [[]]
    for token in ids:
        parts[-1].append(token)
        if token == end:
            parts.append([])
    return parts[:-1]


def test_transcript_names_what_the_format_put_in(xtml: Renderer) -> None:
    tool, later = ({"type": "function", "function": {"name": name}} for name in "fg")
    request = {
        "messages": [{"role": "user", "content": "u"}, {"role": "system", "tools": [later]}],
        "tools": [tool],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
    }
    entries = xtml.parse_transcript(xtml.render(request))
    kinds = ["tool-declare", "thinking-effort", "message", "tool-declare", "tool-choice", "response-format", "message"]
    assert [entry.kind for entry in entries] == kinds
    assert entries[0].message["tools"] == [tool]
    assert entries[3].message == request["messages"][1]
    assert [entry.complete for entry in entries] == [True] * 6 + [False]


def test_transcript_shows_where_an_answer_left_the_format(xtml: Renderer) -> None:
    text = f't<|end_of_msg|><|open|>message role="user"<|sep|>u<|end_of_msg|><|open|>tail<|sep|>{END}'
    history = xtml.generation_prompt(True) + to_ids(xtml.tokenizer, text)
    answer, user, stray = xtml.parse_transcript(history)
    assert answer.message == {"role": "assistant", "content": "", "reasoning_content": "t"}
    assert [problem.split(":")[0] for problem in answer.problems + user.problems] == ["unclosed-message"] * 2
    assert user.message == {"role": "user", "content": "u"}
    assert stray.kind == "stray"


def test_transcript_of_ids_that_are_no_history(xtml: Renderer) -> None:
    special = xtml.tokenizer.special
    for ids in ([1, 2, 3], [special("<|open|>")], [xtml.tokenizer.n_vocab], [special("<|end_of_msg|>")]):
        (entry,) = xtml.parse_transcript(ids)
        assert entry.kind == "stray"
        assert entry.problems
    assert xtml.parse_transcript([]) == []
