"""The printer: what a terminal gets and what a pipe gets."""

from __future__ import annotations

import io

import pytest

from k3cli.commands.bar import ECHO, erase_before_warnings
from k3cli.commands.output import Printer, human_bytes, table, visible
from k3cli.commands.turns import show
from k3cli.engine import events as ev


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def printer(monkeypatch):
    """A printer whose streams are terminals or not."""

    def make(*, out: bool = False, err: bool = False, **options) -> Printer:
        monkeypatch.setattr("sys.stdout", Terminal() if out else io.StringIO())
        monkeypatch.setattr("sys.stderr", Terminal() if err else io.StringIO())
        return Printer(**options)

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return make


def answer(printer: Printer) -> None:
    for event in (ev.Thinking("let me "), ev.Thinking("see"), ev.Text("The "), ev.Text("end"), ev.Notice("n", "note")):
        show(event, printer)
    printer.end()


def test_pipes_get_plain_text(printer) -> None:
    plain = printer()
    answer(plain)
    plain.progress("prefill", 1, 2)
    assert plain.out.getvalue() == "The end\n"
    assert plain.err.getvalue() == "let me see\nk3: note\n"


def test_a_terminal_gets_dim_notes_unless_told_otherwise(printer, monkeypatch) -> None:
    dim = printer(out=True, err=True)
    answer(dim)
    assert dim.out.getvalue() == "The end\n"
    assert dim.err.getvalue() == "\x1b[2mlet me \x1b[0m\x1b[2msee\x1b[0m\n\x1b[2mk3: note\n\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = printer(err=True)
    answer(plain)
    assert "\x1b" not in plain.err.getvalue()


def test_a_notice_in_an_answer_breaks_the_line_on_a_terminal_only(printer) -> None:
    for terminal, expected in ((False, "The end"), (True, "The \nend")):
        one = printer(out=terminal, err=True)
        for event in (ev.Text("The "), ev.Notice("n", "note"), ev.Text("end")):
            show(event, one)
        assert one.out.getvalue() == expected


def test_a_terminal_is_not_steered_by_the_model(printer) -> None:
    evil = "a\x1b]0;title\x07b\rc\x9b31m\td\n"
    shown = printer(out=True)
    show(ev.Text(evil), shown)
    assert shown.out.getvalue() == "a\\x1b]0;title\\x07b\\x0dc\\x9b31m\td\n"
    raw = printer()
    show(ev.Text(evil), raw)
    assert raw.out.getvalue() == evil
    assert visible("žluť 漢字 🙂\n\t") == "žluť 漢字 🙂\n\t"


def test_bars_only_on_a_terminal_and_gone_afterwards(printer) -> None:
    bar = printer(err=True)
    bar.progress("loading", 5, 10, "of 10 B")
    bar.progress("loading", 10, 10, "of 10 B")
    bar.notice("done")
    text = bar.err.getvalue()
    assert text.startswith("\rk3: loading [##########          ]  50%")
    assert " \r\x1b[2mk3: done" in text


BAR = "prefill [##########          ]  50% "


def print_line(printer: Printer) -> None:
    printer.line("turn 1")


def print_event(printer: Printer) -> None:
    printer.json = True
    printer.event("turn")


def print_answer(printer: Printer) -> None:
    printer.answer("text")


def print_thinking(printer: Printer) -> None:
    printer.thinking("text")


def print_row_of_a_table(printer: Printer) -> None:
    printer.aside("decode")


def print_by_another(_printer: Printer) -> None:
    Printer().notice("error: out of luck")


def print_warning(_printer: Printer) -> None:
    import warnings

    warnings.showwarning("a library warns", UserWarning, "file.py", 1)


@pytest.mark.parametrize(
    "print_it",
    [
        print_line,
        print_event,
        print_answer,
        print_thinking,
        print_row_of_a_table,
        print_by_another,
        print_warning,
    ],
)
def test_whatever_is_printed_takes_the_bar_away_first(printer, monkeypatch, print_it) -> None:
    """Both streams are one terminal: it is the order of the bytes that counts."""
    one = printer(out=True, err=True)
    one.err = one.out
    monkeypatch.setattr("sys.stderr", one.out)
    monkeypatch.setattr("warnings.showwarning", lambda *_: one.out.write("a library warns"))
    erase_before_warnings()
    one.progress("prefill", 1, 2)
    print_it(one)
    seen = one.out.getvalue()
    text = f"\rk3: {BAR}"
    blank = "\r" + " " * (len(text) - 1 + ECHO) + "\r"
    assert seen.startswith(text + blank)
    assert len(seen) > len(text + blank)
    assert "\r" not in seen[len(text + blank) :]


def test_a_result_in_a_pipe_leaves_the_bar(printer) -> None:
    one = printer(err=True)
    one.progress("prefill", 1, 2)
    one.line("turn 1")
    assert one.out.getvalue() == "turn 1\n"
    assert one.err.getvalue() == f"\rk3: {BAR}"


def test_a_bar_is_cut_where_the_line_ends(printer, monkeypatch) -> None:
    """What wraps can't be redrawn: each bar left its first line behind."""
    monkeypatch.setenv("COLUMNS", "40")
    narrow = printer(err=True)
    narrow.progress("loading", 1, 2, "of 8.0 GB", "500.0 MB/s, 12.0 s left")
    narrow.progress("loading", 2, 2, "of 8.0 GB", "500.0 MB/s, 0.0 s left")
    drawn = narrow.err.getvalue().split("\r")[1:]
    assert [len(text) for text in drawn] == [40 - 1 - ECHO] * 2


def test_a_key_that_the_terminal_shows_goes_with_the_bar(printer) -> None:
    """^C stands behind the bar, on the same line."""
    one = printer(err=True)
    one.progress("prefill", 1, 2)
    one.err.write("^C")
    one.notice("error: interrupted")
    line = ""
    for part in one.err.getvalue().replace("\x1b[2m", "").partition("\n")[0].split("\r"):
        line = part + line[len(part) :]
    assert line.rstrip() == "k3: error: interrupted"


def test_a_bar_does_not_end_in_what_was_being_said(printer) -> None:
    one = printer(out=True, err=True)
    one.thinking("let me see")
    one.progress("replay", 1, 2)
    assert "see\x1b[0m\n\rk3: replay" in one.err.getvalue()


def test_json_mode_keeps_the_answer_out_of_stdout(printer) -> None:
    both = printer(json=True)
    answer(both)
    lines = both.out.getvalue().splitlines()
    assert len(lines) == 5
    assert all(line.startswith('{"v":1,"type":"') for line in lines)
    assert both.err.getvalue() == "k3: note\n"


def test_the_loading_bar_tells_bytes_rate_and_time_left(printer) -> None:
    from k3cli.commands.runtime import loading_bar
    from k3cli.model.weights import LoadProgress

    bar, pipe = printer(err=True), printer()
    for one in (bar, pipe):
        loading_bar(one)(LoadProgress(0, 8 * 10**9, 0.0))
        one._bar_time = 0.0
        loading_bar(one)(LoadProgress(2 * 10**9, 8 * 10**9, 4.0))
    assert "25% of 8.0 GB 500.0 MB/s, 12.0 s left" in bar.err.getvalue()
    assert pipe.err.getvalue() == ""


def test_many_progress_events_become_few(printer) -> None:
    few = printer(json=True)
    for done in range(1, 1001):
        show(ev.Progress("prefill", done, 1000), few)
    lines = few.out.getvalue().splitlines()
    assert 2 <= len(lines) < 50
    assert '"done":1000' in lines[-1]


def test_sizes_and_tables() -> None:
    assert [human_bytes(n) for n in (0, 999, 1000, 1_560_936_091_448)] == ["0 B", "999 B", "1.0 KB", "1.6 TB"]
    assert table(("A", "LONG"), [("xyz", "1"), ("", "22")], "<>") == ["A    LONG", "xyz     1", "       22"]
