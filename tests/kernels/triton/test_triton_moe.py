"""Expert kernels against fp64, and their bit rule."""

from __future__ import annotations

import pytest
import torch
from k3_kernels import moe
from k3_kernels.activation import Situ, Swiglu
from k3_kernels.moe import grouped_triton, reference, window_triton
from k3_kernels.ops import error, experts_definition

from tests.kernels.triton.memory import poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
SITU = Situ(4.0, 25.0)


def make(dtype, *, E=9, L=64, F=96, k=3, W=8, packed=True, seed=0):
    random = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=random, dtype=torch.uint8)

    experts = moe.Experts(
        draw(0, 256, E, 2 * F, L // 2),
        draw(0, 256, E, L, F // 2),
        draw(119, 125, E, 2 * F, L // 32),
        draw(119, 125, E, L, F // 32),
    )
    if not packed:
        experts = moe.Experts(*(m.to(DEVICE) for m in experts.matrices(torch.arange(E), dtype)))
    ids = torch.stack([torch.randperm(E, generator=random)[:k] for _ in range(W)])
    z = torch.randn(W, L, generator=random).to(dtype)
    found = (z, ids, torch.rand(W, k, generator=random))
    return tuple(t.to(DEVICE) for t in found), moe.Experts(*(None if t is None else t.to(DEVICE) for t in experts))


def window(rows, experts, act, position, n, poison=True, **options):
    """The kernel's window with idle slots full of nonsense and a NaN-filled output."""
    z, ids, weights = (t.clone() for t in rows)
    z = torch.cat((z, z), 1)[:, z.shape[1] :]  # rows cut out of wider ones
    W = z.shape[0]
    idle = [(position + i) % W for i in range(n, W)]
    if poison:
        z[idle], ids[idle], weights[idle] = float("nan"), 1 << 40, float("nan")
    if DEVICE == "cpu":  # the interpreter's time goes by programs
        options = {"up_tile": 128, "down_tile": 128} | options
    with poisoned():
        cursor = torch.tensor([position, 0, 0, 0], device=DEVICE)
        out = window_triton.experts_window(z, ids, weights, experts, act, cursor, n, **options)
    assert not out[idle].any()
    return out[[(position + i) % W for i in range(n)]]


def expected(rows, experts, act, position, n):
    W = rows[0].shape[0]
    slots = [(position + i) % W for i in range(n)]
    cpu = moe.Experts(*(None if t is None else t.cpu() for t in experts))
    z, ids, weights = (t[slots].cpu() for t in rows)
    return experts_definition(z, ids, weights, cpu, act)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("shape", "act", "position", "n"),
    [
        ({}, SITU, 5, 8),
        ({"L": 160, "F": 160, "k": 2}, SITU, 1021, 1),  # rows that end inside a step of the kernel
        ({"L": 96, "W": 5, "k": 1, "packed": False}, Swiglu(), 3, 3),
        ({"W": 3}, SITU, 7, 0),
    ],
)
def test_window(dtype, shape, act, position, n):
    rows, experts = make(dtype, **shape)
    found = window(rows, experts, act, position, n)
    assert error(found.cpu(), expected(rows, experts, act, position, n)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_every_code_and_scale(dtype):
    """Each nibble value in each place of a word, and scales of both ends of the exact range."""
    rows, experts = make(dtype, E=2, L=32, F=32, k=1, W=1)
    codes = torch.arange(16, dtype=torch.uint8)
    nibbles = torch.stack([codes.roll(i) for i in range(16)])  # every value in every one of eight places
    w2 = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).repeat(2, 1).to(DEVICE)  # [32, 8]
    experts.w2[:] = torch.cat((w2, w2), 1)
    for low in (64, 127, 186):
        experts.w2_scale[:] = low
        experts.w13_scale[:] = 120
        want = expected(rows, experts, SITU, 0, 1)
        assert error(window(rows, experts, SITU, 0, 1).cpu(), want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_depend_on_the_row_alone(dtype):
    """Alone, behind others, in another slot, sharing experts or not: the same bits."""
    (z, ids, weights), experts = make(dtype)
    ids[3] = ids[4]  # two rows share all of their experts
    rows = z, ids, weights
    together = window(rows, experts, SITU, 16, 8)
    for row in (0, 3, 7):
        alone = window(rows, experts, SITU, 16 + row, 1)
        assert torch.equal(alone[0], together[row])
    later = tuple(t.roll(2, 0) for t in rows)
    assert torch.equal(window(later, experts, SITU, 18, 3), together[:3])


@pytest.mark.parametrize("dtype", TYPES)
def test_an_expert_that_a_row_names_often_with_weight_zero(dtype):
    """As a rank does that holds some of the experts, and one of zeros for all others."""
    (z, ids, weights), experts = make(dtype, k=4)
    ids[:, 1:3] = 8
    ids[2] = 8
    weights[ids == 8] = 0
    rows = z, ids, weights
    found = window(rows, experts, SITU, 5, 8)
    assert error(found.cpu(), expected(rows, experts, SITU, 5, 8)) <= TOLERANCE[dtype]
    assert not found[(2 - 5) % 8].any()


@pytest.mark.skipif(DEVICE == "cpu", reason="K3's shapes need a device")
@pytest.mark.parametrize("options", [{}, {"unroll": 1}])
def test_true_shape(options):
    rows, experts = make(torch.bfloat16, E=5, L=3584, F=3072, k=4)
    found = window(rows, experts, SITU, 5, 8, **options)
    assert error(found[:1].cpu(), expected(rows, experts, SITU, 5, 1)) <= 1e-2
    for row in (0, 5):
        assert torch.equal(window(rows, experts, SITU, 5 + row, 1, **options)[0], found[row])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("T", "shape", "act", "options"),
    [
        (0, {"L": 128, "F": 128}, SITU, {}),
        (2, {"L": 128, "F": 128, "k": 2}, SITU, {"narrow": 99, "narrow_tile": 64}),  # the window's kernels over tiles
        (65, {"L": 128, "F": 256}, SITU, {"narrow": 0, "tile": 16, "rest": 32}),
        (65, {"L": 256, "F": 128, "packed": False}, Swiglu(), {"narrow": 0, "tile": 64, "rest": 0, "columns": 64}),
    ],
)
def test_grouped(dtype, T, shape, act, options):
    """Ragged tiles: with nine experts some have more tokens than a tile, some end inside one."""
    (z, ids, weights), experts = make(dtype, W=max(T, 1), **shape)
    rows = z[:T], ids[:T], weights[:T]
    if DEVICE == "cuda" and options.get("tile") == 16:
        options = options | {"tile": 128, "rest": 64}  # the matrix units take blocks of 64
    with poisoned():
        found = grouped_triton.experts_grouped(*rows, experts, act, **options)
    cpu = moe.Experts(*(None if t is None else t.cpu() for t in experts))
    want = experts_definition(*(t.cpu() for t in rows), cpu, act)
    assert error(found.cpu(), want) <= 2 * TOLERANCE[dtype]
    assert torch.equal(grouped_triton.experts_grouped(*rows, experts, act, **options), found)


def test_tiles_hold_every_pair_once():
    random = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(11, generator=random)[:3] for _ in range(50)])
    ids[ids == 4] = 11  # an expert without tokens, and the last one with some
    for height in (4, 7, 64):
        expert, member = grouped_triton._tiles(ids, 12, height)
        used = member >= 0
        assert sorted(member[used].tolist()) == list(range(150))
        assert torch.equal(ids.flatten()[member[used].long()], expert.unsqueeze(1).expand(-1, height)[used].long())
        assert not used[expert < 0].any()
        assert used[expert >= 0].any(1).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="K3's shapes need a device")
@pytest.mark.parametrize("T", [40, 1000])
def test_grouped_true_shape(T):
    """Both paths against the reference on the device."""
    (z, ids, weights), experts = make(torch.bfloat16, E=20, L=3584, F=3072, k=4, W=T)
    found = grouped_triton.experts_grouped(z, ids, weights, experts, SITU)
    full = moe.Experts(*experts)
    want = reference.experts_grouped(z.float(), ids, weights, full, SITU)
    assert error(found, want) <= 1e-2


@pytest.mark.parametrize(("mean", "rows"), [(20, 64), (36.6, 64), (90, 128), (146.3, 192)])
def test_tile_heights_waste_little(mean, rows):
    assert sum(grouped_triton._heights(mean)) == rows
