"""`k3 debug tokens`: text and chat files to ids; importing the chat package loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from k3cli.chat.debug import debug_tokens, read_chat
from k3cli.chat.renderer import Renderer
from k3cli.errors import ModelError, UsageError


def test_text(vocab_dir: Path, xtml: Renderer) -> None:
    text = "message <|open|> 🙂\n"
    assert debug_tokens(vocab_dir, text=text) == xtml.tokenizer.encode_text(text)
    assert debug_tokens(vocab_dir, text="") == []


def test_chat_file(vocab_dir: Path, xtml: Renderer, tmp_path: Path) -> None:
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": False,
        "response_format": {"type": "json_object"},
    }
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(chat))
    assert debug_tokens(vocab_dir, chat=path) == xtml.render(chat)


def test_chat_file_of_a_kimi_linear_folder(vocab_dir: Path, k2: Renderer, tmp_path: Path) -> None:
    (vocab_dir / "config.json").write_text('{"model_type": "kimi_linear"}')
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(chat))
    assert debug_tokens(vocab_dir, chat=path) == k2.render(chat)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[]", "holds a list"), (b"{", "is no JSON"), (b"\xff", "is no JSON"), (None, "No such file")],
)
def test_bad_chat_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "chat.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_chat(path)


def test_one_input_is_needed(vocab_dir: Path) -> None:
    with pytest.raises(UsageError, match="neither text nor --chat"):
        debug_tokens(vocab_dir)
    with pytest.raises(UsageError, match="both text and --chat"):
        debug_tokens(vocab_dir, text="x", chat="y")
    with pytest.raises(ModelError, match="No such file"):
        debug_tokens(vocab_dir / "nowhere", text="x")


def test_chat_imports_no_torch(repo_root: Path) -> None:
    heavy = "{'torch', 'triton', 'numpy', 'transformers'}"
    code = f"import sys, k3cli.chat.debug, k3cli.chat.xtml, k3cli.chat.k2; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")
