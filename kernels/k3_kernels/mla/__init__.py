"""Multi-head latent attention."""

from k3_kernels.mla.reference import append, decode, decode_blocks, prefill, prefill_blocks, store

__all__ = ["append", "decode", "decode_blocks", "prefill", "prefill_blocks", "store"]
