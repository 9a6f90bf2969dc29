"""`--spec`, `--window` and `--draft-from`: what they change, what they refuse, what is told."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from k3cli.commands import drafts
from k3cli.commands.drafts import Drafts
from k3cli.config import NANO
from k3cli.engine.drafting.choose import choose
from k3cli.engine.drafting.policy import Policy
from k3cli.errors import ModelError, UsageError


def test_drafts_are_told_and_change_no_answer(k3, monkeypatch) -> None:
    # Steps of the small model take no longer than looking for a draft; none is to depend on how long anything takes.
    monkeypatch.setattr(Policy, "choose", lambda self, drafts, confidence, *_: 1 + min(drafts, self.rows - 1))
    monkeypatch.setattr(Policy, "resting", lambda self: False)
    text = "so it goes, so it goes, so it goes, so it goes"
    plain = k3("chat", "-s", "plain", "-p", text, "--spec", "off")
    drafted = k3("chat", "-s", "drafted", "-p", text)
    assert plain.out == drafted.out
    assert "k3: drafts" not in plain.err
    assert "k3: drafts suffix: " in drafted.err
    assert "accepted by place" in drafted.err
    assert drafted.err.index("k3: drafts") < drafted.err.index("k3: saved")
    told = k3("chat", "-s", "drafted", "-p", text, "--json", "--window", "2").one("speculation")
    assert (told["drafter"], told["window"], len(told["acceptance"])) == ("suffix", 2, 1)
    assert told["tokens_per_step"] > 1.3
    off = k3("chat", "-s", "plain", "-p", text, "--json", "--spec", "off").one("speculation")
    assert (off["drafter"], off["tokens_per_step"], off["acceptance"]) == ("off", 1.0, [])
    resumed = k3("resume", "drafted", "-p", text, "--json", "--spec", "suffix").one("speculation")
    assert resumed["tokens_per_step"] > 1.3
    forked = k3("fork", "drafted", "-p", text, "--ephemeral", "--json").one("speculation")
    assert forked["tokens_per_step"] > 1.3


def test_other_texts_are_drafted_from(k3, tmp_path, monkeypatch) -> None:
    # Every draft is verified, so that steps do not depend on how long they take.
    monkeypatch.setattr(Policy, "choose", lambda self, drafts, confidence, *_: 1 + min(drafts, self.rows - 1))
    monkeypatch.setattr(Policy, "resting", lambda self: False)
    prompt = "slow 20"  # answered with words that are not in the prompt
    alone = k3("chat", "-s", "a", "-p", prompt, "--json").one("speculation")["steps"]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{number}" for number in range(20)))
    for source in (str(text), "session:a"):
        told = k3("chat", "-p", prompt, "--json", "--draft-from", source).one("speculation")
        assert told["steps"] < 0.8 * alone, source


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--spec", "eagle"), "--spec is 'eagle'; expected auto, off, suffix, dspark[:DIR] or both[:DIR]"),
        (("--window", "9"), "--window is 9; expected 1 to 8"),
        (("--window", "0"), "--window is '0'; expected a whole number"),
        (("--draft-from", "missing.txt"), "--draft-from missing.txt: No such file or directory"),
        (("--draft-from", "."), "--draft-from .: Is a directory"),
        (("--spec", "off", "--draft-from", "missing.txt"), "--draft-from with --spec off"),
        (("--spec", "off", "--window", "4"), "--window 4 with --spec off"),
    ],
)
def test_what_is_refused_before_the_model_is_loaded(k3, options, told) -> None:
    done = k3("chat", "-p", "Hello", *options)
    assert done.code == 2
    assert told in done.err
    assert len(done.err.splitlines()) == 1


def test_a_window_of_one_or_from_elsewhere_goes_with_no_drafts(k3, monkeypatch) -> None:
    assert k3("chat", "-p", "Hello", "--spec", "off", "--window", "1").code == 0
    monkeypatch.setenv("K3_WINDOW", "4")
    assert k3("chat", "-p", "Hello", "--spec", "off").code == 0
    monkeypatch.setenv("K3_SPEC", "off")
    assert "--window 4 with K3_SPEC off" in k3("chat", "-p", "Hello", "--window", "4").err


def test_a_session_that_is_not_there(k3) -> None:
    done = k3("chat", "-p", "Hello", "--draft-from", "session:nobody")
    assert done.code == 6
    assert "nobody" in done.err


def test_the_doctor_tells_the_policy_and_its_inputs(k3, monkeypatch) -> None:
    rows = {event["name"]: event for event in k3("doctor", "--json").events if event["type"] == "check"}
    assert rows["drafts"]["value"] == "both"
    assert "auto" in rows["drafts"]["reason"]
    assert "after a resume" in rows["draft model"]["reason"]
    assert {"rows of a step", "cost of one more row", "loss allowed"} <= set(rows)
    monkeypatch.setenv("K3_SPEC", "off")
    rows = {event["name"]: event for event in k3("doctor", "--json").events if event["type"] == "check"}
    assert (rows["drafts"]["value"], rows["drafts"]["reason"]) == ("off", "asked for by K3_SPEC")
    assert "loss allowed" not in rows


def test_the_doctor_tells_of_a_draft_model_that_cannot_be_used(k3, monkeypatch, tmp_path) -> None:
    model = tmp_path / "nano"
    shutil.copytree(NANO, model)
    weights = model / "dspark" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    done = k3("doctor", "--json", "-m", str(model))
    rows = {event["name"]: event for event in done.events if event["type"] == "check"}
    assert done.code == 0  # text is drafted from
    assert rows["drafts"]["value"] == "suffix"
    assert "model.safetensors cannot be read" in rows["drafts"]["reason"]
    for spec, code, found in (("dspark", 3, "model.safetensors cannot be read"), ("both:/nowhere", 2, "no draft in")):
        monkeypatch.setenv("K3_SPEC", spec)
        done = k3("doctor", "--json", "-m", str(model))
        (row,) = [event for event in done.events if event.get("name") == "draft model"]
        assert (done.code, row["ok"]) == (code, False)
        assert found in row["reason"]


@pytest.mark.parametrize("key", ["num_hidden_layers", "block_size"])
def test_a_draft_with_a_number_that_cannot_be_is_refused_where_it_was_asked_for(key, k3, tmp_path) -> None:
    """Before the model is loaded. What `auto` does then is the test below."""
    model = tmp_path / "nano"
    (model / "dspark").mkdir(parents=True)
    raw = json.loads((NANO / "dspark" / "config.json").read_text())
    (model / "dspark" / "config.json").write_text(json.dumps(raw | {key: -1}))
    for spec in ("dspark", f"both:{model}/dspark"):
        done = k3("chat", "-p", "Hello", "-m", str(model), "--spec", spec)
        assert done.code == 3
        assert f"dspark/config.json key {key} is -1; expected an integer from 1 to" in done.err
        assert len(done.err.splitlines()) == 1


def test_an_own_draft_that_cannot_be_used_is_told() -> None:
    """Nobody asked for it, so text is drafted from all the same; asked for, it is an error."""
    asked: list[str] = []

    class Refusing:
        folder, ranks = NANO, 1

        def speculate(self, choice, window, **_) -> None:
            asked.append(choice.kind)
            if choice.model_based:
                raise ModelError("tensor fc.weight is missing from the draft")

    told = Drafts(choose("auto"), None, (), (), auto=True).apply(Refusing(), None)
    assert asked == ["both", "suffix"]
    assert told.startswith("drafts come from matches in the text alone")
    assert "fc.weight" in told
    with pytest.raises(ModelError):
        Drafts(choose("both"), None, (), ()).apply(Refusing(), None)
    assert Drafts(choose("suffix"), None, (), ()).apply(Refusing(), None) == ""


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="names a pipe by its number")
def test_no_more_is_read_of_a_text_than_may_be(monkeypatch) -> None:
    """A pipe and a device have no size beforehand."""
    for text, found in ((b"one\r\ntwo", "one\ntwo"), (b"one\r\ntwo and more", None)):
        monkeypatch.setattr(drafts, "LARGEST", 8)
        source, sink = os.pipe()
        os.write(sink, text)
        os.close(sink)
        if found is None:
            with pytest.raises(UsageError, match="a smaller text"):
                drafts._text(Path(f"/dev/fd/{source}"))
        else:
            assert drafts._text(Path(f"/dev/fd/{source}")) == found
        os.close(source)
