"""`k3 doctor --gpus N`: what each rank holds and needs, and how devices reach each other; GPUs are faked."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from k3cli.commands import doctor_checks
from k3cli.config import K3_SHAPE
from k3cli.model import links
from k3cli.model.config import ModelConfig
from k3cli.model.parallel import holding

Run = Callable[..., Any]
TOPO = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPHB\tPIX\t0-31\t0
GPU1\tNV18\t X \tNV4\tSYS\tPHB\t0-31\t0
GPU2\tSYS\tNV4\t X \tWEIRD\tSYS\t32-63\t1
GPU3\tPHB\tSYS\tWEIRD\t X \tSYS\t32-63\t1
NIC0\tPIX\tPHB\tSYS\tSYS\t X

Legend:

  X    = Self
"""
UUIDS = "0, GPU-aaaa\n1, GPU-bbbb\n2, GPU-cccc\n3, GPU-dddd\n"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Four GPUs with the driver's tool; `seen` are those of this process, in its order."""
    fake: dict[str, Any] = {"topo": TOPO, "seen": ["aaaa", "bbbb", "cccc", "dddd"], "peer": True, "free": 10**9}

    def run(words: list[str], **_: Any) -> Any:
        if fake["topo"] is None:
            raise FileNotFoundError(words[0])
        return subprocess.CompletedProcess(words, 0, fake["topo"] if words[1] == "topo" else UUIDS, "")

    monkeypatch.setattr(links.subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(fake["seen"]))
    properties = lambda index: SimpleNamespace(uuid=fake["seen"][index], name="H200")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (fake["free"], 10**9))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: fake["peer"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return fake


def ways(numbers: list[int]) -> dict[tuple[int, int], str]:
    return {(link.first, link.second): link.way for link in links.links(numbers)}


def test_links_are_those_of_the_drivers_table(gpus: dict[str, Any]):
    assert ways([0, 1, 2]) == {
        (0, 1): "NVLink, 18 links",
        (0, 2): "PCIe, from one CPU to another",
        (1, 2): "NVLink, 4 links",
    }
    gpus["seen"] = ["cccc", "bbbb"]  # CUDA_VISIBLE_DEVICES=2,1
    assert ways([0, 1]) == {(0, 1): "NVLink, 4 links"}


def test_what_nobody_knows_is_called_unknown(gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    assert ways([2, 3]) == {(2, 3): "direct, over what is unknown"}  # a word of a newer tool
    gpus["topo"] = None
    assert ways([0, 1]) == {(0, 1): "direct, over what is unknown"}
    gpus["peer"] = False
    assert ways([0, 1]) == {(0, 1): "through main memory"}

    def fails(a: int, b: int) -> bool:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", fails)
    (link,) = links.links([0, 1])
    assert (link.way, link.source) == ("unknown", "no driver")


def rows(found: Any, section: str) -> dict[str, dict[str, Any]]:
    return {e["name"]: e for e in found.events if e["type"] == "check" and e["section"] == section}


def test_doctor_tells_what_ranks_on_a_cpu_hold(k3: Run, splittable: Path):
    asked = ("doctor", "-m", str(splittable), "--device", "cpu", "--gpus", "2")
    found = k3(*asked, "--json")
    assert found.code == 0
    told = rows(found, "ranks")
    assert list(told) == ["rank 0", "rank 1", "plan"]
    assert told["plan"]["value"] == "fits"
    one, two = (told[f"rank {rank}"]["data"] for rank in range(2))
    assert one["holds"]["kda_heads"] == [0, 2]
    assert two["holds"]["kda_heads"] == [2, 4]
    assert two["holds"]["expert_columns"] == [64, 128]
    assert two["holds"]["experts"] == [0, 8]
    assert one["weights"] == sum(one["components"].values())
    assert one["components"]["experts, dequantised"] > 4 * one["components"]["routed experts"]
    assert one["needs"] > one["weights"]
    assert "KDA heads 2-3 of 4" in told["rank 1"]["reason"]
    assert rows(found, "links")["between ranks"]["value"] == "main memory"
    text = k3(*asked).out
    assert "\nranks\n   rank 0: cpu, weights " in text
    assert "\nlinks\n" in text


def test_doctor_on_gpus_names_links_and_the_rank_that_lacks(
    k3: Run, splittable: Path, gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor_checks, "kernels", lambda *_: iter(()))  # asks the device itself
    asked = ("doctor", "-m", str(splittable), "--gpus", "0,1", "--json")
    found = k3(*asked)
    assert found.code == 0
    told = rows(found, "links")
    assert told["0-1"]["value"] == "NVLink, 18 links"
    assert told["0-1"]["data"]["pairs"] == [[0, 1]]
    assert told["multicast"]["value"] == "off"
    gpus["free"] = 1000
    found = k3(*asked)
    assert found.code == 4
    told = rows(found, "ranks")
    assert not told["rank 1"]["ok"]
    assert "cuda:" in told["plan"]["value"]
    assert "1,000" in told["plan"]["value"] or "0.000 GB are free" in told["plan"]["value"]
    assert told["plan"]["reason"]


def test_holdings_cover_the_model_once():
    k3 = ModelConfig.from_dir(K3_SHAPE)
    for world in (2, 8, 32):
        every = [holding(k3, rank, world) for rank in range(world)]
        for name, size in (("kda_heads", 96), ("mla_heads", 96), ("ids", k3.vocab), ("expert_columns", 3072)):
            assert [i for held in every for i in getattr(held, name)] == list(range(size)), (name, world)
        assert all(held.experts == range(896) for held in every)
