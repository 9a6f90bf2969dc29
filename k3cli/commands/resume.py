"""`k3 resume NAME`: go on with a session, from its newest turn or an older one."""

from __future__ import annotations

import typer

from k3cli.commands import options as opt
from k3cli.commands.inputs import read_request
from k3cli.commands.output import Printer


def command(
    ctx: typer.Context,
    name: opt.SessionArgument,
    dash: opt.Dash = None,
    at: opt.At = None,
    prompt: opt.Prompt = None,
    add_tools: opt.AddTools = None,
    tool_result: opt.ToolResult = None,
    tool_choice: opt.ToolChoice = None,
    response_format: opt.ResponseFormat = None,
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
    """Go on with a session: at a prompt, or one shot with -p TEXT, a pipe, or -.

    With --at the session goes on from an older turn; it moves there when the first new turn is saved.
    """
    from k3cli.commands.drafts import Drafts
    from k3cli.commands.names import find_turn
    from k3cli.commands.runtime import open_store, require_session, setting_options, settings_from
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
        json=json,
    )
    store = open_store(settings)
    require_session(store, name)
    turn = None if at is None else find_turn(store, name, at).id
    drafts = Drafts.read(settings, draft_from or (), store)
    talk(store, settings, printer, request, name, mode="resume", at=turn, drafts=drafts)
