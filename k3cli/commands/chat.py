"""`k3 chat`: start a session, or go on with one."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from k3cli.commands import options as opt
from k3cli.commands.inputs import read_request, read_system, read_tools
from k3cli.commands.output import Printer


def command(
    ctx: typer.Context,
    dash: opt.Dash = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session", "-s", metavar="NAME", help="Session to start or go on with.", autocompletion=opt.session_names
        ),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Refuse (exit 6) if the session exists.")] = False,
    prompt: opt.Prompt = None,
    system: opt.System = None,
    tools: opt.Tools = None,
    add_tools: opt.AddTools = None,
    tool_result: opt.ToolResult = None,
    tool_choice: opt.ToolChoice = None,
    response_format: opt.ResponseFormat = None,
    effort: opt.Effort = None,
    no_thinking: opt.NoThinking = False,
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
    """Talk to the model. Every turn is saved; an existing session is resumed and said to be.

    One shot with -p TEXT, a pipe, or -; otherwise the terminal asks. The answer is on stdout, the rest on stderr.
    """
    from k3cli.commands.drafts import Drafts
    from k3cli.commands.names import new_name
    from k3cli.commands.runtime import open_store, refuse_existing, setting_options, settings_from
    from k3cli.commands.talk import talk

    settings = settings_from(setting_options(ctx.params))
    printer = Printer(json=json, hide_thinking=settings.hide_thinking)
    request = read_request(
        prompt,
        dash,
        tool_result=tool_result,
        add_tools=add_tools,
        tool_choice=tool_choice,
        response_format=response_format,
        head={"--system": system, "--tools": tools},
        json=json,
    )
    system_text, catalogue = read_system(system), read_tools(tools)
    store = open_store(settings)
    if session is None:
        session = new_name(store.exists)
    elif new:
        refuse_existing(store, session)
    mode: Literal["resume", "create"] = "resume" if store.exists(session) else "create"
    drafts = Drafts.read(settings, draft_from or (), store)
    talk(store, settings, printer, request, session, mode=mode, system=system_text, tools=catalogue, drafts=drafts)
