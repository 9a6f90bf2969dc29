"""`k3 completion SHELL`: the completion script of a shell, on stdout."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def command(shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish.")]) -> None:
    """Print a shell completion script.

    bash: source it from ~/.bashrc. zsh: save it as _k3 in a folder of $fpath.
    fish: save it as ~/.config/fish/completions/k3.fish.
    """
    from typer.completion import get_completion_script

    typer.echo(get_completion_script(prog_name="k3", complete_var="_K3_COMPLETE", shell=shell.value))
