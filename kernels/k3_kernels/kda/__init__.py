"""Kimi Delta Attention."""

from k3_kernels.kda.reference import KdaLog, log_decay, prefill, replay, verify

__all__ = ["KdaLog", "log_decay", "prefill", "replay", "verify"]
