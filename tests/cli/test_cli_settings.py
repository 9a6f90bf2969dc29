"""Settings: file, environment and options, in that order, and everything unknown refused."""

from __future__ import annotations

import json

import pytest

from k3cli.config import KEYS, NANO, load_settings, parse_bytes
from k3cli.errors import UsageError


@pytest.fixture
def home(tmp_path):
    return tmp_path / "a home"


def write(home, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)


def test_defaults_need_no_file_and_no_environment(home) -> None:
    settings = load_settings(env={"K3_HOME": str(home)})
    assert settings.home == home
    assert settings.store_root == home / "sessions"
    assert settings.model is None
    assert settings.model_ref.endswith("k3-nano")
    assert settings.sources == {}
    assert not home.exists()


def test_options_beat_environment_beats_file(home) -> None:
    write(home, 'device = "cuda:1"\ndtype = "float32"\ntop_k = 7\nthinking = false\n')
    env = {"K3_HOME": str(home), "K3_DTYPE": "bfloat16", "K3_TOP_K": "8"}
    settings = load_settings({"top_k": 9, "top_p": None}, env)
    assert (settings.device, settings.dtype, settings.top_k, settings.thinking) == ("cuda:1", "bfloat16", 9, False)
    assert settings.sources["device"] == f"device in {home / 'config.toml'}"
    assert settings.sources["dtype"] == "K3_DTYPE"
    assert settings.sources["top_k"] == "--top-k"
    assert "top_p" not in settings.sources


def test_unknown_key_in_the_file_is_refused_with_the_valid_ones(home) -> None:
    write(home, "temprature = 1\n")
    with pytest.raises(UsageError) as caught:
        load_settings(env={"K3_HOME": str(home)})
    assert "'temprature'" in str(caught.value)
    assert all(key in str(caught.value) for key in KEYS)


def test_unknown_variable_is_refused_with_the_valid_ones(home) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(env={"K3_HOME": str(home), "K3_TEMPRATURE": "1"})
    assert "K3_TEMPRATURE" in str(caught.value)
    assert "K3_TEMPERATURE" in str(caught.value)
    assert "K3_HOME" in str(caught.value)
    load_settings(env={"K3_HOME": str(home), "K3S_TOKEN": "other programs", "_K3_COMPLETE": "x", "K3_DEVICE": ""})


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("device", "gpu"),
        ("device", "cuda:x"),
        ("dtype", "fp8"),
        ("window", "0"),
        ("window", "1.5"),
        ("effort", "medium"),
        ("thinking", "maybe"),
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("top_p", "1.01"),
        ("top_k", "-1"),
        ("max_tokens", "0"),
        ("seed", "-1"),
        ("quota", "many"),
        ("quota", "5 XB"),
        ("quota", "9" * 400),
        ("model", ""),
    ],
)
def test_bad_values_are_refused_naming_where_they_came_from(home, key, bad) -> None:
    if bad:
        with pytest.raises(UsageError) as caught:
            load_settings(env={"K3_HOME": str(home), f"K3_{key.upper()}": bad})
        assert f"K3_{key.upper()} is {bad!r}" in str(caught.value)
    write(home, f'{key} = "{bad}"\n')
    with pytest.raises(UsageError) as caught:
        load_settings(env={"K3_HOME": str(home)})
    assert f"{key} in {home / 'config.toml'}" in str(caught.value)


@pytest.mark.parametrize("key", ["seed", "top_k", "max_tokens", "window", "temperature", "quota"])
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
def test_numbers_that_are_not_finite_are_refused(home, key, value) -> None:
    write(home, f"{key} = {value}\n")
    with pytest.raises(UsageError, match=f"{key} in "):
        load_settings(env={"K3_HOME": str(home)})


def test_a_home_that_is_no_folder(tmp_path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(UsageError, match="is no folder"):
            load_settings(env={"K3_HOME": str(path)})
    with pytest.raises(UsageError, match="no home folder"):
        load_settings(env={"K3_HOME": "~nobody-of-that-name/k3"})
    with pytest.raises(UsageError, match=r"no home folder for ~nobody.*set K3_CACHE"):
        load_settings(env={"K3_HOME": str(tmp_path), "K3_CACHE": "~nobody-of-that-name/k3"})


def test_a_tilde_is_the_home_folder_wherever_a_path_is_written(k3, tmp_path, monkeypatch) -> None:
    """No shell puts the folder in behind a = that belongs to an option, or in a file."""
    from k3cli.model.digest import cache_dir

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("K3_HOME", "~/home")
    monkeypatch.setenv("K3_CACHE", "~/cache")
    (tmp_path / "text").write_text("Be kind.")
    assert cache_dir() == tmp_path / "cache"
    assert k3("chat", "-s", "a", "-p", "hi", "--system=~/text", "--draft-from=~/text").code == 0
    assert (tmp_path / "home" / "sessions" / "FORMAT").is_file()
    assert k3("export", "a", "~/file").code == 0
    assert (tmp_path / "file").is_file()
    assert k3("import", "~/file", "--name", "b").code == 0
    assert "~nobody-of-that-name/f does not exist" in k3("import", "~nobody-of-that-name/f").err
    shape = json.loads((NANO / "config.json").read_text())
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    assert k3("plan", "~/shape.json").code == 0
    (tmp_path / "ids").write_text("[1]")
    assert "wrote logits" in k3("debug", "logits", "--model", str(NANO), "--tokens-file=~/ids", "--out=~/out").err
    assert (tmp_path / "out").is_file()
    assert "~" not in k3("bench", "compare", "~/a", "~/b").err


@pytest.mark.parametrize(
    "text",
    ["device = ", "\xff\xfe", "seed = " + "9" * 5000, "seed = " + "[" * 5000],
    ids=["no value", "bytes", "long", "deep"],
)
def test_a_file_that_is_no_toml_is_refused(home, text) -> None:
    home.mkdir()
    (home / "config.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"is not TOML"):
        load_settings(env={"K3_HOME": str(home)})


@pytest.mark.parametrize(
    ("text", "count"),
    [(5, 5), ("0", 0), ("200 GB", 200 * 10**9), ("1.5GiB", 3 * 2**29), ("7 k", 7000), ("3b", 3), ("2TiB", 2**41)],
)
def test_bytes(text, count) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", [-1, True, None, "", "GB", "1 G B", "1e9"])
def test_not_bytes(text) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)
