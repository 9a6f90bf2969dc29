"""How long a user waits for the prompt after an answer, with the save in front of it and behind it.

Runs the same turns of k3-nano twice on a disk whose every file sync takes `--sync` seconds longer: once waiting for
each save, once going on at once. Between two turns the user reads and types for `--think` seconds. Prints, for each
turn, the time from the end of the answer to the prompt, and to the news that the turn is durable.

    python examples/bench_save.py --sync 0.2 --think 1.5
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from k3_sessions.fs import RealFS
from k3_sessions.store import Store

from k3cli.config import NANO
from k3cli.engine import events as ev
from k3cli.engine.conversation import Conversation
from k3cli.engine.engine import Engine
from k3cli.engine.sampling import Sampling


class SlowFS(RealFS):
    """The real file system with a slow disk under it."""

    delay = 0.0

    def sync(self, handle: Any) -> None:
        time.sleep(self.delay)
        super().sync(handle)


def measure(
    engine: Engine, root: Path, turns: int, think: float, delay: float, wait: bool
) -> list[tuple[float, float]]:
    """For each turn: seconds from the end of its answer to the prompt, and to the news that it is durable."""
    fs = SlowFS(root)
    store = Store.open(root, fs=fs)
    fs.delay = delay
    ended: list[float] = []
    prompt: list[float] = []
    durable: list[float] = []

    def note(event: ev.Event) -> None:
        if isinstance(event, ev.Stopped):
            ended.append(time.perf_counter())
        elif isinstance(event, ev.Saved):
            durable.append(time.perf_counter())

    with Conversation.open(engine, store, "bench", mode="create") as conversation:
        for number in range(turns):
            text = f"Turn {number}. " + "Some words that a user may have pasted here. " * 60
            for event in conversation.turn([{"role": "user", "content": text}], Sampling(max_tokens=16), wait=wait):
                note(event)
            prompt.append(time.perf_counter())
            until = prompt[-1] + think
            while time.perf_counter() < until:
                for event in conversation.settle(0.01):
                    note(event)
                time.sleep(0.01)
        for event in conversation.settle():
            note(event)
    store.close()
    return [(p - e, d - e) for e, p, d in zip(ended, prompt, durable, strict=True)]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--sync", type=float, default=0.2, help="seconds added to each file sync")
    asked.add_argument("--think", type=float, default=1.5, help="seconds between the prompt and the next message")
    asked.add_argument("--turns", type=int, default=4)
    asked.add_argument("--model", default=str(NANO))
    options = asked.parse_args()
    engine = Engine.load(options.model)
    print(f"{engine.name}, each sync {options.sync:g} s longer, {options.think:g} s between turns")
    print("save        turn   answer to prompt   answer to durable")
    for name, wait in (("in front", True), ("behind", False)):
        with tempfile.TemporaryDirectory(prefix="k3-bench-save-") as folder:
            rows = measure(engine, Path(folder) / "s", options.turns, options.think, options.sync, wait)
        for number, (to_prompt, to_durable) in enumerate(rows, 1):
            print(f"{name:<10} {number:>5} {to_prompt:>15.3f} s {to_durable:>17.3f} s")


if __name__ == "__main__":
    main()
