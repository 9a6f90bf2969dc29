"""Kimi Delta Attention."""

from k3_kernels.kda.prefill import choice as prefill_choice
from k3_kernels.kda.prefill import prefill, prefill_scratch
from k3_kernels.kda.reference import log_decay
from k3_kernels.kda.step import StepLog, StepWeights, commit, step

__all__ = [
    "StepLog",
    "StepWeights",
    "commit",
    "log_decay",
    "prefill",
    "prefill_choice",
    "prefill_scratch",
    "step",
]
