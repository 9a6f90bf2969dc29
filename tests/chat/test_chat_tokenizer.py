"""Tokenizer: published ids, long text, specials by name, bad files."""

from __future__ import annotations

import base64
import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3cli.chat import tokenizer as module
from k3cli.chat.specials import K2_NAMES, K3_NAMES
from k3cli.chat.tokenizer import StreamDecoder, Tokenizer, split_long
from k3cli.errors import ModelError, UsageError

# Chat-format notes, section 1.3.
PUBLISHED = {
    "你好，世界": [33845, 378, 2243],
    "Hello 世界123456": [19180, 220, 2243, 6694, 12972],
    "don't DON'T": [88709, 92629, 64833],
    "  \n\n x": [23118, 1288],
    "a\tb   c": [64, 3214, 256, 275],
    "<|open|>message": [27, 91, 4454, 91, 29, 2778],
    "<|end_of_msg|>": [27, 91, 517, 5118, 14222, 91, 29],
    "[EOS]": [58, 85521, 60],
    "🙂": [5885, 46813],
    "naïve café": [4768, 44187, 367, 70591],
    "日本語テスト": [4546, 63011, 25875, 33360],
    "xxx   ": [26713, 274],
}

# Section 1.5, "handy ids".
HANDY = {
    "message": [2778], " role": [6244], '="': [878], '"': [1], "user": [2482], "assistant": [69702], "system": [14062],
    "tool": [20960], " tool": [4453], " index": [4002], " type": [1798], " key": [2355], " name": [1530],
    "think": [39964], "response": [12092], "tools": [25385], "call": [10257], "argument": [47185], "json": [5534],
    "string": [2033], "number": [10006], "boolean": [16849], "null": [6562], "object": [3721], "array": [4392],
    "1": [16], "2": [17], "10": [795], "tool-declare": [20960, 120083, 677], "thinking-effort": [130400, 59991, 470],
    "tool-choice": [20960, 135230], "response-format": [12092, 46906],
}  # fmt: skip


K3_BY_ID = {f"BASE+{offset}": name for offset, name in K3_NAMES.items() if offset not in (0, 1)}


@pytest.mark.parametrize(("text", "ids"), (PUBLISHED | HANDY).items())
def test_published_ids(public: Tokenizer, text: str, ids: list[int]) -> None:
    assert public.encode_text(text) == ids
    assert public.decode_text(ids) == text


def test_public_specials(public: Tokenizer) -> None:
    """Section 1.4: names and ids of K3, the rest reserved by absolute id."""
    assert public.n_ranks == 163_584
    assert public.n_vocab == 163_840
    known = {163584: "[BOS]", 163586: "<|end_of_msg|>", 163587: "<|open|>", 163588: "<|close|>", 163589: "<|sep|>",
             163602: "<|media_begin|>", 163605: "<|media_pad|>", 163649: "<osagent_mode>", 163839: "[PAD]"}  # fmt: skip
    for token, name in known.items():
        assert public.special(name) == token
    assert public.special("<|reserved_token_163592|>") == 163592


def test_specials_stand_on_top_of_any_vocabulary(vocab_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(vocab_dir)
    assert "default" in tokenizer.family_reason
    for offset, name in K3_NAMES.items():
        assert tokenizer.special(name) == tokenizer.n_ranks + offset
    assert tokenizer.n_vocab == tokenizer.n_ranks + 256


def test_model_type_names_the_family(vocab_dir: Path) -> None:
    (vocab_dir / "config.json").write_text('{"model_type": "kimi_linear"}')
    tokenizer = Tokenizer.from_dir(vocab_dir)
    for offset, name in K2_NAMES.items():
        assert tokenizer.special(name) == tokenizer.n_ranks + offset
    with pytest.raises(ModelError, match=r"no special token '<\|open\|>'"):
        tokenizer.special("<|open|>")


def test_unknown_model_type_is_refused(vocab_dir: Path) -> None:
    (vocab_dir / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match='"llama"; expected kimi_k3 or kimi_linear'):
        Tokenizer.from_dir(vocab_dir)


def added_tokens(folder: Path, names: dict[str, str]) -> None:
    decoder = {token: {"content": name, "special": True} for token, name in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))


def test_tokenizer_config_decides_names_and_ids(vocab_dir: Path) -> None:
    """A text-only checkpoint calls itself kimi_linear; the names in its tokenizer_config.json say K3."""
    base = Tokenizer.from_dir(vocab_dir).n_ranks
    (vocab_dir / "config.json").write_text('{"model_type": "kimi_linear"}')
    marks = ["<|sep|>", "<|close|>", "<|open|>", "<|end_of_msg|>"]
    added_tokens(vocab_dir, {str(base + 40 + i): name for i, name in enumerate(marks)})
    tokenizer = Tokenizer.from_dir(vocab_dir)
    assert tokenizer.family == "k3"
    assert [tokenizer.special(name) for name in marks] == [base + 40, base + 41, base + 42, base + 43]
    assert tokenizer.special_names[base] == f"<|reserved_token_{base}|>"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"0": "<|open|>"}, "'<|open|>' has id 0; expected an id from"),
        ({"99999": "<|im_end|>"}, "has id 99999"),
        ({"x": "<|open|>"}, "has id x"),
        ({"9" * 5000: "<|open|>"}, "has id 999"),
        ({"BASE": "<|open|>", "BASE+1": "<|open|>"}, "has ids"),
        ({"BASE": "<|open|>", "0BASE": "<|close|>"}, "lists an id twice"),
        ({"BASE": "<|reserved_token_BASE+1|>", **K3_BY_ID}, "name of another reserved id"),
        ({"BASE": "", "BASE+1": "<|open|>"}, "no content"),
        ({"BASE": "\ud800<|x|>", **K3_BY_ID}, "has half a character"),
        ({"BASE": "<|open|>"}, "no complete set of chat marks"),
    ],
)
def test_contradicting_tokenizer_config_is_refused(vocab_dir: Path, names: dict[str, str], message: str) -> None:
    base = Tokenizer.from_dir(vocab_dir).n_ranks

    def place(text: str) -> str:
        """BASE is the first special id, BASE+n the n-th after it."""
        return re.sub(r"BASE(?:\+(\d+))?", lambda found: str(base + int(found[1] or 0)), text)

    added_tokens(vocab_dir, {place(token): place(name) for token, name in names.items()})
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_dir(vocab_dir)
    assert message in str(caught.value)
    assert "tokenizer_config.json" in str(caught.value)


def test_marks_of_two_families_are_refused(vocab_dir: Path) -> None:
    base = Tokenizer.from_dir(vocab_dir).n_ranks
    names = set(K3_NAMES.values()) | set(K2_NAMES.values())
    added_tokens(vocab_dir, {str(base + i): name for i, name in enumerate(sorted(names))})
    with pytest.raises(ModelError, match="two chat formats"):
        Tokenizer.from_dir(vocab_dir)


def line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d" % rank


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:7], b"!!!! 7", *lines[8:]], "line 8 has text that is no base64"),
        (lambda lines: [*lines[:7], b"Bw==", *lines[8:]], "line 8 has 'Bw=='"),
        (lambda lines: [*lines[:7], b"Bw== seven", *lines[8:]], "line 8 has 'Bw== seven'"),
        (lambda lines: [*lines[:7], b"Bw== -7", *lines[8:]], "line 8 has 'Bw== -7'"),
        (lambda lines: [*lines[:7], b"Bw== " + b"7" * 5000, *lines[8:]], "line 8 has 'Bw== 777"),
        (lambda lines: [*lines, line(b"zz", 5)], "rank 5 again, first in line 6"),
        (lambda lines: [*lines, line(b"\x05", len(lines))], "the token of line 6 again"),
        (lambda lines: [*lines, line(b"zz", len(lines) + 3)], "is missing"),
        (lambda lines: [line(b"zz", 0), *lines[1:]], "single byte 0x0"),
        (lambda lines: [], "single byte 0x0"),
    ],
)
def test_bad_ranks_are_refused_by_line(vocab_dir: Path, change, message: str) -> None:
    path = vocab_dir / "tiktoken.model"
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())))
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_dir(vocab_dir)
    assert message in str(caught.value)
    assert "tiktoken.model" in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tiktoken\.model cannot be read: No such file"):
        Tokenizer.from_dir(tmp_path)


def test_digest_sees_ranks_and_names_but_not_the_file_layout(vocab_dir: Path) -> None:
    plain = Tokenizer.from_dir(vocab_dir).digest
    path = vocab_dir / "tiktoken.model"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\r\n\r\n".join(reversed(lines)))
    assert Tokenizer.from_dir(vocab_dir, expected_digest=plain).digest == plain
    path.write_bytes(b"\n".join([*lines[:-1], line(b"other", len(lines) - 1)]))
    assert Tokenizer.from_dir(vocab_dir).digest != plain
    path.write_bytes(b"\n".join(lines))
    (vocab_dir / "config.json").write_text('{"model_type": "kimi_linear"}')
    with pytest.raises(ModelError, match=plain):
        Tokenizer.from_dir(vocab_dir, expected_digest=plain)


@pytest.mark.parametrize("run", [1, 3, 4, 5, 8, 9])
def test_long_runs_are_cut(monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    """Pieces are cut at 400,000 characters and in runs at 25,000; smaller limits here, the same code."""
    monkeypatch.setattr(module, "MAX_RUN", 4)
    monkeypatch.setattr(module, "MAX_CHARS", 20)
    text = "a" * run + " " * run + "b" * run
    # Plain definition: walk the characters, cut where a run would exceed the limit.
    expected: list[str] = []
    for start in range(0, len(text), 20):
        part, count = "", 0
        for char in text[start : start + 20]:
            count = count + 1 if part and part[-1].isspace() == char.isspace() else 1
            if count > 4:
                expected.append(part)
                part, count = "", 1
            part += char
        expected.append(part)
    assert list(split_long(text)) == expected


def test_limits_are_those_of_the_format() -> None:
    assert (module.MAX_CHARS, module.MAX_RUN) == (400_000, 25_000)
    assert [len(piece) for piece in split_long("x" * 60_000)] == [25_000, 25_000, 10_000]
    assert [len(piece) for piece in split_long("ab " * 200_000)] == [400_000, 200_000]


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_text_round_trips_and_never_holds_a_special(small: Tokenizer, text: str) -> None:
    ids = small.encode_text(text)
    assert all(map(small.is_text, ids))
    assert small.decode_text(ids) == text


@pytest.mark.parametrize("name", K3_NAMES.values())
def test_names_of_specials_are_text(small: Tokenizer, name: str) -> None:
    ids = small.encode_text(name)
    assert all(map(small.is_text, ids))
    assert small.decode_text(ids) == name


def test_lone_surrogate_is_refused(small: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"U\+D83D at character 2"):
        small.encode_text("ab\ud83d")


def test_ids_outside_the_vocabulary_are_refused(small: Tokenizer) -> None:
    for token in (-1, small.n_vocab):
        with pytest.raises(UsageError, match=f"token id {token}; expected an id from 0 to {small.n_vocab - 1}"):
            small.decode_bytes([token])


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=200, deadline=None)
def test_stream_decoder_equals_decoding_at_once(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    decoder = StreamDecoder()
    pieces = [decoder.push(data[a:b]) for a, b in itertools.pairwise(edges)]
    assert "".join(pieces) + decoder.flush() == data.decode("utf-8", "replace")


def test_stream_decoder_holds_back_half_a_character() -> None:
    decoder = StreamDecoder()
    data = "é🙂".encode()
    assert [decoder.push(data[i : i + 1]) for i in range(len(data))] == ["", "é", "", "", "", "🙂"]
    assert decoder.push(data[:1]) + decoder.flush() == "\ufffd"
    assert decoder.push(b"a") == "a"
