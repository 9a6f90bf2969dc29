"""Vocabularies for the chat tests: a small one made here, so that most tests need no big file, and the public one."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from k3cli.chat.renderer import Renderer, renderer_of
from k3cli.chat.tokenizer import Tokenizer

WORDS = (
    "message", "think", "response", "tools", "call", " key", '="', '"_', "user", " city", "🙂", "你",
)  # fmt: skip


def small_ranks() -> list[bytes]:
    """256 bytes and the prefixes of a few words: some tags are one token and some many, and so are characters."""
    tokens = [bytes([byte]) for byte in range(256)]
    for word in map(str.encode, WORDS):
        tokens += [word[:length] for length in range(2, len(word) + 1) if word[:length] not in tokens]
    return tokens


def write_ranks(folder: Path, tokens: list[bytes]) -> Path:
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    return folder


@pytest.fixture
def vocab_dir(tmp_path: Path) -> Path:
    """A folder with a good small tiktoken.model and nothing else."""
    return write_ranks(tmp_path, small_ranks())


@pytest.fixture(scope="session")
def make_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    """A small vocabulary as a model folder of that `model_type` would have it."""

    def make(model_type: str) -> Tokenizer:
        folder = write_ranks(tmp_path_factory.mktemp("vocab"), small_ranks())
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        return Tokenizer.from_dir(folder)

    return make


@pytest.fixture(scope="session")
def small(make_tokenizer: Callable[[str], Tokenizer]) -> Tokenizer:
    return make_tokenizer("kimi_k3")


@pytest.fixture(scope="session")
def xtml(small: Tokenizer) -> Renderer:
    return renderer_of(small)


@pytest.fixture(scope="session")
def k2(make_tokenizer: Callable[[str], Tokenizer]) -> Renderer:
    return renderer_of(make_tokenizer("kimi_linear"))


@pytest.fixture(scope="session")
def public(shared_dir: Path) -> Tokenizer:
    """The public 163,584-rank vocabulary."""
    folder = shared_dir / "tokenizer"
    if not (folder / "tiktoken.model").is_file():
        pytest.skip("the public tiktoken.model (../shared/tokenizer) is not beside this checkout")
    return Tokenizer.from_dir(folder)
