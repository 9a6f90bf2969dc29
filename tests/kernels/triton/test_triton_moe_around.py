"""The Triton kernels around the Gluon products of experts on Hopper: rows and experts of a window in the order that
these want, and the sum over a token's experts. Interpreted without a CUDA device, as products are not."""

from __future__ import annotations

import pytest
import torch
from k3_kernels.ops import error

window = pytest.importorskip("k3_kernels.moe.window_hopper_triton")
grouped = pytest.importorskip("k3_kernels.moe.grouped_hopper_triton")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HOPPER = CUDA and torch.cuda.get_device_capability()[0] >= 9
pytestmark = pytest.mark.skipif(CUDA and not HOPPER, reason="compiled, these kernels are for Hopper")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, no kernel runs beside another one."""
    if not CUDA:
        monkeypatch.setattr(window, "gdc_wait", lambda: None)
        monkeypatch.setattr(window, "gdc_launch_dependents", lambda: None)


@pytest.mark.parametrize(("n", "position", "K", "L"), [(5, 6, 3, 384), (8, 0, 2, 128), (1, 1 << 33, 5, 256)])
def test_a_window_lists_each_chosen_expert_once_and_orders_columns_for_the_decoder(
    n: int, position: int, K: int, L: int
):
    W, R, E = 8, 8, 6
    random = torch.Generator().manual_seed(n)
    wide = torch.randn(W, 2 * L, generator=random).to(DEVICE)
    z = wide[:, L:]  # rows cut out of wider ones
    ids = torch.stack([torch.randperm(E, generator=random)[:K] for _ in range(W)]).to(DEVICE)
    slots = [(position + i) % W for i in range(n)]
    idle = [slot for slot in range(W) if slot not in slots]
    z[idle], ids[idle] = float("nan"), 1 << 40
    rows = torch.full((R, L), 1e30, device=DEVICE)
    used = torch.full((n * K + 1,), -7, dtype=torch.int32, device=DEVICE)
    member = torch.full((n * K + 1, R), -7, dtype=torch.int32, device=DEVICE)
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    cursor = torch.tensor([position, 0, 0, 0], device=DEVICE)
    powers = [1 << (size - 1).bit_length() for size in (K, L)]
    window._prepare[(n + 1,)](z, z.stride(0), ids, cursor, rows, used, member, count, n, W, K, L, R, *powers)

    # Of 128 columns: nibbles (0, 4), (1, 5), (2, 6), (3, 7) of the words 0, 4, 8, 12, then of 1, 5, ...
    words = [group * 4 + word for word in range(4) for group in range(4)]
    order = [word * 8 + nibble + half for nibble in range(4) for word in words for half in (0, 4)]
    assert torch.equal(rows[:n].view(n, -1, 128), z[slots].reshape(n, -1, 128)[..., order])
    assert (rows[n:] == 1e30).all()

    chosen = list(dict.fromkeys(int(expert) for slot in slots for expert in ids[slot]))
    assert int(count) == len(chosen)
    assert used[: len(chosen)].tolist() == chosen
    for expert, pairs in zip(chosen, member.tolist(), strict=False):
        for row, pair in enumerate(pairs):
            wanted = ids[slots[row]].tolist() if row < n else []
            assert pair == (row * K + wanted.index(expert) if expert in wanted else -1)
    assert (used[len(chosen) :] == -7).all()
    assert (member[len(chosen) :] == -7).all()


def test_a_token_sums_its_experts_in_the_order_of_its_ids():
    T, K, L = 5, 3, 700
    random = torch.Generator().manual_seed(1)
    parts = torch.randn(T * K, L, generator=random)
    weights = torch.rand(T, K, generator=random)
    place = torch.randperm(T * K, generator=random).to(torch.int32)
    out = torch.full((T + 1, L), float("nan"), device=DEVICE)
    grouped._sum[(2, T)](parts.to(DEVICE), place.to(DEVICE), weights.to(DEVICE), out, K, L, 512)
    want = (parts.double()[place.long()].view(T, K, L) * weights.double()[..., None]).sum(1)
    assert error(out[:T].cpu(), want) < 1e-6
    assert out[T].isnan().all()
