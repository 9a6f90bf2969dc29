"""Calls that wait inside a library for other processes."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import TypeVar

Result = TypeVar("Result")


def beside(call: Callable[[], Result], wait: Callable[[Event], None]) -> Result:
    """What `call` gives or raises, in a thread of its own, so that a signal reaches this one meanwhile.

    wait: returns when the event, the call's end, has come; what it raises gives the call up, whose thread stays behind.
    """
    found: list[Result] = []
    failed: list[BaseException] = []
    ended = Event()

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)
        finally:
            ended.set()

    Thread(target=work, name="k3-wait", daemon=True).start()
    wait(ended)
    if failed:
        raise failed[0]
    return found[0]
