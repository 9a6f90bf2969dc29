"""The layout rules that keep three import packages side by side without breaking anyone else's."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

PACKAGES = {"k3cli": "k3cli", "k3_kernels": "kernels/k3_kernels", "k3_sessions": "sessions/k3_sessions"}
# Who may import whom, inside the project.
ARROWS = {"k3cli": {"k3cli", "k3_kernels", "k3_sessions"}, "k3_kernels": {"k3_kernels"}, "k3_sessions": {"k3_sessions"}}


def imported(path: Path) -> set[str]:
    """Top-level names a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_source_roots_hold_one_package_and_no_loose_module(repo_root: Path) -> None:
    for root in ("kernels", "sessions"):
        assert not list((repo_root / root).glob("*.py"))
    assert not list((repo_root / "tests").rglob("__init__.py"))


def test_no_module_is_named_after_a_library_it_would_hide(repo_root: Path) -> None:
    for folder in PACKAGES.values():
        assert not [p for p in (repo_root / folder).rglob("*.py") if p.stem in {"triton", "torch", "typer"}]


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_point_one_way(repo_root: Path, package: str) -> None:
    for path in (repo_root / PACKAGES[package]).rglob("*.py"):
        ours = imported(path) & (set(PACKAGES) | {"kernels", "sessions"})
        assert ours <= ARROWS[package], f"{path} imports {ours - ARROWS[package]}"


def test_store_never_imports_torch(repo_root: Path) -> None:
    for path in (repo_root / PACKAGES["k3_sessions"]).rglob("*.py"):
        assert "torch" not in imported(path), path


def test_help_and_version_import_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['k3', sys.argv[1]]\n"
        "from k3cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code in (0, None), end.code\n"
        "heavy = {'torch', 'triton', 'tiktoken', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", program, option], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_every_package_is_typed(repo_root: Path) -> None:
    for folder in PACKAGES.values():
        assert (repo_root / folder / "py.typed").is_file()


def test_each_folder_has_its_design_note(repo_root: Path) -> None:
    for folder in ("k3cli", "kernels", "sessions", "examples/train_nano"):
        assert (repo_root / folder / "README.md").is_file()


def test_both_commands_begin_where_signals_are_minded(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"k3": "k3cli.__main__:run", "k3cli": "k3cli.__main__:run"}


def test_wheel_has_exactly_three_top_level_names_and_the_model(repo_root: Path, tmp_path: Path) -> None:
    hatchling = pytest.importorskip("hatchling", reason="hatchling builds the wheel; `make test` installs it")
    assert hatchling
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=repo_root,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert any(name.startswith("k3cli/assets/k3-nano/") and name.endswith(".safetensors") for name in names)
    assert "k3cli/assets/k3-nano/tiktoken.model" in names


def test_shipped_model_is_small(repo_root: Path) -> None:
    size = sum(path.stat().st_size for path in (repo_root / "k3cli/assets/k3-nano").rglob("*") if path.is_file())
    assert 0 < size <= 32 * 1024 * 1024
