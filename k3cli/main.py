"""The command `k3`: registers the commands, and turns every way a run can end into one line and an exit code.

Nothing heavy is imported here: commands import torch, the store and the chat format when they run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from functools import partial
from typing import Annotated, Any

import typer
import typer.main

from k3cli import __version__
from k3cli.commands import (
    bench,
    chat,
    completion,
    debug,
    doctor,
    du,
    export,
    fork,
    gc,
    import_,
    log,
    ls,
    mark,
    plan,
    rename,
    repair,
    replay,
    resume,
    rm,
    show,
    verify,
)
from k3cli.commands.failures import as_k3_error, usage_message
from k3cli.commands.options import hide_types
from k3cli.commands.output import Printer, prepare_streams, silence
from k3cli.commands.signals import EndRun, exit_on_signals, ignore_signals
from k3cli.config import debugging
from k3cli.engine.events import Failed
from k3cli.errors import Exit, K3Error
from k3cli.model import watch

app = typer.Typer(
    name="k3",
    help="Long agent sessions on a local Kimi K3: saved after every turn, resumed, forked and replayed exactly.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 model files, 4 does not fit, 5 context limit, 6 session, "
    "7 replay differs, 8 data damaged, 75 try again, 130/141/143 interrupted, broken pipe, terminated.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: dict[str, tuple[Any, str]] = {
    "chat": (chat, "Talk to the model: start a session, or go on with one."),
    "resume": (resume, "Go on with a session, from its newest turn or an older one."),
    "fork": (fork, "Fork a session, and let the fork answer."),
    "replay": (replay, "Run recorded turns again and compare; show, score, re-evaluate."),
    "ls": (ls, "List sessions."),
    "show": (show, "Show one session, or one of its turns."),
    "log": (log, "List the turns of a session, or of its whole tree."),
    "mark": (mark, "Name a turn and keep its checkpoint."),
    "rename": (rename, "Give a session another name."),
    "rm": (rm, "Delete sessions."),
    "export": (export, "Write a session into one file."),
    "import": (import_, "Read a session from an exported file."),
    "verify": (verify, "Read and hash everything stored."),
    "repair": (repair, "Set damaged data aside and fall back to what is whole."),
    "gc": (gc, "Remove what no session needs."),
    "du": (du, "Show what sessions take on disk."),
    "plan": (plan, "Show what weights and sessions weigh, and whether they fit a machine."),
    "doctor": (doctor, "Show the machine, what was chosen and why, and what fits."),
    "completion": (completion, "Print a shell completion script."),
}
for name, (module, short_help) in COMMANDS.items():
    app.command(name, short_help=short_help)(module.command)
app.add_typer(bench.app, name="bench", short_help="How fast a model runs here, beside what the machine can do.")
app.add_typer(debug.app, name="debug")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"k3 {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _k3(
    ctx: typer.Context,
    _show_version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
    debug_mode: Annotated[bool, typer.Option("--debug", help="Show the traceback of an unexpected failure.")] = False,
) -> None:
    if debug_mode:
        os.environ["K3_DEBUG"] = "1"
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(int(Exit.USAGE))


def main() -> int:
    """Run the command line in `sys.argv`; returns the exit code."""
    # Read when torch loads. Waiting threads sleep: spinning ones slow prefill many times when another program runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    prepare_streams()
    args = sys.argv[1:]
    if not debugging() and "--debug" not in args:
        # Read when torch loads, too. What is to be said of ranks that are lost is one line of ours; NCCL's threads
        # would write theirs beside it.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    watch.tell = lambda problem: _fail(problem, problem.exit_code, _asks_for_json(args))
    prog = "k3cli" if os.path.basename(sys.argv[0]) == "k3cli" else "k3"
    exit_on_signals(partial(_end_at_once, _asks_for_json(args)))
    command: Any = typer.main.get_command(app)
    hide_types(command)
    completing = f"_{prog.upper()}_COMPLETE"
    if completing in os.environ:
        command.main(args, prog_name=prog, complete_var=completing)
        return Exit.OK
    try:
        rank, size = _world()
        code = _peer(rank, size) if rank > 0 else _run(command, prog, args)
        Printer().clear_bar()
        ignore_signals()
        sys.stdout.flush()
        joining = sys.modules.get("k3cli.model.joining")
        if rank == 0 and size > 1 and "TORCHELASTIC_RUN_ID" in os.environ and not (joining is not None and joining.met):
            from k3cli.model.peers import end_early

            end_early(size, code)
        if joining is not None and joining.stuck:
            os._exit(code)
        return code
    except K3Error as problem:  # a world that can't be
        return _fail(problem, problem.exit_code, _asks_for_json(args))
    except BrokenPipeError:
        silence(sys.stdout)
        return Exit.BROKEN_PIPE
    except OSError as problem:  # the last flush: a full disk
        silence(sys.stdout)
        return _fail(K3Error(f"stdout: {problem.strerror}", "an output that takes the answer"), Exit.FAILED, False)


def _world() -> tuple[int, int]:
    """(rank, size) where another program started ranks, as torchrun does, else (0, 1). UsageError.

    Half a world, a variable that something else has set, is told by the commands that would need one.
    """
    if not (os.environ.get("RANK") and os.environ.get("WORLD_SIZE")):
        return 0, 1
    from k3cli.model.launch import launched

    return launched() or (0, 1)


def _peer(rank: int, size: int) -> int:
    """A rank above 0 that torchrun started: it reads no command, rank 0 tells it what to do."""
    from k3cli.model.peer import run_launched

    try:
        return run_launched(rank, size, Printer().notice)
    except EndRun as stop:
        return stop.exit
    except K3Error as problem:
        return _fail(problem, problem.exit_code, False)


def _run(command: Any, prog: str, args: list[str]) -> int:
    json_mode = _asks_for_json(args)
    try:
        with command.make_context(prog, list(args)) as context:
            command.invoke(context)
        return Exit.OK
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _fail(K3Error("interrupted"), Exit.INTERRUPTED, json_mode)
    except EndRun as stop:
        return _fail(K3Error(stop.exit.name.lower()), stop.exit, json_mode)
    except BrokenPipeError:
        raise
    except K3Error as problem:
        return _fail(problem, problem.exit_code, json_mode)
    except Exception as problem:
        usage = usage_message(problem, command, prog, args)
        if usage is not None:
            return _fail(usage, usage.exit_code, json_mode)
        known = as_k3_error(problem)
        if known is not None:
            return _fail(known, known.exit_code, json_mode)
        return _fail(_unexpected(problem), Exit.FAILED, json_mode)


def _asks_for_json(args: list[str]) -> bool:
    return "--json" in (args[: args.index("--")] if "--" in args else args)


def _end_at_once(json_mode: bool, code: Exit) -> None:
    """A signal where the program can't unwind: nothing is half done there, and locks end with the process."""
    try:
        _fail(K3Error(code.name.lower()), code, json_mode)
    finally:
        os._exit(code)


def _fail(problem: K3Error, code: Exit, json_mode: bool) -> int:
    """One line on stderr and, in JSON mode, the closing `error` event on stdout."""
    printer = Printer(json=json_mode)
    printer.notice(f"error: {problem}")
    printer.raw_event(Failed(problem.found, problem.expected, problem.do, int(code)).to_json())
    return code


def _unexpected(problem: Exception) -> K3Error:
    """A bug of ours, or of the machine: one line, and the traceback where it can be found."""
    what = f"{type(problem).__name__}: {problem}"
    if debugging():
        Printer().clear_bar()
        traceback.print_exception(problem)
        return K3Error(what)
    try:
        handle, path = tempfile.mkstemp(prefix="k3-traceback-", suffix=".txt")
        with os.fdopen(handle, "w") as file:
            traceback.print_exception(problem, file=file)
    except OSError:
        return K3Error(what, do="k3 --debug shows the traceback")
    return K3Error(what, do=f"the traceback is in {path}")
