"""What kernels say they take beside arguments and results, against what they allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from k3_kernels import kda, mla
from k3_kernels.kda import prefill_triton
from k3_kernels.mla import decode_triton, prefill_library
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KIND = torch.bfloat16 if CUDA else torch.float32
MAKERS = ("aten.empty", "aten.new_empty", "aten.empty_like")


class Allocated(TorchDispatchMode):
    """Bytes of all tensors made without contents."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if str(func).rsplit(".", 1)[0] in MAKERS:
            self.bytes += found.nbytes
        return found


def draw(*shape: int, kind: torch.dtype = KIND) -> torch.Tensor:
    return torch.randn(shape, dtype=kind, device=DEVICE)


def decode_case(H: int, R: int, P: int, n: int) -> tuple[list[Any], int]:
    N, V, W, page = 10, 9, 5, 64
    pages, table = draw(3, page, R + P), torch.arange(3, dtype=torch.int32, device=DEVICE)
    cursor = torch.tensor([70, 0, 0, 0], device=DEVICE)
    given = [draw(W, H, N + P), pages, table, draw(H, N, R), draw(H, V, R), cursor, 0.1, n]
    return given, W * H * V * KIND.itemsize


@pytest.mark.parametrize("n", [1, 4])
def test_decode(n: int):
    given, result = decode_case(3, 32, 16, n)
    with Allocated() as seen:
        decode_triton.decode(*given)
    assert seen.bytes == mla.decode_scratch(n, 5, 3, 32, 16, KIND) + result


@pytest.mark.parametrize(("T", "H"), [(70, 3), (1, 2)])
def test_kda_prefill(T: int, H: int):
    K, V = 16, 16
    given = [draw(T, H, K), draw(T, H, K), draw(T, H, V), draw(T, H, K), draw(T, H)]
    with Allocated() as seen:
        o, _ = prefill_triton.prefill(
            *given, draw(H, kind=torch.float32), draw(H, K, kind=torch.float32), -5.0, draw(H, V, K, kind=torch.float32)
        )
    # The last state is among the results.
    assert seen.bytes == kda.prefill_scratch(T, H, K, V, KIND) + o.nbytes


@pytest.mark.skipif(not CUDA, reason="the allocator's peak is the device's")
@pytest.mark.parametrize("start", [0, 3 * prefill_library.BLOCK + 100])
def test_mla_prefill_at_its_peak(start: int):
    T, H, N, P, R, V = 4096, 24, 128, 64, 512, 128
    pages = draw(-(-(start + T) // 512), 512, R + P)
    table, q, w = torch.arange(len(pages), dtype=torch.int32, device=DEVICE), draw(T, H, N + P), draw(H, N + V, R)
    prefill_library.prefill(q, pages, table, w, start, 0.1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = prefill_library.prefill(q, pages, table, w, start, 0.1)
    took = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert took == pytest.approx(mla.prefill_scratch(T, start, H, N, P, R, V, KIND), rel=0.03)
