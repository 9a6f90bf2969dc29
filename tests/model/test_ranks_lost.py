"""Ranks that come and go: golden data over ranks of their own, lost and hung ranks, and worlds that can't be."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
import torch

from k3cli.errors import K3Error, UsageError
from k3cli.model.config import ModelConfig
from k3cli.model.peers import Peers
from k3cli.model.ranks import load_ranks, rank_devices
from tests.model.states import greedy

ROUNDING = 2e-3
LONG = pytest.mark.skipif(os.environ.get("K3_LONG") != "1", reason="slow: K3_LONG=1")


@pytest.mark.parametrize("size", [2, 4])
def test_golden_logits_and_answer(shared_dir: Path, load_both, size: int):
    """tiny-a; tiny-linear has 3 heads and can't be split."""
    folder = shared_dir / "oracle" / "tiny-a"
    golden, found = dict(np.load(folder / "golden.npz")), load_both(folder, size)
    try:
        net = found.many.model
        state = net.new_state()
        logits = net.prefill(torch.from_numpy(golden["tokens"]), state, logits="all")
        assert np.abs(logits.numpy() - golden["logits"]).max() < ROUNDING
        first = int(logits[-1].argmax())
        answer = [first, *greedy(net, state, first, len(golden["greedy"]) - 1)]
        assert answer == golden["greedy"].tolist()
    finally:
        found.peers.close()


@pytest.mark.parametrize(
    ("size", "rank", "how", "said"),
    [
        (2, 1, signal.SIGKILL, "rank 1 was ended by signal 9"),
        (2, 1, signal.SIGSTOP, "rank 1 has not answered for 2 s"),
        *(
            pytest.param(4, rank, how, f"rank {rank} ", marks=() if how == signal.SIGKILL else LONG)
            for rank in (1, 2, 3)
            for how in (signal.SIGKILL, signal.SIGSTOP)
        ),
    ],
)
def test_a_lost_rank_is_named_and_nothing_stays(
    split_folders: dict[str, Path], load_both, size: int, rank: int, how: int, said: str
):
    found = load_both(split_folders["k3"], size, seconds=2.0)
    net, state, pids = found.many.model, found.many.model.new_state(), found.peers.pids()
    greedy(net, state, 5, 2)
    # At a random moment of a step or between two.
    Timer(random.random() / 4, os.kill, (pids[rank - 1], how)).start()
    began = time.monotonic()
    with pytest.raises(K3Error, match=said):
        greedy(net, state, 5, 1000)
    assert time.monotonic() - began < 12
    with pytest.raises(K3Error, match=said):
        net.new_state()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_trouble_while_loading_names_its_rank(split_folders: dict[str, Path], tmp_path: Path):
    config = ModelConfig.from_dir(split_folders["k3"])
    with pytest.raises(K3Error, match=r"no config.json"):
        load_ranks(tmp_path, config, ["cpu"] * 2, device="cpu", dtype="float32", window=8)


def test_sizes_that_do_not_divide_and_devices_that_mean_nothing(split_folders: dict[str, Path]):
    config = ModelConfig.from_dir(split_folders["k3"])
    with pytest.raises(UsageError, match=r"3 GPUs.* 1, 2, 4"):
        load_ranks(split_folders["k3"], config, ["cpu"] * 3, device="cpu", dtype="float32", window=8)
    assert rank_devices(None, "cpu") == []
    assert rank_devices("1", "cpu") == []
    assert rank_devices("4", "cpu") == ["cpu"] * 4
    for gpus in ("all", "0,1"):
        with pytest.raises(UsageError, match="a number of ranks"):
            rank_devices(gpus, "cpu")


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_lost_while_all_load_is_named(how: int):
    peers = Peers(["cpu", "cpu"], seconds=1.0)
    try:
        os.kill(peers.pids()[0], how)
        began = time.monotonic()
        with pytest.raises(RuntimeError) as told:
            peers.world.all(0)
        said = str(peers.explain(told.value))
        assert time.monotonic() - began < 15
        assert ("rank 1 has not answered for 1 s" if how == signal.SIGSTOP else "rank 1 was ended by signal 9") in said
    finally:
        peers.close()


def test_a_signal_ends_the_wait_for_ranks_that_load():
    peers = Peers(["cpu", "cpu"])
    try:
        os.kill(peers.pids()[0], signal.SIGSTOP)
        Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            peers.world.all(0)
        assert time.monotonic() - began < 5
    finally:
        peers.close()
