"""The plan against free memory: what ranks need is what they allocate, and an error names device, numbers, way out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from k3cli.config import K3_SHAPE
from k3cli.errors import FitError
from k3cli.model import fit, placement, weights
from k3cli.model.blocks import Weights
from k3cli.model.config import ModelConfig
from k3cli.model.fit import Device, check_fit, needs, shortage
from k3cli.model.ranks import load_ranks
from k3cli.model.sizing import weigh
from tests.model.sizes import allocated

K3 = ModelConfig.from_dir(K3_SHAPE)
BF16, FP32 = torch.bfloat16, torch.float32
GB = 10**9


@pytest.fixture
def small(split_folders: dict[str, Path]) -> ModelConfig:
    return ModelConfig.from_dir(split_folders["k3"])


@pytest.fixture(autouse=True)
def no_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "available_memory", lambda device: 0)


@pytest.mark.parametrize("name", ["k3", "linear"])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_planned_is_what_is_allocated(split_folders: dict[str, Path], name: str, world: int):
    """131 and 97 ids don't divide; linear's experts have owners, and each rank one expert of zeros beside its own."""
    config = ModelConfig.from_dir(split_folders[name])
    planned = weigh(config, BF16, world)
    for rank in range(world):
        held = Weights(config, torch.device("meta"), BF16, rank, world)
        for layer in held.layers:
            if hasattr(layer.attention, "kv_b"):
                layer.attention.finish()
        assert sum(part.ranks[rank] for part in planned) == allocated(held)


def devices(*free: float, kind: str = "cuda") -> list[Device]:
    return [Device("cpu" if kind == "cpu" else f"cuda:{i}", int(size)) for i, size in enumerate(free)]


def test_k3_on_too_few_gpus_is_told_how_many():
    assert shortage(K3, BF16, devices(*[280 * GB] * 8)) is None
    problem = shortage(K3, BF16, devices(*[145 * GB] * 8))
    assert problem is not None
    assert int(problem.exit_code) == 4
    assert re.match(r"rank \d on cuda:\d needs 2\d\d\.\d GB \(.*of weights.*\), 145.0 GB are free; ", str(problem))
    assert "nearest that fits: --gpus 16, " in str(problem)
    assert "(this machine has " in str(problem)
    each = float(re.search(r"--gpus 16, ([\d.]+) GB", str(problem))[1])
    assert shortage(K3, BF16, devices(*[(each + 0.1) * GB] * 16)) is None
    assert shortage(K3, BF16, devices(*[(each - 0.1) * GB] * 16)) is not None


def test_the_device_that_lacks_most_is_named():
    free = [280 * GB] * 8
    free[2], free[5], free[7] = 150 * GB, 90 * GB, 120 * GB
    problem = shortage(K3, BF16, devices(*free))
    assert problem is not None
    assert problem.found.startswith("rank 5 on cuda:5 needs")
    assert "90.0 GB are free" in problem.found


def proposed(problem: FitError | None) -> dict[str, str]:
    assert problem is not None
    assert problem.do is not None
    words = shlex.split(problem.do.split("nearest that fits: ")[1])
    return dict(zip(words[::2], words[1::2], strict=True))


def test_gpus_that_have_room_are_proposed(small: ModelConfig):
    need = {count: max(n.total for n in needs(small, BF16, "cuda", count)) for count in (1, 2, 4)}
    assert need[1] > need[2] > need[4]
    assert proposed(shortage(small, BF16, devices(need[1], need[1], 10, need[1]))) == {"--gpus": "0,1"}
    assert proposed(shortage(small, BF16, devices(need[1], 10))) == {"--device": "cuda:0"}
    assert proposed(shortage(small, BF16, devices(10, need[2], 10, need[2]))) == {"--gpus": "1,3"}
    assert shortage(small, BF16, devices(need[2], need[2])) is None


def test_a_narrower_type_is_proposed_where_it_is_enough(small: ModelConfig):
    need = max(n.total for n in needs(small, BF16, "cuda", 1))
    assert proposed(shortage(small, FP32, devices(need))) == {"--dtype": "bfloat16"}


def test_the_cpu_is_proposed_when_no_gpu_has_room(small: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit, "available_memory", lambda device: 10 * GB)
    assert proposed(shortage(small, BF16, devices(1000))) == {"--device": "cpu"}


def test_on_a_cpu_fewer_ranks_need_less(small: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit, "fast_bf16_cpu", lambda: (False, ""))
    one = needs(small, FP32, "cpu", 1)[0].total
    two = sum(n.total for n in needs(small, FP32, "cpu", 2))
    assert one < two
    problem = shortage(small, FP32, devices(*[one / 2 + 1] * 2, kind="cpu"))
    assert problem is not None
    assert problem.found.startswith("each of 2 ranks on the CPU needs")
    assert proposed(problem) == {"--gpus": "1"}
    problem = shortage(small, FP32, devices(100, kind="cpu"))
    assert problem is not None
    assert "use a smaller model" in str(problem)


def test_unknown_memory_stops_nobody(small: ModelConfig):
    assert shortage(small, BF16, [Device("cuda:0", None), Device("cuda:1", None)]) is None


def test_checked_before_anything_is_allocated(
    split_folders: dict[str, Path], small: ModelConfig, monkeypatch: pytest.MonkeyPatch
):
    """Over two processes: the others end, too."""

    def allocated(*args: object) -> None:
        raise AssertionError("weights were allocated")

    monkeypatch.setattr(weights, "Weights", allocated)
    monkeypatch.setattr(placement, "available_memory", lambda device: 1000)
    with pytest.raises(FitError, match=r"cpu needs .*0.000 GB are free"):
        check_fit(small, FP32, torch.device("cpu"))
    with pytest.raises(FitError, match=r"rank 0 on cpu needs .*0.000 GB are free.*; (use|nearest)"):
        load_ranks(split_folders["k3"], small, ["cpu"] * 2, device="cpu", dtype="float32", window=8)
