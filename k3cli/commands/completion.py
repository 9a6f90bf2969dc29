"""`k3 completion SHELL`: the completion script of a shell, on stdout."""

from __future__ import annotations

from typing import Annotated

import typer

from k3cli.errors import UsageError

SHELLS = ("bash", "zsh", "fish")


def command(
    shell: Annotated[
        str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", autocompletion=lambda: list(SHELLS))
    ],
) -> None:
    """Print a shell completion script.

    bash: source it from ~/.bashrc. zsh: save it as _k3 in a folder of $fpath.
    fish: save it as ~/.config/fish/completions/k3.fish.
    """
    if shell not in SHELLS:
        raise UsageError(f"there is no completion script for {shell!r}", "bash, zsh or fish")
    from typer.completion import get_completion_script

    typer.echo(get_completion_script(prog_name="k3", complete_var="_K3_COMPLETE", shell=shell))
