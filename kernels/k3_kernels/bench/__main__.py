"""`python3 -m k3_kernels.bench [NAME ...] [-o FILE]`: the table of operators on this machine's first CUDA device."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import traceback
from pathlib import Path

import torch

from k3_kernels import bench
from k3_kernels.bench.harness import copy_rate, matrix_rate, row


def names() -> list[str]:
    """Every module bench_NAME.py of this package."""
    return [m.name.removeprefix("bench_") for m in pkgutil.iter_modules(bench.__path__) if m.name.startswith("bench_")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m k3_kernels.bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names())}; all when none is given")
    parser.add_argument("-o", "--output", type=Path, help="JSON lines, one flushed row a case")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(names())}")
    if not torch.cuda.is_available():
        print("no CUDA device: these benchmarks need one", file=sys.stderr)
        return 1
    ceilings = (copy_rate(), matrix_rate())
    print(f"copy {ceilings[0] / 1e12:.2f} TB/s, bf16 {ceilings[1] / 1e12:.0f} TFLOP/s, torch {torch.__version__}")
    failed = 0
    for name in args.names or names():
        try:
            cases = importlib.import_module(f"k3_kernels.bench.bench_{name}").cases()
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        for case in cases:
            try:
                found = row(case, ceilings)
            except Exception as broken:
                found = {"op": case.op, "shape": case.shape, "error": f"{type(broken).__name__}: {broken}"}
                failed += 1
            print(line(found), flush=True)
            if args.output:
                with args.output.open("a") as out:
                    out.write(json.dumps(found) + "\n")
        torch.cuda.empty_cache()
    return 1 if failed else 0


def line(found: dict[str, object]) -> str:
    """One row for people."""
    head = f"{found['op']!s:<22} {found['shape']!s:<34}"
    if "error" in found:
        return f"{head} {found['error']}"
    parts = f"{found['us']:9.2f} us  floor {found['floor_us']:8.2f}  {found['of_floor']:6.1%}"
    if found["target_us"] is not None:
        parts += f"  target {found['target_us']:g}"
    if "peer" in found:
        parts += f"  {found['peer']} {found['peer_us']:.2f} us"
    return f"{head} {parts}  {found['note']}"


if __name__ == "__main__":
    sys.exit(main())
