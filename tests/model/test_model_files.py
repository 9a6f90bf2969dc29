"""What lies in a model's folder and is no file of its kind: refused by name, at once, whoever reads it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3cli.chat.specials import read_specials
from k3cli.chat.tokenizer import read_ranks
from k3cli.commands.runtime import recommended_sampling
from k3cli.errors import ModelError
from k3cli.model.checkpoint import INDEX, open_checkpoint
from k3cli.model.config import ModelConfig
from k3cli.model.dspark.config import DraftConfig
from k3cli.model.dspark.weights import check_draft
from k3cli.model_files import LARGEST, LARGEST_INDEX, read_object

Reader = Callable[[Path], Any]
WAIT = 20


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A reader that waits for somebody to write, or reads without end, fails its test."""

    def late(*_: object) -> None:
        raise AssertionError(f"not read within {WAIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(WAIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def readers(k3_config: dict) -> dict[str, Reader]:
    """By file name, what reads that file first in a folder that has no other."""
    config = ModelConfig.from_dict(k3_config)
    return {
        "config.json": ModelConfig.from_dir,
        "dspark/config.json": lambda folder: DraftConfig.from_dir(folder / "dspark"),
        "generation_config.json": lambda folder: recommended_sampling(str(folder)),
        "tokenizer_config.json": lambda folder: read_specials(folder, 300),
        "tiktoken.model": lambda folder: read_ranks(folder / "tiktoken.model"),
        INDEX: lambda folder: open_checkpoint(folder, config),
    }


def large(file: Path) -> None:
    file.touch()
    os.truncate(file, (LARGEST_INDEX if file.name == INDEX else LARGEST) + 1)  # a hole: it takes no room on the disk


ODD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pipe": (os.mkfifo, "no regular file"),
    "a device": (lambda file: file.symlink_to("/dev/zero"), "no regular file"),
    "a folder": (Path.mkdir, "is a folder"),
    "a link to itself": (lambda file: file.symlink_to(file), "cannot be read: Too many levels"),
    "a link to nothing": (lambda file: file.symlink_to(file.parent / "gone"), "cannot be read: No such file"),
    "a large file": (large, " bytes; expected "),
}
NAMES = (
    "config.json",
    "dspark/config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tiktoken.model",
    INDEX,
)


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_refused_by_name(readers: dict[str, Reader], tmp_path: Path, name: str, what: str) -> None:
    make, words = ODD[what]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    make(tmp_path / name)
    with pytest.raises(ModelError) as refused:
        readers[name](tmp_path)
    assert f"{tmp_path / name} " in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": 1, "b": {"x": 1, "y": 2, "x": 1}}', 'the key "x" twice'),
        (b'{"a": "\xff"}', "byte 7 is no UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "is not JSON"),
        (b"", "is not JSON"),
        (b'{"a"', "is not JSON"),
        (b"[1, 2]", "no object but [1, 2]"),
        (b"null", "no object but null"),
    ],
)
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".json")])
def test_what_is_no_object_is_refused_by_name(
    readers: dict[str, Reader], tmp_path: Path, name: str, text: bytes, words: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ModelError) as refused:
        readers[name](tmp_path)
    assert f"{tmp_path / name} " in str(refused.value)
    assert words in str(refused.value)


def test_a_mark_in_front_is_no_damage(tmp_path: Path) -> None:
    """Editors of one system write U+FEFF first, or two bytes a character."""
    file = tmp_path / "config.json"
    for text in (b'\xef\xbb\xbf{"a": 1}', '{"a": 1}'.encode("utf-16")):
        file.write_bytes(text)
        assert read_object(file, "an object") == {"a": 1}


def test_a_draft_whose_weights_are_a_pipe(k3_config: dict, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    draft = DraftConfig("gqa", 40, 8, 1, 1, 131, 1e-5, 7, 3, (0,), 4, False, False, None, 1.0, 8, 1)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftConfig, "from_dir", lambda _: draft)
        with pytest.raises(ModelError, match=r"model\.safetensors is no file"):
            check_draft(tmp_path, ModelConfig.from_dict(k3_config))
