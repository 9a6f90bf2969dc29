"""The sums of the KDA step and of its commit on Hopper, compiled without a GPU: the same rounding in every place.

Of the first two products of a sum one is rounded and the other fused with the sum. Left to the compiler, it is its
choice in each place which one; a row has the same bits in a window, replayed and committed only if all are alike.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

COMPILE = """
import json, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from k3_kernels.kda import step_hopper_commit_triton, step_hopper_triton

STATE = sys.argv[1]
BF16, FP32 = "*bf16", "*fp32"
KINDS = dict.fromkeys(("x", "f", "b", "gate", "conv", "log_x", "log_f", "log_b", "out"), BF16)
KINDS |= dict.fromkeys(("weight", "A_log", "dt_bias", "norm"), FP32)
KINDS |= {"recurrent": "*" + STATE, "cursor": "*i64", "eps": "fp32", "bound": "fp32"}
ANYWHERE = {"b", "log_b", "A_log", "cursor"}
found = []
for kernel, options in (
    (step_hopper_triton.step_kernel, {"num_warps": 4, "num_ctas": 4}),
    (step_hopper_commit_triton.commit_kernel, {"num_warps": 8, "maxnreg": 128}),
):
    given = {"BOUND": True, "SLOTS": 8, "H": 24, "K": 128, "V": 128}
    types = {name: "constexpr" if name in given else KINDS.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types[name][0] == "*" and name not in ANYWHERE
    }
    fixed = {(kernel.arg_names.index(name),): value for name, value in given.items()}
    source = GluonASTSource(kernel, types, fixed, aligned)
    found.append(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
print(json.dumps(found))
"""


def sums(ptx: str) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """How sums of products begin, (element rounded, element fused): with a row of shared memory, and of squares."""
    same: dict[str, str] = {}
    element: dict[str, int] = {}
    pairs: dict[str, int] = {}
    products: dict[str, tuple[str, str]] = {}

    def origin(register: str) -> str:
        while register in same and same[register] != register:
            register = same[register]
        return register

    for to, source in re.findall(r"mov\.b32\s+(%r\d+), (%r\d+);", ptx):
        same[origin(to)] = origin(source)
    for registers in re.findall(r"ld\.shared\.v4\.\w+\s*\{(.*?)\}", ptx):
        for i, register in enumerate(re.findall(r"%r\d+", registers)):
            assert element.setdefault(origin(register), i) == i, "a register holds one element"
    for even, odd in re.findall(r"shl\.b32 (%r\d+), both, 16; and\.b32 (%r\d+), both", ptx):
        pairs |= {even: 0, odd: 1}
    with_rows: Counter[tuple[int, int]] = Counter()
    squares: Counter[tuple[int, int]] = Counter()
    for line in ptx.splitlines():
        if product := re.match(r"\s*mul(?:\.rn)?\.f32\s+(%r\d+), (%r\d+), (%r\d+);", line):
            products[product[1]] = (product[2], product[3])
        fused = re.match(r"\s*fma\.rn\.f32\s+%r\d+, (%r\d+), (%r\d+), (%r\d+);", line)
        if fused is None or fused[3] not in products:
            continue
        rounded = products[fused[3]]
        if rounded[0] == rounded[1]:
            if rounded[0] in pairs:
                squares[pairs[rounded[0]], pairs[fused[1]]] += 1
            continue
        of = [element.get(origin(a), element.get(origin(b), -1)) for a, b in (rounded, (fused[1], fused[2]))]
        if -1 not in of and of[0] != of[1]:
            with_rows[of[0], of[1]] += 1
    return with_rows, squares


@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_sums_begin_alike_in_a_step_and_in_a_commit(state: str):
    root = Path(__file__).parents[3]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "kernels"), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", COMPILE, state], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise AssertionError(done.stderr[-2000:])
    step, commit = (sums(ptx) for ptx in json.loads(done.stdout.splitlines()[-1]))
    # Two rows of the state a half: the first half before the first row, then both halves of replayed and of live rows,
    # the latter with their outputs. Eight rows in a commit. Squares of a key and a query, and of a key.
    assert sum(step[0].values()) == 2 + 4 + 8
    assert sum(commit[0].values()) == 8
    assert sum(step[1].values()) == 2
    assert sum(commit[1].values()) == 1
    assert set(step[0] | commit[0]) == {(0, 1)}, (step, commit)
    assert set(step[1] | commit[1]) == {(0, 1)}, (step, commit)
