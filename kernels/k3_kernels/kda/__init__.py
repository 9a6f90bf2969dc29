"""Kimi Delta Attention."""

from k3_kernels.kda.reference import KdaLog, log_decay, prefill, replay, verify
from k3_kernels.kda.step import StepLog, StepWeights, commit, step

__all__ = ["KdaLog", "StepLog", "StepWeights", "commit", "log_decay", "prefill", "replay", "step", "verify"]
