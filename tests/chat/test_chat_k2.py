"""K2-style format of Kimi-Linear: rendering, calls, cuts, histories, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3cli.chat.arguments import is_json_object
from k3cli.chat.events import End, Malformed, TextDelta, ThinkingDelta, ToolCall, ToolCallDelta
from k3cli.chat.parser import StreamParser
from k3cli.chat.renderer import Renderer, renderer_of
from k3cli.chat.specials import K2_NAMES
from k3cli.chat.tokenizer import Tokenizer
from k3cli.errors import UsageError

MARKER = re.compile(r"(<\|(?:im|tool_call|media)[a-z_]*\|>|</?think>|\[EOS\])")
CALL = '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris 🙂"}<|tool_call_end|>'
CALL_1 = {"id": "1", "function": {"name": "f"}}
SECTION = f"<|tool_calls_section_begin|>{CALL}<|tool_calls_section_end|>"


def to_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = []
    for piece in MARKER.split(text):
        ids += [tokenizer.special(piece)] if MARKER.fullmatch(piece) else tokenizer.encode_text(piece)
    return ids


def read(renderer: Renderer, text: str) -> tuple[StreamParser, list[Any]]:
    parser = renderer.parser()
    events = [event for token in to_ids(renderer.tokenizer, text) for event in parser.feed(token)]
    return parser, events + parser.finish("length")


def reasons(events: list[Any]) -> list[str]:
    return [event.reason for event in events if isinstance(event, Malformed)]


class TestRendering:
    def test_plain_turns(self, k2: Renderer) -> None:
        messages = [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "u<|im_end|>"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "v"}]},
        ]
        ids = k2.render({"messages": messages})
        expected = (
            "<|im_system|>system<|im_middle|>S<|im_end|>"
            "<|im_user|>user<|im_middle|>u<|im_end|><|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>a<|im_end|>"
            "<|im_user|>user<|im_middle|>v<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>"
        )
        assert k2.tokenizer.decode_text(ids) == expected
        # The mark inside the user's text is text: four ends for four messages.
        assert ids.count(k2.tokenizer.special("<|im_end|>")) == 4
        assert k2.render_head(system="S") == to_ids(k2.tokenizer, expected[: expected.index("<|im_user|>")])

    def test_public_ids_of_the_generation_prompt(self, public: Tokenizer, tmp_path: Path, shared_dir: Path) -> None:
        """Section 5: 163588, `assistant`, 163601; stop 163586."""
        (tmp_path / "tiktoken.model").symlink_to((shared_dir / "tokenizer" / "tiktoken.model").resolve())
        (tmp_path / "config.json").write_text('{"model_type": "kimi_linear"}')
        renderer = renderer_of(Tokenizer.from_dir(tmp_path))
        assert renderer.generation_prompt() == [163588, 69702, 163601]
        assert 163586 in renderer.stop_ids
        assert renderer.tokenizer.digest != public.digest

    def test_calls_and_results(self, k2: Renderer) -> None:
        call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
        context = k2.new_context()
        ids = k2.render_messages(
            [
                {"role": "assistant", "content": "c", "tool_calls": [call]},
                {"role": "tool", "content": "r"},
                {"role": "tool", "tool_call_id": "functions.g:1", "content": "s"},
            ],
            context,
        )
        assert k2.tokenizer.decode_text(ids) == (
            "<|im_assistant|>assistant<|im_middle|>c<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
            '<|tool_call_argument_begin|>{"a": [1, "é"]}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
            "<|im_system|>tool<|im_middle|>## Return of functions.f:0\nr<|im_end|>"
            "<|im_system|>tool<|im_middle|>## Return of functions.g:1\ns<|im_end|>"
        )
        assert context.tool_index == 2

    @pytest.mark.parametrize(
        ("request_", "expected"),
        [
            ({"thinking": True}, "no thinking channel"),
            ({"effort": "high"}, "which has none"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "not documented"),
            ({"tool_choice": "none"}, "cannot say it"),
            ({"response_format": {"type": "json_object"}}, "cannot say it"),
            ({"messages": [{"role": "user", "name": "n", "content": ""}]}, "has a name"),
            ({"messages": [{"role": "assistant", "reasoning": "r"}]}, "has reasoning"),
            ({"messages": [{"role": "tool", "content": "r"}]}, "without tool_call_id"),
            ({"messages": [{"role": "assistant", "tool_calls": [CALL_1]}]}, "functions.f:INDEX"),
            (
                {"messages": [{"role": "system", "tools": [{"type": "function", "function": {"name": "f"}}]}]},
                "declares",
            ),
        ],
    )
    def test_what_is_not_documented_is_refused(self, k2: Renderer, request_: dict[str, Any], expected: str) -> None:
        with pytest.raises(UsageError, match=expected):
            k2.render({"messages": []} | request_)


class TestParser:
    def test_text_and_calls(self, k2: Renderer) -> None:
        parser, events = read(k2, f"Läuft 🙂{SECTION}<|im_end|>")
        assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "Läuft 🙂"
        arguments = '{"city": "Paris 🙂"}'
        assert [e for e in events if isinstance(e, ToolCall)] == [
            ToolCall(1, "functions.get_weather:0", "get_weather", arguments)
        ]
        assert "".join(e.text for e in events if isinstance(e, ToolCallDelta)) == arguments
        assert events[-1] == End("stop")
        assert reasons(events) == []
        assert parser.close_ids() == []

    @pytest.mark.parametrize(
        ("text", "reason", "n_calls"),
        [
            (f"a{CALL}<|im_end|>", "missing-tag", 1),
            (f"a{SECTION.replace('functions.get_weather:0', 'weather')}", "bad-call", 0),
            (f"a{SECTION.replace('{', '[{')}", "bad-call", 0),
            (f"a<|tool_calls_section_begin|>{CALL.removesuffix('<|tool_call_end|>')}<|im_end|>", "unfinished-call", 0),
            (f"a<|tool_calls_section_begin|>{CALL.removesuffix('<|tool_call_end|>')}{CALL}", "unfinished-call", 1),
            (f"a<|tool_calls_section_begin|>words{CALL}", "stray-text", 1),
            ("a<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_end|>", "unfinished-call", 0),
            ("a<|tool_call_end|>", "unexpected-tag", 0),
            ("a<|tool_calls_section_end|>", "unexpected-tag", 0),
            ("a<|tool_call_argument_begin|>", "unexpected-tag", 0),
            ("a<|im_user|>", "stray-token", 0),
        ],
    )
    def test_disorder_is_reported(self, k2: Renderer, text: str, reason: str, n_calls: int) -> None:
        parser, events = read(k2, text)
        assert reason in reasons(events)
        assert parser.message()["content"] == "a"
        assert len(parser.message().get("tool_calls", ())) == n_calls

    @pytest.mark.parametrize(
        ("text", "closing"),
        [
            ("a", "<|im_end|>"),
            (f"a{SECTION}", "<|im_end|>"),
            ("a<|tool_calls_section_begin|>", "<|tool_calls_section_end|><|im_end|>"),
            ("a<|tool_calls_section_begin|><|tool_call_begin|>functions", "<|tool_calls_section_end|><|im_end|>"),
            (f"a{SECTION[:-40]}", "<|tool_calls_section_end|><|im_end|>"),
        ],
    )
    def test_closing_ids(self, k2: Renderer, text: str, closing: str) -> None:
        parser, _ = read(k2, text)
        assert k2.tokenizer.decode_text(k2.close_turn(parser)) == closing

    def test_tokenizer_level_end_gives_out_what_is_held_back(self, k2: Renderer) -> None:
        eos = k2.tokenizer.special("[EOS]")
        parser = k2.parser()
        events = [*parser.feed("é".encode()[0]), *parser.feed(eos)]
        assert events == [TextDelta("\ufffd"), End("stop")]
        parser = k2.parser()
        half = to_ids(k2.tokenizer, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0")
        assert reasons([event for token in [*half, eos] for event in parser.feed(token)]) == ["unfinished-call"]

    def test_a_think_channel_where_the_vocabulary_has_one(self, vocab_dir: Path) -> None:
        base = Tokenizer.from_dir(vocab_dir).n_ranks
        names = K2_NAMES | {22: "<think>", 23: "</think>"}
        decoder = {str(base + offset): {"content": name} for offset, name in names.items()}
        (vocab_dir / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
        renderer = renderer_of(Tokenizer.from_dir(vocab_dir))
        parser, events = read(renderer, "<think>t</think>a")
        assert [e.text for e in events if isinstance(e, ThinkingDelta)] == ["t"]
        assert parser.message() == {"role": "assistant", "content": "a", "reasoning_content": "t"}
        cut, _ = read(renderer, "<think>t")
        assert renderer.tokenizer.decode_text(cut.close_ids()) == "</think><|im_end|>"


PIECES = [*filter(MARKER.fullmatch, K2_NAMES.values()), "functions.f:0", "{}", "a", "🙂", "[EOS]", CALL, SECTION]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=10), half=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_cut_anywhere_in_any_disorder(k2: Renderer, pieces: list[str], half: int) -> None:
    """No exception, no marker in text, one end; the closed history says what the events said."""
    ids = [*to_ids(k2.tokenizer, "".join(pieces[:5])), half, *to_ids(k2.tokenizer, "".join(pieces[5:]))]
    stops = [at for at, token in enumerate(ids) if token in k2.stop_ids]
    ids = ids[: stops[0] + 1] if stops else ids
    parser = k2.parser()
    events = [event for token in ids for event in parser.feed(token)] + parser.finish("cancelled")
    assert [event for event in events if isinstance(event, End)] == events[-1:]
    assert not any("<|" in e.text for e in events if isinstance(e, TextDelta | ToolCallDelta))
    (entry,) = k2.parse_transcript(k2.generation_prompt() + ids + k2.close_turn(parser))
    assert entry.complete
    live = parser.message()
    assert entry.message["content"] == live["content"]
    # A history keeps arguments that are no JSON object; a live call needs one.
    calls = [call for call in entry.message.get("tool_calls", ()) if is_json_object(call["function"]["arguments"])]
    assert calls == live.get("tool_calls", [])


texts = st.one_of(st.text(max_size=10), st.sampled_from(["<|im_end|>", "## Return of x\ny", "<|tool_call_begin|>"]))
histories = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": texts}),
        st.fixed_dictionaries({"role": st.just("tool"), "content": texts, "tool_call_id": st.just("functions.f:0")}),
        st.builds(
            lambda content, raw: {
                "role": "assistant",
                "content": content,
                "tool_calls": [
                    {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": raw}}
                ],
            },
            texts,
            texts,
        ),
    ),
    max_size=5,
)


@given(history=histories)
@settings(max_examples=150, deadline=None)
def test_a_history_reads_back(k2: Renderer, history: list[dict[str, Any]]) -> None:
    ids = k2.render_messages(history, k2.new_context())
    entries = k2.parse_transcript(ids)
    assert [entry.message for entry in entries] == history
    assert [entry.problems for entry in entries] == [()] * len(history)


def test_ids_that_are_no_history(k2: Renderer) -> None:
    for ids in ([1, 2], [k2.tokenizer.special("<|im_user|>")], [k2.tokenizer.special("<|im_end|>")]):
        (entry,) = k2.parse_transcript(ids)
        assert entry.kind == "stray"
