"""`k3` with the scripted model as real processes that die by SIGKILL at a chosen file-system call of the store.

Reads one JSON object a line: {"args": [...], "env": {...}, "at": n, "half": bool, "after": seconds}. Forks a process
that has everything imported already, runs the command there, and answers with one line: {"code", "out", "err",
"calls"}. at: before which changing call it is killed (1 is the first; 0: never); half: in the middle of that call if it
is a write; after: it is killed when that many seconds have passed. code -9: it was killed. calls: how many it made.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

CHANGING = ("make_dir", "create", "write", "sync", "replace", "place", "remove", "sync_dir", "lock", "note")


class Death:
    """Counts the calls of this process and ends it at one of them."""

    def __init__(self, fs: type[Any]) -> None:
        self.calls, self.at, self.half = 0, 0, False
        for name in CHANGING:
            setattr(fs, name, self._wrapped(name, getattr(fs, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fs: Any, *args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                if self.half and name == "write":
                    os.write(args[0], memoryview(args[1]).cast("B")[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(fs, *args, **options)

        return counted


def run(job: dict[str, Any], death: Death, main: Callable[[], int], folder: Path) -> dict[str, Any]:
    out, err, told = folder / "out", folder / "err", folder / "calls"
    told.write_text("0")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.environ.update(job.get("env", {}))
            sys.argv = ["k3", *job["args"]]
            sys.stdin = open(os.devnull)  # noqa: SIM115
            death.calls, death.at, death.half = 0, job.get("at", 0), job.get("half", False)
            code = main()
        finally:
            told.write_text(str(death.calls))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if job.get("after"):
        time.sleep(job["after"])
        os.kill(pid, signal.SIGKILL)  # not waited for yet: it is ours, alive or not
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"code": code, "out": out.read_text(), "err": err.read_text(), "calls": int(told.read_text() or 0)}


def serve() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import scripted_k3
    import typer.main
    from k3_sessions.fs import RealFS

    import k3cli.main
    from k3cli.commands import runtime
    from k3cli.engine.engine import Engine

    # Once here, so that no forked process has to: the parser, and what commands import when they run.
    for module in ("commands.repl", "commands.talk", "engine.conversation", "engine.replay", "model.network"):
        importlib.import_module(f"k3cli.{module}")
    parser = typer.main.get_command(k3cli.main.app)
    typer.main.get_command = lambda _app: parser
    engine = scripted_k3.load("scripted")
    Engine.load = staticmethod(lambda *_args, **_options: engine)  # type: ignore[method-assign,assignment]
    runtime.recommended_sampling = lambda _ref: {}
    death = Death(RealFS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["K3_HOME"], sys.argv = folder, ["k3", "ls"]
        with redirect_stderr(io.StringIO()):
            k3cli.main.main()
        for line in sys.stdin:
            print(json.dumps(run(json.loads(line), death, k3cli.main.main, Path(folder))), flush=True)


if __name__ == "__main__":
    serve()
