"""Where `k3`, `k3cli` and `python -m k3cli` begin: almost no imports, since a signal may come while the others run."""

from __future__ import annotations

import os
import signal
import sys


def run() -> int:
    """`k3cli.main.main`; until that has its own way with signals, each ends the process with one line and its code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _leave)
    from k3cli.main import main

    return main()


def _leave(number: int, _frame: object) -> None:
    word, code = (b"interrupted", 130) if number == signal.SIGINT else (b"terminated", 143)
    try:
        os.write(2, b"k3: error: " + word + b"\n")
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(run())
