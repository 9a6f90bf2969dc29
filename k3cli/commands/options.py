"""Options that several commands share, each declared once, and the completion of session names."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def session_names(incomplete: str) -> list[str]:
    """Names of stored sessions that start with what was typed; needs neither torch nor a model."""
    from k3cli.commands.runtime import open_store
    from k3cli.config import load_settings

    return [info.name for info in open_store(load_settings()).sessions() if info.name.startswith(incomplete)]


def hide_types(command: Any) -> None:
    """Have the help of a command, and of those below it, name arguments without a type: every one is text."""
    for param in command.params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
    for below in getattr(command, "commands", {}).values():
        hide_types(below)


SessionArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Session name.", autocompletion=session_names, show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="NDJSON events on stdout, the last one `done` or `error`.")]
Prompt = Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Answer this and exit.")]
Dash = Annotated[str | None, typer.Argument(metavar="-", help="-: read the prompt from stdin.", show_default=False)]
At = Annotated[
    str | None,
    typer.Option("--at", metavar="TURN", help="A turn: number, -1 (newest), -2 ..., or the start of its id."),
]

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="REF", help="Model folder, or hub id in the local Hugging Face cache."),
]
Device = Annotated[str | None, typer.Option("--device", metavar="DEV", help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="TYPE", help="auto, float32 or bfloat16.")]

Gpus = Annotated[
    str | None,
    typer.Option("--gpus", metavar="N|all|0,1", help="GPUs that compute together; with --device cpu, N processes."),
]

Spec = Annotated[
    str | None,
    typer.Option(
        "--spec", metavar="KIND", help="Drafts: auto, off, suffix, dspark[:DIR], both[:DIR]; no token changes."
    ),
]
Window = Annotated[
    str | None, typer.Option("--window", metavar="N", help="Most tokens verified in one step, drafts included.")
]
DraftFrom = Annotated[
    list[str] | None,
    typer.Option(
        "--draft-from", metavar="PATH", help="Draft from this text file, too, or from session:NAME. Repeatable."
    ),
]

System = Annotated[str | None, typer.Option("--system", metavar="FILE", help="System text of a new session.")]
Tools = Annotated[
    str | None, typer.Option("--tools", metavar="FILE.json", help="Tool declarations (JSON list) of a new session.")
]
AddTools = Annotated[
    str | None, typer.Option("--add-tools", metavar="FILE.json", help="Declare more tools, from this turn on.")
]
ToolResult = Annotated[
    str | None,
    typer.Option(
        "--tool-result",
        metavar="FILE",
        help='Results of the open tool calls, - for stdin: JSON {"id", "name", "content"}, a list of those, '
        "or plain text when one call is open.",
    ),
]
ToolChoice = Annotated[
    str | None, typer.Option("--tool-choice", metavar="CHOICE", help="This turn: auto, none or required.")
]
ResponseFormat = Annotated[
    str | None, typer.Option("--response-format", metavar="FILE.json", help="JSON object: the answer's format.")
]
Effort = Annotated[
    str | None, typer.Option("--effort", metavar="LEVEL", help="Thinking effort of a new session: low, high or max.")
]
NoThinking = Annotated[bool, typer.Option("--no-thinking", help="New session without thinking.")]
HideThinking = Annotated[bool, typer.Option("--hide-thinking", help="Do not show thinking on stderr.")]

# Numbers arrive as text: the settings check them, so that a bad one reads the same from every source.
Temperature = Annotated[str | None, typer.Option("--temperature", "-t", metavar="X", help="0 is greedy.")]
TopP = Annotated[str | None, typer.Option("--top-p", metavar="X", help="Above 0, at most 1; 1 keeps all.")]
TopK = Annotated[str | None, typer.Option("--top-k", metavar="N", help="0 keeps all.")]
MinP = Annotated[str | None, typer.Option("--min-p", metavar="X", help="From 0 to 1; 0 keeps all.")]
Seed = Annotated[str | None, typer.Option("--seed", metavar="N", help="Default: the session's own.")]
MaxTokens = Annotated[str | None, typer.Option("--max-tokens", metavar="N", help="Longest answer, thinking included.")]
RequireCached = Annotated[
    bool, typer.Option("--require-cached", help="Refuse (exit 6) rather than evaluate old tokens again.")
]
