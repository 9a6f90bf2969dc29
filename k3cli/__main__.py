"""Where `k3`, `k3cli` and `python -m k3cli` begin: almost no imports, since Ctrl-C may come while the others run."""

from __future__ import annotations

import os
import signal
import sys


def run() -> int:
    """`k3cli.main.main`; until that has its own way with signals, Ctrl-C ends the process with one line and 130."""
    signal.signal(signal.SIGINT, _leave)
    from k3cli.main import main

    return main()


def _leave(_number: int, _frame: object) -> None:
    try:
        os.write(2, b"k3: error: interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    sys.exit(run())
