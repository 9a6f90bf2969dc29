#!/usr/bin/env python3
"""How fast the shipped k3-nano is on this machine: first token of `k3 chat`, load, prefill and decode by depth.

    python examples/bench_nano.py [--model DIR] [--depths 0,4096,16384] [--repeats 9] [--window 8]

Prefill takes chunks of the engine's size, decode is a window of one token and its commit, as in a chat without drafts.
Medians, with the slowest and the fastest; other work on the machine shows in their distance and in the load average.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `k3` does, before torch starts its threads

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import k3cli
from k3cli.model.network import DEFAULT_WINDOW, K3Model
from k3cli.model.state import State
from k3cli.model.weights import load_model

NANO = Path(k3cli.__file__).parent / "assets" / "k3-nano"


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repetition, after one that is not counted."""
    work()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found


def line(what: str, seconds: list[float], tokens: int | None = None) -> None:
    """One row: tokens per second (median, slowest to fastest), or seconds where no tokens are given."""
    middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
    if tokens is None:
        print(f"{what:34} {middle:9.2f} s       ({low:.2f} to {high:.2f}, n={len(seconds)})")
    else:
        values = f"({tokens / high:.1f} to {tokens / low:.1f}, n={len(seconds)})"
        print(f"{what:34} {tokens / middle:9.1f} tokens/s {values}")


def first_token(model: Path) -> float:
    """Seconds from starting the command to the first streamed piece of the answer or of its thinking.

    Sessions and cache are new each time: the weights are hashed, and a session is created.
    """
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "k3cli", "chat", "--model", str(model), "--json", "-p", "Hello"]
        command += ["--device", "cpu", "--max-tokens", "16"]
        start = time.perf_counter()
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "K3_HOME": home, "K3_CACHE": home},
        ) as process:
            assert process.stdout is not None
            found = None
            for text in process.stdout:
                event = json.loads(text)
                if found is None and event["type"] in ("thinking", "text"):
                    found = time.perf_counter() - start
        if found is None or process.returncode != 0:
            raise SystemExit(f"k3 chat ended with code {process.returncode} and no answer")
    return found


def prefill_chunk(model: K3Model, ids: torch.Tensor, state: State) -> None:
    """One chunk on a copy of the state (full pages are shared with it)."""
    model.prefill(ids, state.fork())


def decode_token(model: K3Model, ids: torch.Tensor, state: State) -> None:
    """One step without drafts; the state moves on by one token."""
    _, log = model.verify(ids[:1], state)
    model.commit(state, log, 1)


def depths(model: K3Model, wanted: list[int], repeats: int) -> None:
    """Prefill of one chunk and decode of one token behind each depth; the state is taken there once."""
    size = model.prefill_chunk
    ids = torch.randint(0, model.config.vocab, (size,), generator=torch.Generator().manual_seed(0))
    state = model.new_state()
    for depth in sorted(wanted):
        while state.position < depth:
            model.prefill(ids[: depth - state.position], state, logits="none")
        chunk = partial(prefill_chunk, model, ids, state)
        line(f"prefill {size} behind {depth}", timed(chunk, repeats), size)
        line(f"decode behind {depth}", timed(partial(decode_token, model, ids, state.fork()), 4 * repeats), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of k3-nano on this machine.")
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--depths", default="0,4096,16384", help="tokens before what is measured, with commas")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW)
    args = parser.parse_args()
    wanted = [int(part) for part in args.depths.split(",")]
    if args.repeats < 1 or args.window < 1 or min(wanted) < 0:
        parser.error("--repeats and --window are 1 or more, depths are 0 or more")

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"k3cli {k3cli.__version__}, python {platform.python_version()}, torch {torch.__version__}", end=", ")
    print(f"{torch.get_num_threads()} threads, window {args.window}, load average before {load:.1f}")
    line("k3 chat to its first token", [first_token(args.model) for _ in range(3)])
    loads = timed(lambda: load_model(args.model, device="cpu", window=args.window), min(args.repeats, 3))
    line("load", loads)
    depths(load_model(args.model, device="cpu", window=args.window).model, wanted, args.repeats)


if __name__ == "__main__":
    main()
