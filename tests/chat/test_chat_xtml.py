"""K3's renderer: the published vectors, the rules of revision b, append-only rendering, refusals."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3cli.chat.renderer import RenderContext, Renderer, renderer_for, renderer_of
from k3cli.chat.tokenizer import Tokenizer
from k3cli.errors import ModelError, UsageError

Message = dict[str, Any]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def call(name: str, arguments: Any, call_id: str | None = "c1") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


EXAMPLE = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "Weather in Paris for 3 days?"},
    {
        "role": "assistant",
        "reasoning_content": "Need weather.",
        "content": None,
        "tool_calls": [call("get_weather", '{"city": "Paris", "days": 3}')],
    },
    {"role": "tool", "tool_call_id": "c1", "content": '{"t":20}'},
    {"role": "assistant", "reasoning_content": "20 degrees.", "content": "It is 20°C in Paris."},
    {"role": "user", "content": "Thanks"},
]

# Chat-format notes, section 7.
V1 = """163587 2778 6244 878 14062 1 1798 878 130400 59991 470 1 163589 63 130400 123074 470 63 28560 418 1632 2455 308
2704 306 651 9545 8491 347 2976 3411 276 4503 8491 904 9141 4661 3867 1268 1332 5713 1268 50004 5713 1268 19421 5713 316
1268 5354 16518 10048 276 2403 387 42070 472 1268 130400 123074 470 105281 11369 163588 2778 163589 163586 163587 2778
6244 878 2482 1 163589 9663 163588 2778 163589 163586 163587 2778 6244 878 69702 1 163589 163587 39964 163589"""
V2 = """163587 2778 6244 878 2482 1 163589 9663 163588 2778 163589 163586 163587 2778 6244 878 69702 1 163589
163587 12092 163589"""
V3 = """163587 2778 6244 878 69702 1 163589 163587 39964 163589 20082 10666 13 163588 39964 163589 163587 12092 163589
163588 12092 163589 163587 25385 163589 163587 10257 4453 878 618 21055 2800 1 4002 878 16 1 163589 163587 47185 2355
878 37666 1 1798 878 2033 1 163589 113476 163588 47185 163589 163587 47185 2355 878 21030 1 1798 878 10006 1 163589 18
163588 47185 163589 163588 10257 163589 163588 25385 163589 163588 2778 163589 163586 163587 2778 6244 878 20960 1 4453
878 618 21055 2800 1 4002 878 16 1 163589 8264 83 1289 577 92 163588 2778 163589 163586"""
V4 = "163587 10257 4453 878 64 39877 54677 42055 82190 1 4002 878 795 1 163589"
V5 = "163587 47185 2355 878 1885 1 1798 878 2033 1 163589"


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[at : at + len(part)] == part for at in range(len(ids)))


def shown(renderer: Renderer, ids: list[int]) -> str:
    return renderer.tokenizer.decode_text(ids)


def rendered(
    renderer: Renderer, *messages: Message, thinking: bool = True, context: RenderContext | None = None
) -> str:
    context = context or renderer.new_context(thinking)
    return shown(renderer, renderer.render_messages(list(messages), context))


@pytest.fixture(scope="module")
def big(public: Tokenizer) -> Renderer:
    return renderer_for("kimi_k3", public)


class TestVectors:
    def test_v1_v2(self, big: Renderer) -> None:
        hi = {"messages": [{"role": "user", "content": "hi"}]}
        assert big.render(hi | {"effort": "max"}) == numbers(V1)
        assert big.render(hi) == numbers(V1)  # max is the default
        assert big.render(hi | {"thinking": False}) == numbers(V2)
        assert len(big.render_head(effort="high")) == 68
        assert contains(big.render_head(effort="high"), [28, 19421])

    def test_v3(self, big: Renderer) -> None:
        assert big.render_messages(EXAMPLE[2:4], big.new_context()) == numbers(V3)

    def test_v4_v5_escaping_and_segments(self, big: Renderer) -> None:
        calls = [call("x", "")] * 9 + [call('a"b&c', '{"_id": "v"}')]
        ids = big.render_messages([{"role": "assistant", "tool_calls": calls}], big.new_context())
        assert contains(ids, numbers(V4))
        assert contains(ids, numbers(V5))

    def test_whole_conversation(self, big: Renderer) -> None:
        """Section 2.7: counts after each message and both digests."""
        ids = big.render({"messages": EXAMPLE, "tools": [WEATHER], "effort": "high"})
        ends = [at + 1 for at, token in enumerate(ids) if token == 163586]
        assert ends == [81, 149, 164, 183, 261, 287, 321, 333]
        assert len(ids) == 343
        text = big.tokenizer.decode_bytes(ids)
        assert hashlib.sha256(text).hexdigest() == "c943a194a92d0cc1aa2fd7d53999fe750f40db8977f52230dfb96e448e441076"
        joined = ",".join(map(str, ids)).encode()
        assert hashlib.sha256(joined).hexdigest() == "9d628e7cbfe1885bca663f25aff287de943685c3960b3ae0df657ca9aacdfc1d"

    def test_verifier_count(self, big: Renderer) -> None:
        """Section 6: the hosted API counts 99 for this prompt, without the three ids of the opened channel."""
        ids = big.render({"messages": [{"role": "assistant", "content": "你好"}], "effort": "high"})
        assert len(ids) == 99 + 3

    def test_sizes(self, big: Renderer) -> None:
        assert len(big.render_messages([{"role": "user", "content": ""}], big.new_context())) == 11
        assert len(big.generation_prompt(True)) == len(big.generation_prompt(False)) == 10
        thinking = big.render_messages([{"role": "assistant"}], big.new_context(True))
        without = big.render_messages([{"role": "assistant"}], big.new_context(False))
        assert len(thinking) - len(without) == 6


class TestHead:
    def test_order_and_texts(self, xtml: Renderer) -> None:
        text = shown(xtml, xtml.render_head([WEATHER], True, "low", "Be kind."))
        tools, effort, system, rest = text.split("<|end_of_msg|>")
        assert tools.startswith('<|open|>message role="system" type="tool-declare"<|sep|># Tools\nHere are')
        assert tools.endswith("\n```<|close|>message<|sep|>")
        assert "thinking_effort=low`." in effort
        assert system == '<|open|>message role="system"<|sep|>Be kind.<|close|>message<|sep|>'
        assert rest == ""

    def test_tool_json_is_sorted_compact_and_not_escaped(self, xtml: Renderer) -> None:
        tool = {"type": "function", "function": {"parameters": {"b": {"z": 1, "a": "é🙂"}, "B": [2, 1]}, "name": "n"}}
        expected = '\n[{"function":{"name":"n","parameters":{"B":[2,1],"b":{"a":"é🙂","z":1}}},"type":"function"}]\n'
        assert expected in shown(xtml, xtml.render_head([tool]))

    def test_effort_needs_thinking(self, xtml: Renderer) -> None:
        assert xtml.render_head(thinking=False, effort="high") == []
        assert xtml.render_head(thinking=True, effort=None) == []
        with pytest.raises(UsageError, match="'medium'; expected one of low, high, max"):
            xtml.render_head(effort="medium")

    def test_head_then_messages_is_the_whole_prompt(self, xtml: Renderer) -> None:
        head = xtml.render_head([WEATHER], True, "max", "S")
        context = xtml.new_context(True, [WEATHER])
        tail = xtml.render_messages([{"role": "user", "content": "hi"}], context) + xtml.generation_prompt(True)
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
        assert xtml.render({"messages": messages, "tools": [WEATHER]}) == head + tail


class TestMessages:
    def test_names_and_parts(self, xtml: Renderer) -> None:
        parts = [{"type": "text", "text": "mess"}, {"type": "text", "text": "age"}]
        message = {"role": "user", "name": 'A "B" & C', "content": parts}
        text = rendered(xtml, message)
        assert text.startswith('<|open|>message role="user" name="A &quot;B&quot; &amp; C"<|sep|>message<|close|>')
        # Parts are encoded on their own: "message" is one token here, "mess" + "age" are more.
        joined = xtml.render_messages([message | {"content": "message"}], xtml.new_context())
        assert len(xtml.render_messages([message], xtml.new_context())) > len(joined)

    @pytest.mark.parametrize("content", [None, "", []])
    def test_empty_content(self, xtml: Renderer, content: Any) -> None:
        text = rendered(xtml, {"role": "system", "content": content})
        assert text == '<|open|>message role="system"<|sep|><|close|>message<|sep|><|end_of_msg|>'

    def test_assistant_channels(self, xtml: Renderer) -> None:
        message = {"role": "assistant", "reasoning_content": " r ", "content": "c"}
        body = "<|open|>response<|sep|>c<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
        opening = '<|open|>message role="assistant"<|sep|>'
        assert rendered(xtml, message) == f"{opening}<|open|>think<|sep|> r <|close|>think<|sep|>{body}"
        assert rendered(xtml, message, thinking=False) == opening + body

    @pytest.mark.parametrize(
        ("fields", "reasoning"),
        [
            ({"reasoning_content": "a", "reasoning": "b"}, "a"),
            ({"reasoning_content": "", "reasoning": "b"}, ""),
            ({"reasoning_content": None, "reasoning": "b"}, "b"),
            ({"reasoning": "  "}, "  "),
            ({}, ""),
        ],
    )
    def test_choice_of_reasoning(self, xtml: Renderer, fields: Message, reasoning: str) -> None:
        assert f"think<|sep|>{reasoning}<|close|>think" in rendered(xtml, {"role": "assistant", **fields})

    def test_added_tools(self, xtml: Renderer) -> None:
        context = xtml.new_context(True, [])
        text = rendered(xtml, {"role": "system", "tools": [WEATHER]}, context=context)
        assert text.startswith('<|open|>message role="system" type="tool-declare"<|sep|>## New Tools Available\nThe ')
        assert context.tool_names == ("get_weather",)
        with pytest.raises(UsageError, match="declares get_weather again"):
            rendered(xtml, {"role": "system", "tools": [WEATHER]}, context=context)

    @pytest.mark.parametrize(
        ("arguments", "body"),
        [
            ("", ""),
            (None, ""),
            ("{}", ""),
            (" { } ", ""),
            ('{"a":1e2}', '<a number>1e2'),
            ('{"a": [1,2 ]}', "<a array>[1,2 ]"),
            ('{"a":{"x": 1,"x":2}}', '<a object>{"x": 1,"x":2}'),
            ('{"a":"x\\n\\u00e9\\"&"}', '<a string>x\né"&'),
            ('{"a":true,"b":null}', "<a boolean>true<b null>null"),
            ('{"b":1,"a":2,"b":3}', "<b number>1<a number>2<b number>3"),
            ('{"a":1} and more', "<a number>1"),
            ('{"a":' + "9" * 5000 + "}", "<a number>" + "9" * 5000),
            ("   ", "<json>   "),
            ("[1]", "<json>[1]"),
            ("3", "<json>3"),
            ('{"a":1', '<json>{"a":1'),
            ('{"a":1,}', '<json>{"a":1,}'),
            ('{"a":NaN}', '<json>{"a":NaN}'),
            ('{"a":"\\ud800"}', '<json>{"a":"\\ud800"}'),
            ("{'a':1}", "<json>{'a':1}"),
            ('{"a":' + "[" * 200_000 + "}", '<json>{"a":' + "[" * 200_000 + "}"),
            ({"a": [1, {"b": "é"}], "s": "t"}, '<a array>[1, {"b": "é"}]<s string>t'),
            ({"n": 1.0, "z": None}, "<n number>1.0<z null>null"),
        ],
    )  # fmt: skip
    def test_arguments(self, xtml: Renderer, arguments: Any, body: str) -> None:
        """Revision b: taken apart one level deep, literal bytes kept, a json block when that cannot be done."""
        text = rendered(xtml, {"role": "assistant", "tool_calls": [call("f", arguments)]})
        inside = text.split('<|open|>call tool="f" index="1"<|sep|>')[1].split("<|close|>call<|sep|>")[0]
        inside = re.sub(r'<\|open\|>argument key="(.*?)" type="(.*?)"<\|sep\|>', r"<\1 \2>", inside)
        inside = inside.replace('<|open|>json type="object"<|sep|>', "<json>")
        inside = re.sub(r"<\|close\|>(argument|json)<\|sep\|>", "", inside)
        assert inside == body


class TestToolResults:
    def results(self, xtml: Renderer, *messages: Message) -> list[str]:
        calls = [call("f", "", "1"), call("g", "", "2"), call("h", "", "2")]
        text = rendered(xtml, {"role": "assistant", "tool_calls": calls}, *messages)
        return [part.split("<|close|>")[0] for part in text.split('role="tool" tool="')[1:]]

    def test_sorted_into_call_order_and_renamed(self, xtml: Renderer) -> None:
        second = {"role": "tool", "tool_call_id": "2", "name": "wrong", "content": "B"}
        first = {"role": "tool", "id": "1", "content": "A"}
        assert self.results(xtml, second, first) == ['f" index="1"<|sep|>A', 'g" index="2"<|sep|>B']

    def test_a_run_with_a_stranger_stays_as_it_came(self, xtml: Renderer) -> None:
        second = {"role": "tool", "tool_call_id": "2", "name": "own", "content": "B"}
        stranger = {"role": "tool", "tool_call_id": "9", "content": "A"}
        assert self.results(xtml, second, stranger) == ['own" index="1"<|sep|>B', 'g" index="2"<|sep|>A']

    def test_index_runs_on_until_the_next_assistant(self, xtml: Renderer) -> None:
        user = {"role": "user", "content": "u"}
        result = {"role": "tool", "tool": "t", "content": "x"}
        expected = ['t" index="1"<|sep|>x', 't" index="2"<|sep|>x', 't" index="1"<|sep|>x']
        assert self.results(xtml, result, user, result, {"role": "assistant"}, result) == expected

    def test_name_falls_back_to_position_then_is_refused(self, xtml: Renderer) -> None:
        result = {"role": "tool", "content": "x"}
        assert [part[0] for part in self.results(xtml, result, result, result)] == ["f", "g", "h"]
        with pytest.raises(UsageError, match=r"messages\[4\] is a tool result without a name"):
            self.results(xtml, result, result, result, result)

    def test_context_survives_a_record(self, xtml: Renderer) -> None:
        """The next turn may come in another process: the context goes through JSON, and a reply is noted."""
        context = xtml.new_context()
        context.reply({"role": "assistant", "tool_calls": [call("f", "{}", "call_7"), call("g", "{}", "call_8")]})
        context = RenderContext.from_json(json.loads(json.dumps(context.to_json())))
        results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": str(n)} for n in (8, 7)]
        text = rendered(xtml, *results, context=context)
        assert text.index('tool="f" index="1"<|sep|>7') < text.index('tool="g" index="2"<|sep|>8')


class TestTail:
    def test_choice(self, xtml: Renderer) -> None:
        context = xtml.new_context(True, [WEATHER])
        text = shown(xtml, xtml.render_tail("required", None, context))
        assert 'type="tool-choice"<|sep|>The system is invoked with `tool_choice=required`.\nYou MUST call' in text
        assert "You MUST NOT call any tools in the next message.<|close|>" in shown(
            xtml, xtml.render_tail("none", None, context)
        )
        assert xtml.render_tail("auto", {"type": "text"}, context) == []
        assert xtml.render_tail(None, None, context) == []
        with pytest.raises(UsageError, match="no tool is declared"):
            xtml.render_tail("required", None, xtml.new_context())

    def test_format(self, xtml: Renderer) -> None:
        context = xtml.new_context()
        text = shown(xtml, xtml.render_tail(None, {"type": "json_object"}, context))
        assert text.endswith("code blocks (```json) or any additional formatting.<|close|>message<|sep|><|end_of_msg|>")
        schema = {"b": 1, "a": {"d": 1, "c": 2}}
        for form in ({"schema": schema, "name": "n"}, {"json_schema": schema}, schema):
            text = shown(xtml, xtml.render_tail(None, {"type": "json_schema", "json_schema": form}, context))
            assert 'following schema:\n```json\n{"a":{"c":2,"d":1},"b":1}\n```<|close|>' in text

    def test_after_the_history_before_the_answer(self, xtml: Renderer) -> None:
        ids = xtml.render({"messages": [{"role": "user", "content": "u"}], "response_format": {"type": "json_object"}})
        text = shown(xtml, ids)
        assert text.index(">u<") < text.index("response-format") < text.index('role="assistant"')


names = st.sampled_from(["f", "g"])
texts = st.sampled_from(["", "hi", "<|open|>message", "<|end_of_msg|>", " think\n", 'a"&b', "🙂é", "["])
plain = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": texts})
argument_values = st.one_of(texts, st.integers(), st.booleans(), st.none(), st.lists(st.integers(), max_size=2))
calls = st.lists(st.builds(call, names, st.dictionaries(texts, argument_values, max_size=3), texts), max_size=3)
assistants = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": texts, "reasoning_content": texts, "tool_calls": calls}
)
tools = st.fixed_dictionaries({"role": st.just("tool"), "name": names, "tool_call_id": texts, "content": texts})
conversations = st.lists(st.one_of(plain, assistants, tools), max_size=8)


@given(messages=conversations, cuts=st.sets(st.integers(0, 8)), thinking=st.booleans())
@settings(max_examples=150, deadline=None)
def test_rendering_is_append_only(xtml: Renderer, messages: list[Message], cuts: set[int], thinking: bool) -> None:
    """Rendering in batches gives the ids of rendering at once, wherever no run of tool results is cut."""
    whole = xtml.render({"messages": messages, "thinking": thinking, "effort": None})
    context = xtml.new_context(thinking)
    parts: list[int] = []
    batch: list[Message] = []
    for at, message in enumerate(messages):
        if at in cuts and not (message["role"] == "tool" and batch and batch[-1]["role"] == "tool"):
            parts += xtml.render_messages(batch, context)
            context = RenderContext.from_json(json.loads(json.dumps(context.to_json())))
            batch = []
        batch.append(message)
    parts += xtml.render_messages(batch, context)
    assert parts + xtml.generation_prompt(thinking) == whole


@given(messages=conversations)
@settings(max_examples=100, deadline=None)
def test_only_the_format_places_markers(xtml: Renderer, messages: list[Message]) -> None:
    """Whatever stands in the text, a message ends once and tags are balanced."""
    ids = xtml.render({"messages": messages, "effort": None})
    special = xtml.tokenizer.special
    assert ids.count(special("<|end_of_msg|>")) == len(messages)
    opened, closed = ids.count(special("<|open|>")), ids.count(special("<|close|>"))
    assert opened - closed == 2  # the generation prompt leaves message and think open
    assert ids.count(special("<|sep|>")) == opened + closed


class TestRefusals:
    @pytest.mark.parametrize(
        ("message", "expected"),
        [
            ({"role": "developer", "content": "x"}, "role 'developer'.*say \"system\" instead"),
            ({"content": "x"}, "role None; expected one of system, user, assistant, tool"),
            ("hi", "is a string"),
            ({"role": "user", "content": 3}, "content is a int"),
            ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "'image_url'.*not supported"),
            ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\] has no text"),
            ({"role": "user", "content": "x", "tools": [WEATHER]}, "unknown key 'tools'"),
            ({"role": "user", "colour": "x"}, "unknown key 'colour'; expected only role, content, name"),
            ({"role": "system", "content": "x", "tools": [WEATHER]}, "both tools and content"),
            ({"role": "system", "tools": [WEATHER, WEATHER]}, "declares 'get_weather' again"),
            ({"role": "system", "tools": [{"type": "x", "function": {"name": "n"}}]}, "is no function"),
            ({"role": "system", "tools": [{"type": "function", "function": {"name": "n" * 257}}]}, "257 characters"),
            ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "name missing or null"),
            ({"role": "assistant", "tool_calls": [call("f", 3)]}, "arguments is a int"),
            ({"role": "assistant", "tool_calls": [call("f", {"a": float("nan")})]}, "no JSON form"),
            ({"role": "assistant", "reasoning": 1}, "reasoning is a int"),
        ],
    )
    def test_bad_messages(self, xtml: Renderer, message: Any, expected: str) -> None:
        context = xtml.new_context()
        before = context.to_json()
        good = {"role": "assistant", "tool_calls": [call("f", "")]}
        with pytest.raises(UsageError, match=expected) as caught:
            xtml.render_messages([good, message], context)
        assert "\n" not in str(caught.value)
        assert context.to_json() == before, "a refused batch must leave no trace"

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"extra": 1}, "unknown key 'extra'; expected only messages, tools, thinking, effort, tool_choice"),
            ({"messages": None}, "messages is missing or null"),
            ({"thinking": "yes"}, "thinking is a string"),
            ({"effort": "medium"}, "'medium'"),
            ({"tool_choice": {"type": "function"}}, "cannot be forced"),
            ({"response_format": {"type": "xml"}}, "'xml'; expected one of text, json_object, json_schema"),
            ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
            ({"response_format": {"type": "text", "json_schema": {}}}, "has a json_schema"),
            ({"tools": {}}, None),
            ({"tools": {"a": 1}}, "tools is an object"),
        ],
    )
    def test_bad_requests(self, xtml: Renderer, change: dict[str, Any], expected: str | None) -> None:
        request = {"messages": []} | change
        if expected is None:
            assert xtml.render(request) == xtml.render({"messages": []})
            return
        with pytest.raises(UsageError, match=expected):
            xtml.render(request)

    def test_families_never_mix(self, xtml: Renderer, k2: Renderer) -> None:
        assert renderer_for("kimi_k3", xtml.tokenizer).format_version == "k3-xtml-b1"
        assert renderer_for("kimi_linear", k2.tokenizer).format_version == "k2-1"
        # A text-only K3 checkpoint: the names of its specials decide.
        assert renderer_for("kimi_linear", xtml.tokenizer).family == "k3"
        with pytest.raises(ModelError, match="kimi_k3 with k2 special tokens"):
            renderer_for("kimi_k3", k2.tokenizer)
        with pytest.raises(ModelError, match="'llama'"):
            renderer_for("llama", xtml.tokenizer)
        assert renderer_of(k2.tokenizer).family == "k2"
