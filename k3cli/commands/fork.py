"""`k3 fork NAME [NEW]`: a session that shares the history of another, or an answer from a fork that leaves nothing."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from k3cli.commands import options as opt
from k3cli.commands.combinations import refuse_unused
from k3cli.commands.inputs import read_request
from k3cli.commands.output import Printer
from k3cli.errors import UsageError


def command(
    ctx: typer.Context,
    name: opt.SessionArgument,
    new: Annotated[
        str | None, typer.Argument(metavar="NEW", help="Name of the fork; one is made up if absent.")
    ] = None,
    at: opt.At = None,
    prompt: opt.Prompt = None,
    ephemeral: Annotated[bool, typer.Option("--ephemeral", help="With -p: answer, and keep nothing on disk.")] = False,
    hide_thinking: opt.HideThinking = False,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    seed: opt.Seed = None,
    max_tokens: opt.MaxTokens = None,
    spec: opt.Spec = None,
    window: opt.Window = None,
    draft_from: opt.DraftFrom = None,
    model: opt.Model = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    gpus: opt.Gpus = None,
    require_cached: opt.RequireCached = False,
    json: opt.Json = False,
) -> None:
    """Fork a session: one small file, whatever the length of the history.

    Prints the new name. With -p TEXT (- for stdin) the fork answers one prompt: the answer is on stdout and the name on
    stderr.
    """
    from k3cli.commands.names import find_turn, new_name
    from k3cli.commands.runtime import open_store, refuse_existing, require_session, setting_options, settings_from

    answering = setting_options(ctx.params)
    settings = settings_from(answering)
    if ephemeral and prompt is None:
        raise UsageError("--ephemeral without a prompt", "-p TEXT: such a fork exists only for its answer")
    if ephemeral and new is not None:
        raise UsageError(f"--ephemeral with the name {new!r}", "no name: nothing is kept")
    if prompt is None:
        named = {"--" + key.replace("_", "-"): value for key, value in answering.items()}
        refuse_unused(
            {**named, "--draft-from": draft_from},
            "without a prompt",
            "-p TEXT: a fork that answers nothing runs no model",
        )
    printer = Printer(json=json, hide_thinking=settings.hide_thinking)
    request = None if prompt is None else read_request(prompt, None, json=json)
    store = open_store(settings)
    require_session(store, name)
    turn = None if at is None else find_turn(store, name, at).id
    if new is not None:
        refuse_existing(store, new)
    elif not ephemeral:
        new = new_name(store.exists)
    if request is None:
        assert new is not None
        session = store.fork(name, new, at=turn)
        printer.line(new)
        printer.event("forked", name=new, source=name, turn=session.head)
        printer.done(name=new)
        return
    from k3cli.commands.drafts import Drafts
    from k3cli.commands.talk import talk

    drafts = Drafts.read(settings, draft_from or (), store)
    mode: Literal["ephemeral", "fork"] = "ephemeral" if ephemeral else "fork"
    talk(store, settings, printer, request, name, mode=mode, new=new, at=turn, drafts=drafts)
