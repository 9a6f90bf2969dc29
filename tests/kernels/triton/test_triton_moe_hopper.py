"""The Hopper forms of the expert kernels against fp64, and their bit rule. They need a Hopper GPU: Gluon isn't
interpreted."""

from __future__ import annotations

import pytest
import torch
from k3_kernels import moe
from k3_kernels.activation import Situ, Swiglu
from k3_kernels.moe import hopper as hopper_sizes
from k3_kernels.moe.tiles import tiles
from k3_kernels.ops import error, experts_definition

from tests.kernels.triton.memory import poisoned

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
SITU = Situ(4.0, 25.0)


def make(*, E=11, L=1536, F=2560, k=3, W=8, seed=0):
    """((z [W, L], ids, weights), experts) on the device."""
    random = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=random, dtype=torch.uint8).cuda()

    experts = moe.Experts(
        draw(0, 256, E, 2 * F, L // 2),
        draw(0, 256, E, L, F // 2),
        draw(116, 121, E, 2 * F, L // 32),
        draw(116, 121, E, L, F // 32),
    )
    ids = torch.stack([torch.randperm(E, generator=random)[:k] for _ in range(W)])
    z = torch.randn(W, L, generator=random).bfloat16()
    return tuple(t.cuda() for t in (z, ids, torch.rand(W, k, generator=random))), experts


def definition(rows, experts, act):
    return experts_definition(*(t.cpu() for t in rows), moe.Experts(*(t.cpu() for t in experts)), act)


def window(rows, experts, act, position, n):
    """The kernel's window with idle slots full of nonsense and NaN wherever memory is fresh."""
    from k3_kernels.moe import window_hopper_triton

    z, ids, weights = (t.clone() for t in rows)
    z = torch.cat((z, z), 1)[:, z.shape[1] :]  # rows cut out of wider ones
    W = z.shape[0]
    idle = [(position + i) % W for i in range(n, W)]
    z[idle], ids[idle], weights[idle] = float("nan"), 1 << 40, float("nan")
    with poisoned():
        cursor = torch.tensor([position, 0, 0, 0], device="cuda")
        out = window_hopper_triton.experts_window(z, ids, weights, experts, act, cursor, n)
    assert not out[idle].any()
    return out[[(position + i) % W for i in range(n)]]


@hopper
@pytest.mark.parametrize(
    ("shape", "act", "position", "n"),
    [
        ({}, SITU, 5, 8),
        ({"L": 512, "F": 1024, "k": 2}, SITU, 1021, 1),
        ({"L": 1024, "F": 512, "W": 5, "k": 1}, Swiglu(), 3, 3),
        ({"L": 512, "F": 512, "W": 16, "k": 5}, SITU, 7, 13),
        ({"L": 512, "F": 512, "W": 3}, SITU, 7, 0),
    ],
)
def test_hopper_window(shape, act, position, n):
    rows, experts = make(**shape)
    W = rows[0].shape[0]
    slots = [(position + i) % W for i in range(n)]
    found = window(rows, experts, act, position, n)
    assert error(found.cpu(), definition([t[slots] for t in rows], experts, act)) <= 1e-2


@hopper
def test_hopper_bits_depend_on_the_row_alone():
    (z, ids, weights), experts = make()
    ids[3] = ids[4]  # two rows share all of their experts
    rows = z, ids, weights
    together = window(rows, experts, SITU, 16, 8)
    for row in (0, 3, 7):
        assert torch.equal(window(rows, experts, SITU, 16 + row, 1)[0], together[row])
    later = tuple(t.roll(2, 0) for t in rows)
    assert torch.equal(window(later, experts, SITU, 18, 3), together[:3])
    cursor = torch.tensor([16, 0, 0, 0], device="cuda")
    assert torch.equal(moe.experts_window(z, ids, weights, experts, SITU, cursor, 8), together)


@hopper
def test_hopper_every_code_and_scale():
    """Each nibble value in each place of a word, and scales of both ends of the exact range."""
    rows, experts = make(E=2, L=512, F=512, k=1, W=1)
    codes = torch.arange(16, dtype=torch.uint8)
    nibbles = torch.stack([codes.roll(i) for i in range(16)])
    w2 = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).repeat(32, 32).cuda()  # [512, 256]
    experts.w2[:] = w2
    for low in (64, 127, 186):
        experts.w2_scale[:] = low
        experts.w13_scale[:] = 120
        assert error(window(rows, experts, SITU, 0, 1).cpu(), definition(rows, experts, SITU)) <= 1e-2


@hopper
@pytest.mark.parametrize(
    ("T", "shape", "act"),
    [
        (0, {"L": 512, "F": 512}, SITU),
        (1, {"L": 512, "F": 512}, SITU),
        (65, {"L": 512, "F": 1024}, Swiglu()),
        (1000, {}, SITU),  # all heights of tiles
    ],
)
def test_hopper_grouped(T, shape, act):
    from k3_kernels.moe import grouped_hopper_triton

    (z, ids, weights), experts = make(W=max(T, 1), **shape)
    ids[: T // 5, 0], ids[: T // 5, 1], ids[: T // 5, 2] = 4, 1, 7  # some experts have more than one tile
    rows = z[:T], ids[:T], weights[:T]
    with poisoned():
        found = grouped_hopper_triton.experts_grouped(*rows, experts, act)
    some = slice(0, None, max(1, T // 97))
    want = definition([t[some] for t in rows], experts, act)
    assert error(found[some].cpu(), want) <= 2e-2
    assert torch.equal(moe.experts_grouped(*rows, experts, act), found)


@pytest.mark.parametrize(
    ("T", "E", "k", "heights"),
    [(50, 12, 3, (4, 3)), (7, 12, 3, (5,)), (400, 30, 4, (32, 16, 8, 2)), (1, 5, 2, (160, 9))],
)
def test_tiles_hold_every_pair_once(T, E, k, heights):
    random = torch.Generator().manual_seed(T)
    ids = torch.stack([torch.randperm(E, generator=random)[:k] for _ in range(T)])
    ids[ids == 4] = E - 1  # an expert without tokens, and the last one with some
    order, table, bounds = tiles(ids, E, heights)
    seen = []
    for c, height in enumerate(heights):
        for expert, first, end in table[bounds[c] : bounds[c + 1]].tolist():
            assert 0 < end - first <= height
            assert c + 1 == len(heights) or end - first > heights[c + 1]
            assert (ids.flatten()[order[first:end]] == expert).all()
            seen += range(first, end)
    assert sorted(seen) == list(range(T * k))


def test_rings_fit_or_are_refused():
    assert hopper_sizes.rings(8, 3584, gated=True) == (4, 1)
    assert hopper_sizes.rings(8, 3072, gated=False) == (4, 2)
    assert hopper_sizes.rings(16, 3072, gated=False) == (4, 1)  # no room for the rows of two experts
    assert hopper_sizes.rings(16, 7168, gated=True) is None
