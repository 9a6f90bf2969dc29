#!/usr/bin/env python3
"""What drafts bring on this machine: the same turns with `--spec off` and `--spec suffix`, on four kinds of text.

    python examples/bench_spec.py [--model DIR] [--rounds 3] [--temperature 0] [--kinds edit,prose,code,noise]

edit: code that is renamed name by name, each message with the code as it stands, as an agent's edits go. prose:
questions about k3, whose answers share little. code: edits of code that was not seen before. noise: 400 tokens at
temperature 5, in which nothing repeats: what drafts cost where they can't help. Each kind is one conversation, run
`rounds` times with each drafter, in turns (off, suffix, off, ...), so that other work on the machine hits both alike;
each time the conversation is new and nothing is known from before. Printed: decode tokens per second (median over
rounds, from the time of the decode steps alone), tokens a step, acceptance by place, time per step spent in the
drafter, and the ratio. Every id drawn with drafts must be the one drawn without: the run fails otherwise.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `k3` does, before torch starts its threads

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import k3cli
from k3cli.config import NANO
from k3cli.engine.drafting.choose import choose
from k3cli.engine.engine import Engine
from k3cli.engine.sampling import Sampling

LONGEST = 400
"""Tokens of one answer at most."""


def edits(code: str, renames: Sequence[tuple[str, str]]) -> list[str]:
    """One message for each rename, with the code as the renames before it left it."""
    messages = []
    for old, new in renames:
        messages.append(f"Rename {old} to {new}:\n```\n{code}```")
        code = code.replace(old, new)
    return messages


KINDS = {
    "edit": [
        *edits(
            "with open(path) as handle:\n    data = handle.read()\n    store(data)\n",
            [
                ("handle", "file"),
                ("data", "text"),
                ("store", "save"),
                ("text", "body"),
                ("file", "log"),
                ("save", "send"),
            ],
        ),
        *edits(
            "for item in queue:\n    if item == limit:\n        print(item)\n    found.append(item)\n",
            [("item", "node"), ("queue", "stack"), ("limit", "bound"), ("found", "seen"), ("stack", "heap")],
        ),
    ],
    "prose": [
        "How does k3 keep sessions?",
        "What is a turn?",
        "What happens when the disk is full?",
        "How do I fork a session?",
        "What does k3 doctor show?",
        "Why is a checkpoint thinned?",
        "Who are you?",
        "What is the exit code for a locked session?",
    ],
    "code": [
        "Rename total to amount:\n```\ndef report(total, rate):\n    fee = total + rate\n    return fee\n```",
        "Change host to name here:\n```\nclass Server:\n    def __init__(self, host):\n        self.host = host\n```",
        'In this code, lamp should be river:\n```\nimport lamp\n\nstone = lamp.load("oak")\nprint(stone)\n```',
        "replace copper by silver in this code:\n```\ncopper:\n  size: 1\n  bright: true\n```",
    ],
    "noise": ["Hello"],
}


@dataclass
class Run:
    """One conversation. seconds: of all decode steps; processor: CPU seconds of the same; drafting: in the drafter."""

    ids: list[int]
    seconds: float
    processor: float
    drafting: float
    steps: int
    tokens: int
    tested: list[int]
    accepted: list[int]
    rows: list[int]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def converse(engine: Engine, spec: str, kind: str, sampling: Sampling) -> Run:
    """The messages of a kind one after the other, decoded with `spec`."""
    engine.speculate(choose(spec))
    renderer = engine.renderer
    timeline, context = engine.timeline(), renderer.new_context(True)
    window = engine.model.window
    run = Run([], 0.0, 0.0, 0.0, 0, 0, [0] * (window - 1), [0] * (window - 1), [0] * (window + 1))
    close: list[int] = []
    stop = renderer.stop_ids
    if kind == "noise":
        stop, sampling = frozenset(), replace(sampling, temperature=5.0)
    for n, text in enumerate(KINDS[kind]):
        ids = [*close, *(renderer.render_head((), True, renderer.default_effort, None) if n == 0 else ())]
        ids += renderer.render_messages([{"role": "user", "content": text}], context)
        timeline.extend([*ids, *renderer.generation_prompt(True)])
        for _ in timeline.prefill():
            pass
        parser = renderer.parser(True)
        began = time.process_time()
        for token in timeline.generate(sampling, stop, LONGEST):
            run.ids.append(token)
            if not parser.ended:
                parser.feed(token)
        run.processor += time.process_time() - began
        close = renderer.close_turn(parser)
        parser.finish(timeline.stop_reason)
        context.reply(parser.message())
        stats = timeline.decoding
        run.seconds += stats.draft_seconds + stats.verify_seconds + stats.commit_seconds
        run.drafting += stats.draft_seconds
        run.steps += stats.steps
        run.tokens += stats.tokens
        for mine, new in ((run.tested, stats.tested), (run.accepted, stats.accepted), (run.rows, stats.rows)):
            mine[:] = [a + b for a, b in zip(mine, new, strict=True)]
    return run


def compare(engine: Engine, kind: str, rounds: int, sampling: Sampling) -> None:
    """Both drafters on one kind of text; three lines."""
    runs: dict[str, list[Run]] = {"off": [], "suffix": []}
    for _ in range(rounds):
        for spec, done in runs.items():
            done.append(converse(engine, spec, kind, sampling))
    off, on = (statistics.median(run.rate for run in done) for done in runs.values())
    if any(run.ids != runs["off"][0].ids for done in runs.values() for run in done):
        raise SystemExit(f"{kind}: the ids drawn with drafts are not those drawn without")
    last = runs["suffix"][-1]
    shares = " ".join(f"{100 * a / t:.0f}" for a, t in zip(last.accepted, last.tested, strict=True) if t)
    pairs = [b.rate / a.rate for a, b in zip(*runs.values(), strict=True)]
    processor = statistics.median(a.processor / b.processor for a, b in zip(*runs.values(), strict=True))
    drafting = 1e3 * last.drafting / last.steps
    spread = f"({min(pairs):.2f} to {max(pairs):.2f}, n={rounds})"
    print(f"{kind:6} off     {off:7.1f} tokens/s  ({last.tokens} tokens)")
    print(
        f"{'':6} suffix  {on:7.1f} tokens/s  {last.tokens / last.steps:.2f} tokens a step, drafting {drafting:.2f} ms"
    )
    print(f"{'':6} ratio   {statistics.median(pairs):7.2f}  {spread}; by processor time {processor:.2f}")
    print(f"{'':6} accepted by place {shares or '-'} %, steps of 1, 2, ... rows {last.rows[1:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding with and without drafts.")
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of " + ", ".join(KINDS))
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if args.rounds < 1 or not set(kinds) <= set(KINDS):
        parser.error(f"--rounds is 1 or more, --kinds some of {', '.join(KINDS)}")
    engine = Engine.load(args.model, device=args.device)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(
        f"k3cli {k3cli.__version__}, torch {torch.__version__}, {engine.name} on {engine.device}, window "
        f"{engine.model.window}, temperature {args.temperature:g}, load average before {load:.1f}"
    )
    for kind in kinds:
        compare(engine, kind, args.rounds, Sampling(temperature=args.temperature, seed=1))


if __name__ == "__main__":
    main()
