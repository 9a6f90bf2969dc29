"""Multi-head latent attention: each function runs as kernels where they exist, else as the reference."""

import torch
from torch import Tensor

from k3_kernels import select
from k3_kernels.mla import reference
from k3_kernels.mla.reference import store
from k3_kernels.mla.scratch import decode_scratch, prefill_scratch

__all__ = [
    "append",
    "choose_decode",
    "choose_prefill",
    "decode",
    "decode_scratch",
    "prefill",
    "prefill_scratch",
    "store",
]


def append(rows: Tensor, pages: Tensor, table: Tensor, cursor: Tensor, n: int) -> None:
    """Writes a window's live latent rows into the pages: `reference.append` is the contract; one launch on CUDA."""
    if not select.choose(rows.device).kernel:
        return reference.append(rows, pages, table, cursor, n)
    from k3_kernels.mla import decode_triton

    return decode_triton.append(rows, pages, table, cursor, n)


def decode(
    q: Tensor, pages: Tensor, table: Tensor, w_uk: Tensor, w_uv: Tensor, cursor: Tensor, scale: float, n: int
) -> Tensor:
    """A window's absorbed attention: `reference.decode` is the contract; on CUDA nothing is read on the host."""
    width = q.shape[2] - w_uk.shape[1]
    if not choose_decode(q.device, q.dtype, q.shape[0], w_uk.shape[2], width, pages.shape[1]).kernel:
        return reference.decode(q, pages, table, w_uk, w_uv, cursor, scale, n)
    from k3_kernels.mla import decode_triton

    return decode_triton.decode(q, pages, table, w_uk, w_uv, cursor, scale, n)


def prefill(q: Tensor, pages: Tensor, table: Tensor, w_kv_b: Tensor, start: int, scale: float) -> Tensor:
    """Causal attention of a chunk: `reference.prefill` is the contract."""
    _, expanded, rank = w_kv_b.shape
    value_width = expanded - (q.shape[2] - (pages.shape[2] - rank))
    if not choose_prefill(q.device, q.dtype, q.shape[2], value_width).kernel:
        return reference.prefill(q, pages, table, w_kv_b, start, scale)
    from k3_kernels.mla import prefill_library

    return prefill_library.prefill(q, pages, table, w_kv_b, start, scale)


def choose_decode(
    device: torch.device, dtype: torch.dtype, window: int, rank: int, pe_width: int, page: int
) -> select.Choice:
    """Whether `decode` runs as kernels for these sizes, and why."""
    refusal = select.power_of_two(rank=rank, pe_width=pe_width)
    if refusal is None and min(rank, pe_width) < 16:
        refusal = f"latent rank {rank}, shared key width {pe_width}: the kernel takes 16 or more"
    if refusal is None and not 1 <= window <= 16:
        refusal = f"window of {window} rows: the kernel takes 1 to 16"
    if refusal is None and page % 64:
        refusal = f"pages of {page} rows: the kernel takes multiples of 64"
    if refusal is None and dtype not in (torch.bfloat16, torch.float32):
        refusal = f"{dtype}: the kernel takes bfloat16 and float32"
    return select.choose(device, refusal)


def choose_prefill(device: torch.device, dtype: torch.dtype, key_width: int, value_width: int) -> select.Choice:
    """Whether `prefill` runs through the library's attention for these sizes, and why."""
    refusal = None
    if device.type != "cuda":
        refusal = f"device {device.type}: the library's attention needs a CUDA device"
    elif torch.cuda.get_device_capability(device) < (9, 0):
        refusal = "the library's attention with separate key and value widths needs compute capability 9.0"
    elif dtype != torch.bfloat16:
        refusal = f"{dtype}: the library's attention takes bfloat16"
    elif key_width % 8 or value_width % 8:
        refusal = f"key width {key_width}, value width {value_width}: the library takes multiples of 8"
    return select.choose(device, refusal)
