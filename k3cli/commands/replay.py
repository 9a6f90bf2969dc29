"""`k3 replay NAME`: run recorded turns again and compare; or show, score, or evaluate them into a new session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3cli.commands import options as opt
from k3cli.commands.combinations import given, refuse_unused
from k3cli.commands.names import short_id
from k3cli.commands.output import Printer
from k3cli.errors import ReplayDiffers, UsageError
from k3cli.words import counted

if TYPE_CHECKING:
    from k3_sessions.store import Store

    from k3cli.config import Settings


def command(
    ctx: typer.Context,
    name: opt.SessionArgument,
    first: Annotated[str | None, typer.Option("--from", metavar="TURN", help="First turn to run again.")] = None,
    last: Annotated[str | None, typer.Option("--to", metavar="TURN", help="Last turn to run again.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the transcript; run nothing.")] = False,
    score: Annotated[
        bool,
        typer.Option("--score", help="Log-likelihood of each turn under the current model, whatever its weights."),
    ] = False,
    into: Annotated[
        str | None,
        typer.Option("--into", metavar="NEW", help="Evaluate the turns under the current model into a new session."),
    ] = None,
    system: opt.System = None,
    tools: opt.Tools = None,
    effort: opt.Effort = None,
    no_thinking: opt.NoThinking = False,
    model: opt.Model = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    gpus: opt.Gpus = None,
    json: opt.Json = False,
) -> None:
    """Generate each recorded turn again from its inputs, schedule and seed; compare every token and kept checkpoint.

    Exit 7 at a difference, which is printed with its position and margin.
    """
    from k3_sessions.errors import IdentityMismatch

    from k3cli.commands.runtime import open_store, other_model, require_session, setting_options, settings_from

    wanted = given({"--show": show, "--score": score, "--into": into})
    if len(wanted) > 1:
        raise UsageError(" and ".join(wanted) + " together", "one of them")
    if wanted and not show:
        part = {"--from": first, "--to": last}
        refuse_unused(part, f"with {wanted[0]}", "the whole session", f"fork it first: k3 fork {name} --at TURN")
    if into is None:
        head = {"--system": system, "--tools": tools, "--effort": effort, "--no-thinking": no_thinking}
        refuse_unused(head, "without --into", "--into NEW: another head is another session")
    if show:
        running = {"--device": device, "--dtype": dtype, "--gpus": gpus}
        refuse_unused(running, "with --show", "none of them: a transcript is read, not run")
    settings = settings_from(setting_options(ctx.params))
    printer = Printer(json=json)
    store = open_store(settings)
    require_session(store, name)
    start, stop = _range(store, name, first, last)
    if show:
        from k3cli.commands.transcript import print_transcript

        print_transcript(store, settings, name, printer, start, stop)
    elif into is not None:
        _into(store, settings, printer, name, into, system, tools)
    elif score:
        _score(store, settings, printer, name)
    else:
        try:
            _compare(store, settings, printer, name, start, stop)
        except IdentityMismatch as problem:
            raise other_model(problem, store, name) from None


def _range(store: Store, name: str, first: str | None, last: str | None) -> tuple[int, int]:
    """Turn numbers, from 1, both included."""
    from k3cli.commands.names import resolve_turn

    turns = store.log(name)
    marks = store.session(name).marks
    number = {turn.id: count for count, turn in enumerate(turns, 1)}
    start = number[resolve_turn(turns, first, name, marks).id] if first is not None else 1
    stop = number[resolve_turn(turns, last, name, marks).id] if last is not None else len(turns)
    if start > stop:
        raise UsageError(f"--from is turn {start}, --to is turn {stop}", "--from at or before --to")
    return start, stop


def _compare(store: Store, settings: Settings, printer: Printer, name: str, start: int, stop: int) -> None:
    from k3cli.commands.runtime import load_engine, recorded_model
    from k3cli.commands.turns import show
    from k3cli.engine import events as ev
    from k3cli.engine.replay import replay

    engine = load_engine(recorded_model(settings, store, name, printer), printer)
    differences: list[ev.Difference] = []
    turns = tokens = states = 0
    for event in replay(engine, store, name, first=start, last=stop):
        show(event, printer)
        if isinstance(event, ev.TurnReplayed):
            turns, tokens, states = turns + 1, tokens + event.tokens, states + (event.state == "equal")
            if not any(found.number == event.number for found in differences):
                equal = f"{counted(event.tokens, 'token')} equal, state {event.state}"
                printer.line(f"turn {event.number} {short_id(event.turn)}: {equal}")
        elif isinstance(event, ev.Difference):
            differences.append(event)
            printer.line(f"turn {event.number} {short_id(event.turn)}: differs {difference(event)}")
    if differences:
        raise ReplayDiffers(
            f"replay of {name} differs, first in turn {differences[0].number} {difference(differences[0])}",
            "what was recorded",
            "the same build, device, ranks, dtype and window; k3 doctor shows them",
        )
    compared = f"{counted(tokens, 'generated token')}, {counted(states, 'kept checkpoint')}"
    printer.line(f"replay of {name} is equal: {counted(turns, 'turn')}, {compared}")
    printer.done(turns=turns, tokens=tokens, checkpoints=states, equal=True)


def difference(event: Any) -> str:
    """Where and by how much, in words."""
    if event.field is not None:
        size = "" if event.max_abs is None else f", by up to {event.max_abs:.3g}"
        return f"at position {event.position}: state field {event.field} of layer {event.layer}{size}"
    margin = "" if event.margin is None else f", margin {event.margin:.3g}"
    return f"at position {event.position}: token {event.recorded} recorded, {event.got} generated{margin}"


def _score(store: Store, settings: Settings, printer: Printer, name: str) -> None:
    from k3cli.commands.runtime import load_engine
    from k3cli.commands.turns import show
    from k3cli.engine import events as ev
    from k3cli.engine.replay import score

    engine = load_engine(settings, printer)
    nats, tokens = 0.0, 0
    for event in score(engine, store, name):
        show(event, printer)
        if isinstance(event, ev.Score):
            nats, tokens = nats + event.nats, tokens + event.tokens
            perplexity = "-" if event.perplexity is None else f"{event.perplexity:.3f}"
            printer.line(
                f"turn {event.number} {short_id(event.turn)}: answer {event.nats:.3f} nats, "
                f"{counted(event.tokens, 'token')} (perplexity {perplexity}), "
                f"prompt {event.prompt_nats:.3f} nats over {counted(event.prompt_tokens, 'token')}"
            )
    printer.done(nats=nats, tokens=tokens)


def _into(
    store: Store, settings: Settings, printer: Printer, name: str, new: str, system: str | None, tools: str | None
) -> None:
    from k3cli.commands.inputs import read_system, read_tools, refuse_shared_stdin
    from k3cli.commands.runtime import head_of, load_engine, refuse_existing
    from k3cli.commands.turns import show
    from k3cli.engine.head import Head
    from k3cli.engine.replay import replay_into

    refuse_existing(store, new)
    refuse_shared_stdin({"--system": system, "--tools": tools})
    head = head_of(settings, read_system(system), read_tools(tools), new=False)
    Head.from_json(store.session(name).fixed.get("head", {})).evaluated_under(head)  # before minutes of loading
    with store.reserving(new):  # before the minutes of loading
        engine = load_engine(settings, printer)
        for event in replay_into(engine, store, name, new, head=head or None):
            show(event, printer)
    printer.end()
    printer.line(new)
    printer.done(name=new)
