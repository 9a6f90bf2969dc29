"""These tests run the Triton kernels: interpreted in fp32 without a CUDA device, compiled with one.

Triton reads TRITON_INTERPRET when a kernel is defined, so it is set before any kernel module is imported. The tests
call the kernels' own modules; dispatch by `select` stays with the reference on a CPU.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
