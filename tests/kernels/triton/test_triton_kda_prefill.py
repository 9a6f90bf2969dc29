"""The KDA prefill kernels against the token loop in fp64: interpreted here without a GPU, compiled with one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from k3_kernels import kda
from k3_kernels.ops import error, kda_definition

from tests.kernels.triton.memory import poisoned

prefill_triton = pytest.importorskip("k3_kernels.kda.prefill_triton")
Tuning = prefill_triton.Tuning
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
H, K, V = (5, 128, 128) if CUDA else (2, 32, 16)
# fp32 takes the exact form unless told otherwise; the factored one, which bf16 takes, loses digits of large exponents.
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 5e-3}
FACTORED = Tuning(exact=False)
KINDS = [pytest.param(torch.float32, FACTORED, id="fp32")]
if CUDA:
    KINDS += [
        pytest.param(torch.float32, Tuning(), id="fp32-exact"),
        pytest.param(torch.bfloat16, Tuning(hopper=False), id="bf16"),
    ]
    if torch.cuda.get_device_capability()[0] == 9:
        KINDS += [pytest.param(torch.bfloat16, Tuning(hopper=True), id="bf16-hopper")]
SLOW = pytest.mark.skipif(not CUDA, reason="slow in the interpreter, which runs the other bounds")
kinds = pytest.mark.parametrize(("dtype", "tuning"), KINDS)
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")


def draw(
    T: int, bound: float | None = -5.0, *, heads: int = H, width: int = V, dtype: torch.dtype = torch.float32
) -> list:
    """Arguments of prefill; tokens are slices of a wider tensor that is NaN everywhere else."""
    random = torch.Generator().manual_seed(T)
    wide = torch.full((T + 2, 3 * heads * K + heads * width + 16 + heads), float("nan"))
    parts = [heads * K] * 3 + [heads * width, 16, heads]
    fill = wide[1 : T + 1].split(parts, dim=-1)
    for part in (*fill[:4], fill[5]):
        part.copy_(torch.randn(part.shape, generator=random))
    q, k, f, v, _, b = wide.to(dtype).to(DEVICE)[1 : T + 1].split(parts, dim=-1)
    rates, bias = torch.randn(heads, generator=random) * 0.5, torch.randn(heads, K, generator=random) - 1
    state = torch.randn(heads, width, K, generator=random)
    rows = [x.unflatten(1, (heads, -1)) for x in (q, k, v, f)]
    return [*rows, b, rates.to(DEVICE), bias.to(DEVICE), bound, state.to(DEVICE)]


def run(arguments: list, tuning=FACTORED):
    """The kernels' results; memory they got is full of NaN, what they were given stays as it was."""
    state = arguments[-1].clone()
    with poisoned():
        found = prefill_triton.prefill(*arguments, tuning)
    assert torch.equal(state, arguments[-1])
    assert found[0].dtype == arguments[2].dtype
    assert found[1].dtype == torch.float32
    return found


def check(arguments: list, tuning=FACTORED, tolerance: float | None = None):
    found, expected = run(arguments, tuning), kda_definition(*arguments)
    errors = [error(a, b) for a, b in zip(found, expected, strict=True)]
    assert max(errors) < (tolerance or TOLERANCE[arguments[0].dtype]), errors
    return found


@kinds
@pytest.mark.parametrize("T", [0, 1, 31, 32, 33, 63, 64, 65, 200, *([1000, 4096] if CUDA else [])])
def test_lengths(T: int, dtype: torch.dtype, tuning: Tuning):
    check(draw(T, dtype=dtype), tuning)


@pytest.mark.parametrize("T", [33, *([1, 64, 1000] if CUDA else [])])
def test_fp32_keeps_its_digits(T: int):
    """What fp32 takes without being told; tf32 anywhere would show."""
    check(draw(T), Tuning(), 5e-6)


@kinds
@pytest.mark.parametrize("T", [1, 33, *([63, 64, 65, 1000] if CUDA else [])])
def test_the_gate_without_bound(T: int, dtype: torch.dtype, tuning: Tuning):
    """Rates up to 200: log decays of -1000 beside others near 0 in one chunk."""
    arguments = draw(T, None, dtype=dtype)
    arguments[5][:2] = torch.tensor([5.3, -4.0])
    check(arguments, tuning, 5e-6 if dtype == torch.float32 else None)


@kinds
def test_the_gate_without_bound_forgets_slowly(dtype: torch.dtype, tuning: Tuning):
    """Log decays of 1e-4 from a softplus of 1e-6, whose digits 1 + e^x would lose."""
    arguments = draw(33, None, dtype=dtype)
    arguments[3].fill_(-13)
    arguments[5].fill_(5.3)
    check(arguments, tuning, 5e-6 if dtype == torch.float32 else None)


@kinds
@pytest.mark.parametrize("raw", [60.0, -60.0, "mixed"])
@pytest.mark.parametrize("bound", [-5.0, -4.0, pytest.param(-8.0, marks=SLOW)])
def test_extremes_of_the_gate(raw: float | str, bound: float, dtype: torch.dtype, tuning: Tuning):
    """Log decay at the bound for whole chunks, near 0, and one beside the other."""
    arguments = draw(67, bound, dtype=dtype)
    f = arguments[3]
    if raw == "mixed":
        f.sign_().mul_(60)
    else:
        f.fill_(raw)
    check(arguments, tuning)


@kinds
@pytest.mark.parametrize("T", [64, *([128, 1000] if CUDA else [])])
def test_repeated_keys(T: int, dtype: torch.dtype, tuning: Tuning):
    """One key for all tokens, beta near 1, no decay: the worst case of the triangular inverse. Its entries beside the
    diagonal are near -1, so one bf16 number for them, or for what they multiply, is 0.01 in the state."""
    arguments = draw(T, dtype=dtype)
    arguments[1].copy_(arguments[1][:1].clone().expand_as(arguments[1]))
    arguments[3].fill_(-60)
    arguments[4].fill_(8)
    check(arguments, tuning)


@kinds
@pytest.mark.parametrize("segments", [1, 2, 3, 7])
def test_segments(segments: int, dtype: torch.dtype, tuning: Tuning):
    """Segments of any number, also such that the last one is shorter or ends in a chunk with a rest. Little decay, so
    that the first state is still there in the last one."""
    arguments = draw(230, dtype=dtype)
    arguments[3].sub_(6)
    check(arguments, replace(tuning, segments=segments))


def test_a_long_call_is_several(monkeypatch: pytest.MonkeyPatch):
    arguments = draw(150)
    whole = run(arguments)
    monkeypatch.setattr(prefill_triton, "WORKSPACE", 1)
    parts = check(arguments)
    assert all(error(a, b) < TOLERANCE[torch.float32] for a, b in zip(parts, whole, strict=True))


@kinds
def test_the_same_call_gives_the_same_bits(dtype: torch.dtype, tuning: Tuning):
    arguments = draw(130, dtype=dtype)
    first, second = (run(arguments, replace(tuning, segments=2)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@kinds
def test_later_tokens_change_nothing_before_them(dtype: torch.dtype, tuning: Tuning):
    """Outputs of whole chunks have the same bits with other chunks behind them, in calls of one segment."""
    arguments = draw(96, dtype=dtype)
    head = [x[:64] for x in arguments[:5]] + arguments[5:]
    whole = replace(tuning, segments=1)
    assert torch.equal(run(arguments, whole)[0][:64], run(head, whole)[0])


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [3, 12, 96])
def test_as_called(heads: int):
    """The public function, K3's head dimensions, whatever it chooses."""
    arguments = draw(1100, heads=heads, width=128, dtype=torch.bfloat16)
    found, expected = kda.prefill(*arguments), kda_definition(*arguments)
    assert all(error(a, b) < 5e-3 for a, b in zip(found, expected, strict=True))


def test_what_the_kernel_refuses_is_said():
    device = torch.device(DEVICE)
    assert not kda.prefill_choice(device, 20, 16, torch.float32).kernel
    if CUDA:
        assert kda.prefill_choice(device, 128, 128, torch.bfloat16).kernel
        assert "K = 20" in kda.prefill_choice(device, 20, 16, torch.float32).reason
        assert "16 to 128" in kda.prefill_choice(device, 8, 16, torch.float32).reason
