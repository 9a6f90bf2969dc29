"""`k3 doctor`: what this machine offers, what was chosen and why, whether the model fits, whether the store is well."""

from __future__ import annotations

import typer

from k3cli.commands import options as opt
from k3cli.commands.doctor_checks import machine, model, paths, settings_rows, store_health, versions
from k3cli.commands.output import Printer
from k3cli.errors import Exit


def command(
    model_ref: opt.Model = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    gpus: opt.Gpus = None,
    json: opt.Json = False,
) -> None:
    """Show the machine, versions, paths, settings, what was chosen and why, and whether the model fits.

    Nothing is loaded. Exits with the code of the first problem found: 1 K3_HOME not writable, 3 model files, 4 does not
    fit, 8 store damaged.
    """
    from k3cli.commands.runtime import settings_from

    settings = settings_from({"model": model_ref, "device": device, "dtype": dtype, "gpus": gpus})
    printer = Printer(json=json)
    code, section = Exit.OK, ""
    groups = (versions(), machine(), paths(settings), settings_rows(settings), model(settings), store_health(settings))
    for check in (row for rows in groups for row in rows):
        if check.section != section:
            section = check.section
            printer.line(section)
        flag = "!" if check.code else " "
        printer.line(f" {flag} {check.name}: {check.value}" + (f"  ({check.reason})" if check.reason else ""))
        printer.event(
            "check",
            section=check.section,
            name=check.name,
            value=check.value,
            reason=check.reason,
            ok=check.code == Exit.OK,
            **({} if check.data is None else {"data": check.data}),
        )
        code = code or check.code
    printer.done(exit_code=int(code))
    if code:
        raise typer.Exit(int(code))
