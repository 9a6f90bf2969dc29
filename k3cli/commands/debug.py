"""`k3 debug`: raw logits and token ids, for people who doubt a result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from k3cli.commands import options as opt
from k3cli.commands.inputs import read_text
from k3cli.commands.output import Printer
from k3cli.config import path_of
from k3cli.errors import UsageError

app = typer.Typer(help="Raw logits and token ids, for people who doubt a result.", rich_markup_mode=None)


@app.command("logits")
def logits(
    model: Annotated[str, typer.Option("--model", "-m", metavar="DIR", help="Model folder or hub id.")],
    tokens_file: Annotated[
        Path, typer.Option("--tokens-file", metavar="IDS.json", parser=path_of, help="A JSON list of token ids.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.safetensors", parser=path_of, help="Gets `logits` [T, V] float32.")
    ],
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule", metavar="KIND", help="prefill, decode, or chunk sizes such as 1,63,64 (the last one repeats)."
        ),
    ] = "prefill",
    device: opt.Device = None,
    dtype: opt.Dtype = None,
) -> None:
    """Write the logits of every position of a token list."""
    from k3cli.commands.runtime import loading_bar, one_piece, settings_from

    settings = settings_from({"model": model, "device": device, "dtype": dtype})
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: no such folder", "a path in an existing folder")
    from k3cli.model.debug import write_logits

    printer = Printer()
    one_piece(settings, printer)
    rows, vocab = write_logits(
        settings.model_ref,
        tokens_file,
        out,
        schedule=schedule,
        device=settings.device,
        dtype=settings.dtype,
        progress=loading_bar(printer),
    )
    printer.notice(f"wrote logits [{rows}, {vocab}] float32 to {out}")


@app.command("tokens", short_help="Print the token ids of a text or a chat.")
def tokens(
    tokenizer: Annotated[
        Path, typer.Option("--tokenizer", metavar="DIR", parser=path_of, help="Folder with tiktoken.model.")
    ],
    chat: Annotated[
        Path | None,
        typer.Option(
            "--chat",
            metavar="MESSAGES.json",
            parser=path_of,
            help="Object with messages, and optionally tools, thinking, effort, tool_choice, response_format.",
        ),
    ] = None,
) -> None:
    """Print the token ids of stdin, or of a rendered chat, as a JSON list."""
    from k3cli.chat.debug import debug_tokens

    ids = debug_tokens(tokenizer, text=read_text("-", "stdin")) if chat is None else debug_tokens(tokenizer, chat=chat)
    sys.stdout.write(json.dumps(ids) + "\n")
