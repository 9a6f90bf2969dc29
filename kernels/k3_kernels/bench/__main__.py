"""`python3 -m k3_kernels.bench [NAME ...] [-o FILE]`: the table of operators on this machine's first CUDA device."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from k3_kernels.bench.harness import copy_rate, matrix_rate
from k3_kernels.bench.rows import names, rows


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
    for found in rows(ceilings, wanted=args.names):
        failed += "error" in found
        print(line(found), flush=True)
        if args.output:
            with args.output.open("a") as out:
                out.write(json.dumps(found) + "\n")
    return 1 if failed else 0


def line(found: dict[str, object]) -> str:
    """One row for people, microseconds."""
    head = f"{found['op']!s:<22} {found['shape']!s:<34}"
    if "error" in found:
        return f"{head} {found['error']}"
    us = {key: 1e6 * float(str(found[key])) for key in found if key.endswith("seconds")}
    parts = f"{us['seconds']:9.2f} us  floor {us['floor_seconds']:8.2f}  {found['of_floor']:6.1%}"
    if "target_seconds" in us:
        parts += f"  target {us['target_seconds']:g}"
    if "peer_seconds" in us:
        parts += f"  {found['peer']} {us['peer_seconds']:.2f} us"
    return f"{head} {parts}  {found['note']}"


if __name__ == "__main__":
    sys.exit(main())
