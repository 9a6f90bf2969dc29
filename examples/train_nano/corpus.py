"""English and code for k3-nano: the running interpreter's own standard library (PSF licence).

Docstrings and the language reference that `pydoc` carries are the English; module sources are the code. A module is
held out of training when the hash of its name says so, so that perplexity is measured on text never seen.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

SKIP = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "lib2to3",
    "__pycache__",
    "encodings",
    "turtledemo",
    "pydoc_data",
}
HELD_OUT_IN = 25  # one module in so many


@dataclass(frozen=True)
class Document:
    """One text: `title` is a module or topic name; lines carry no trailing blanks and the text ends with a newline."""

    title: str
    kind: str  # "docs" or "code"
    text: str
    held_out: bool


def is_held_out(title: str) -> bool:
    return hashlib.sha256(title.encode()).digest()[0] < 256 // HELD_OUT_IN


def tidy(text: str) -> str:
    lines = [line.rstrip() for line in text.expandtabs(4).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def docstrings(module: str, tree: ast.Module) -> str:
    """All docstrings of a module, each under its dotted name."""
    parts = []

    def visit(node: ast.AST, name: str) -> None:
        doc = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if doc and len(doc) > 40:
            parts.append(f"{name}\n\n{doc}\n")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, DOCUMENTED):
                visit(child, f"{name}.{child.name}")  # type: ignore[union-attr]

    visit(tree, module)
    return "\n".join(parts)


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load_documents(root: Path | None = None) -> list[Document]:
    """Documents of the standard library under `root` (default: this interpreter's), sorted by title."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIP & set(parts) or path.stat().st_size > 200_000:
            continue
        module = ".".join(parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8", errors="ignore")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        docs = docstrings(module, tree)
        held = is_held_out(module)
        if len(docs) > 200:
            found.append(Document(module, "docs", tidy(docs), held))
        found.append(Document(module, "code", tidy(text), held))
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}
    for topic, text in sorted(topics.items()):
        title = f"topic {topic}"
        found.append(Document(title, "docs", tidy(text), is_held_out(title)))
    return found
