"""What runs with what, and that it is told: one line where all is alike, one for each operation where it isn't."""

from __future__ import annotations

import pytest
import torch
from k3_kernels import select

from k3cli.commands.doctor_checks import kernels
from k3cli.model.choices import eager_reason, kernel_choices
from k3cli.model.config import ModelConfig
from k3cli.model.weights import load_model

CPU, CUDA, F32 = torch.device("cpu"), torch.device("cuda"), torch.float32


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Triton ran on this device."""
    monkeypatch.setattr(select, "for_device", lambda kind: select.Choice(True, "able"))


def test_a_cpu_runs_references_and_says_why(k3_config: dict):
    config = ModelConfig.from_dict(k3_config)
    found = kernel_choices(config, CPU, F32, 8)
    assert set(found) >= {"kda.step", "kda.prefill", "mla.decode", "mla.prefill", "moe.route", "attnres.mix_norm"}
    assert not any(choice.kernel for choice in found.values())
    (row, graphs) = kernels(config, CPU, F32, 8)
    assert (row.name, row.value) == ("kernels", "reference (torch)")
    assert "device cpu" in row.reason
    assert "moe.experts_window" in row.reason
    assert (graphs.name, graphs.value) == ("CUDA graphs", "no")


def test_sizes_a_kernel_does_not_take_are_named(k3_config: dict, linear_config: dict, able: None):
    rows = {row.name: row for row in kernels(ModelConfig.from_dict(k3_config), CPU, F32, 8)}
    assert rows["kernel kda.step"].value == "reference (torch)"
    assert "16" in rows["kernel kda.step"].reason
    assert "20" in rows["kernel mla.decode"].reason
    assert rows["kernel attnres.mix_norm"].value == "Triton"
    found = kernel_choices(ModelConfig.from_dict(linear_config), CPU, F32, 8)
    assert "attnres.mix_norm" not in found
    assert "groups" in found["moe.route"].reason
    assert (
        "window of 20 rows"
        in kernel_choices(ModelConfig.from_dict(k3_config), CPU, F32, 20)["moe.experts_window"].reason
    )


def test_steps_are_recorded_when_nothing_in_them_waits_for_the_host(
    k3_config: dict, k3_config_wide: dict, able: None, monkeypatch: pytest.MonkeyPatch
):
    wide, tiny = ModelConfig.from_dict(k3_config_wide), ModelConfig.from_dict(k3_config)
    library = ("mla.prefill", "linear.few")  # bf16 on a Hopper GPU only
    assert all(choice.kernel for name, choice in kernel_choices(wide, CPU, F32, 8).items() if name not in library)
    assert "device cpu" in eager_reason(wide, CPU, F32, 8)
    # A CUDA device that isn't there can be asked about, as long as nothing is put on it.
    found = {name: select.Choice(name != "mla.prefill", "x") for name in kernel_choices(wide, CPU, F32, 8)}
    monkeypatch.setattr("k3cli.model.choices.kernel_choices", lambda *args: found)
    assert eager_reason(wide, CUDA, F32, 8) == ""
    found["mla.decode"] = select.Choice(False, "rank 20")
    assert eager_reason(tiny, CUDA, F32, 8) == "mla.decode runs as reference (rank 20)"
    monkeypatch.setattr(select, "for_device", lambda kind: select.Choice(False, "K3_KERNELS=reference"))
    assert eager_reason(wide, CUDA, F32, 8) == "K3_KERNELS=reference"


def test_a_step_that_can_not_be_recorded_runs_plainly_and_says_so(checkpoints, monkeypatch: pytest.MonkeyPatch):
    class Refused:
        def __enter__(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        def __exit__(self, *args: object) -> None:
            raise AssertionError("never entered")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", tuple)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: Refused())
    model, ids = load_model(checkpoints["k3"]).model, torch.arange(5)
    expected = model.verify(ids, model.new_state())[0]
    model._steps.eager = ""
    assert torch.equal(model.verify(ids[:1], model.new_state())[0], expected[:1])
    with pytest.warns(RuntimeWarning, match="recording a step of 5 rows failed: operation not permitted .* slower"):
        assert torch.equal(model.verify(ids, model.new_state())[0], expected)
    assert torch.equal(model.verify(ids, model.new_state())[0], expected)
