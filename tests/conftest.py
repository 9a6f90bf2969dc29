"""Shared fixtures: the golden data, and a private home so that no test touches the user's files."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of golden data beside a development checkout."""
    path = ROOT.parent / "shared"
    if not (path / "oracle").is_dir():
        pytest.skip("golden data (../shared/oracle) is not beside this checkout")
    return path


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sessions, caches and hub look-ups of a test stay in its own folder."""
    home = tmp_path / "home"
    monkeypatch.setenv("K3_HOME", str(home / "k3"))
    monkeypatch.setenv("K3_CACHE", str(home / "cache"))
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return home
