"""Results for people: a line per row, and a plot of speed by depth."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from k3cli.bench.record import Row
from k3cli.bench.shares import usual
from k3cli.commands.output import human_bytes
from k3cli.errors import K3Error

HEAD = ("ROW", "DEPTH", "TOKENS", "TIME", "SPREAD", "TOK/S", "BYTES", "OF BW", "OF MATRIX", "FLOOR", "OF FLOOR", "NOTE")
ALIGN = "<>>>>>>>>>><"


def cells(row: Row) -> tuple[str, ...]:
    """One table row; a failed one says why."""
    name = str(row["row"]) + "".join(f" {row[key]}" for key in ("op", "text") if key in row)
    depth = f"{row['depth']:,}" if "depth" in row else str(row.get("shape", row.get("spec", "")))
    tokens = f"{row['tokens']:,}" if "tokens" in row else ""
    if "error" in row:
        return (name, depth, tokens, "FAILED", *[""] * 7, row["error"])
    if "shares" in row:
        return (name, depth, tokens, *[""] * 8, usual(row))
    rate = f"{row['tokens_per_second']:,.1f}" if "tokens_per_second" in row else ""
    size = human_bytes(row["bytes"]) if "bytes" in row else ""
    shares = [f"{row[key]:.0%}" if key in row else "" for key in ("of_bandwidth", "of_matrix_rate")]
    floor = duration(row["floor_seconds"]) if "floor_seconds" in row else ""
    of_floor = f"{row['of_floor']:.0%}" if "of_floor" in row else ""
    time = duration(row["seconds"]) if "seconds" in row else ""
    wobble = duration(row["spread"]) if len(row.get("samples", ())) > 1 else ""
    return (name, depth, tokens, time, wobble, rate, size, *shares, floor, of_floor, note(row))


def note(row: Row) -> str:
    """What a reader must know beside the numbers."""
    found = []
    if "sums_seconds" in row:
        share = row["sums_seconds"] / row["seconds"]
        found.append(f"{row['world']} ranks, {duration(row['sums_seconds'])} of it for their sums ({share:.0%})")
    if row.get("derived"):
        found.append(f"derived: {row['formula']}")
    if "spec" in row:
        found.append(drafted(row))
    for key in ("state", "note"):
        if row.get(key):
            found.append(str(row[key]))
    if "filesystem" in row:
        rate = f"{human_bytes(row['bytes'] / row['seconds'])}/s"
        found.append(" ".join(filter(None, (row["filesystem"], row.get("cache"), rate))))
    if "peer_seconds" in row:
        found.append(f"{row['peer']} {duration(row['peer_seconds'])}")
    if "target_seconds" in row:
        found.append(f"target {duration(row['target_seconds'])}")
    for rank, part in enumerate(row.get("ranks") or ([row] if "planned" in row else [])):
        where = f"rank {rank} on {part['device']}: " if "device" in part else ""
        found.append(f"{where}planned {human_bytes(part['planned'])}, peak {human_bytes(part['peak'])}")
    return "; ".join(found)


def plainly(run: Row) -> list[str]:
    """What runs as reference and why, a line for each reason; nothing of a run that doesn't tell."""
    reasons: dict[str, list[str]] = {}
    for name, reason in run.get("reference", {}).items():
        reasons.setdefault(reason, []).append(name)
    return [f"reference (torch): {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def drafted(row: Row) -> str:
    """What a drafter brought, for people."""
    shares = " ".join(f"{share:.0%}" for share in row["acceptance"])
    parts = " / ".join(duration(row[f"{part}_seconds"]) for part in ("draft", "verify", "commit"))
    low, high = min(row["ratios"]), max(row["ratios"])
    ratio = f"{row['ratio']:.2f} times off ({low:.2f} to {high:.2f}, by processor time {row['processor_ratio']:.2f})"
    return f"{ratio}; {row['tokens_per_step']:.2f} tokens a step; accepted {shares or '-'}; draft/verify/commit {parts}"


def duration(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds / scale < 1000 else f"{seconds / scale:,.0f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def can_plot(file: Path) -> None:
    """K3Error without matplotlib or a place for the picture: better told before hours of measuring than behind them."""
    if importlib.util.find_spec("matplotlib") is None:
        raise K3Error("matplotlib is not installed", "it for a picture", "pip install 'k3cli[bench]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    kinds = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix[1:].lower() not in kinds:
        raise K3Error(f"{file} can have no picture", f"a picture file that ends in .{', .'.join(sorted(kinds))}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise K3Error(f"{file} cannot be written", "a picture file k3 may write", "give another FILE.png")


NEEDED = {"depth", "tokens", "tokens_per_second"}


def series(rows: Sequence[Row]) -> dict[str, list[tuple[int, float, float]]]:
    """What is drawn: for decode and prefill, where measured, (depth, tokens a second, what the floor allows)."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for kind in ("decode", "prefill"):
        points = sorted(
            (row["depth"], row["tokens_per_second"], row["tokens"] / row["floor_seconds"])
            for row in rows
            if row.get("row") == kind and "seconds" in row and row.get("floor_seconds") and row.keys() >= NEEDED
        )
        if points:
            found[kind] = points
    if not found:
        raise K3Error("no decode or prefill row to draw", "finished rows of a ladder", "run the benchmark first")
    return found


def plot(run: Row, rows: Sequence[Row], file: Path) -> None:
    """Decode and prefill speed against depth, with the speed the floor allows. K3Error without matplotlib."""
    drawn = series(rows)
    can_plot(file)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(drawn), figsize=(6 * len(drawn), 4), squeeze=False)
    for axis, (kind, points) in zip(axes[0], drawn.items(), strict=True):
        depths, measured, floor = zip(*points, strict=True)
        axis.plot(depths, measured, "o-", label="measured", clip_on=False)
        axis.plot(depths, floor, "k--", label="floor")
        axis.set(xlabel="tokens behind", ylabel="tokens/s", title=kind, ylim=(0, None))
        axis.set_xscale("symlog", linthresh=1024)
        axis.set_xlim(left=0)  # the scale would show as much below nothing
        axis.legend()
    figure.suptitle(f"{run['model']} on {run['device']}, {run['dtype']}, {run['commit']}", fontsize="medium")
    figure.tight_layout()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as problem:
        told = getattr(problem, "strerror", None) or problem
        raise K3Error(f"{file}: {told}", "a picture file k3 may write", "give another FILE.png") from None
