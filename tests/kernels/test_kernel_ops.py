"""Every operator against its definition in fp64, over the table in k3_kernels.ops."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.ops import OPS, Op, error

CASES = [
    pytest.param(op, T, dtype, id=f"{op.name}-{T}-{str(dtype)[6:]}")
    for op in OPS
    for T in op.lengths
    for dtype in op.tolerance
]


def tensors(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def flat(arguments) -> list[torch.Tensor]:
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += flat(argument)
    return found


@pytest.mark.parametrize(("op", "T", "dtype"), CASES)
def test_against_the_definition(op: Op, T: int, dtype: torch.dtype):
    arguments = op.make(T, dtype, torch.Generator().manual_seed(T))
    before = [tensor.clone() for tensor in flat(arguments)]
    # Fresh memory full of NaN: whatever an operator forgets to write shows.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        found = tensors(op.run(*arguments))
    finally:
        torch.use_deterministic_algorithms(False)
    expected = tensors(op.definition(*arguments))
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        worst = error(a, b)
        where = int((a.double() - b.double()).abs().argmax()) if a.shape == b.shape and a.numel() else None
        assert worst <= op.tolerance[dtype], f"output {i}: error {worst:.3g} at flat index {where} ({op.why})"
    # Inputs are nobody's scratch space.
    assert all(torch.equal(a, b) for a, b in zip(flat(arguments), before, strict=True))


def test_error_sees_what_it_must():
    ones = torch.ones(3)
    assert error(ones, ones) == 0
    assert error(ones * 1.5, ones) == 0.5
    assert error(torch.tensor([1.0, float("nan"), 1.0]), ones) == float("inf")
    assert error(torch.ones(2), ones) == float("inf")


def test_table_covers_every_operator():
    import k3_kernels.kda as kda
    from k3_kernels import attnres, conv, mla, moe, norm, ranks

    covered = {op.run for op in OPS}
    assert {kda.prefill, conv.short_conv, mla.prefill, mla.decode, attnres.mix_norm, norm.gated_rms_norm} <= covered
    assert {moe.experts_grouped, moe.experts_window, ranks.add} <= covered
