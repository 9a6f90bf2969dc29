"""What `chat`, `resume` and `fork -p` do once their conversation is open: one turn, or the prompt of a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from k3cli.commands.inputs import Request, bind_tool_results
from k3cli.commands.names import new_name
from k3cli.commands.output import Printer
from k3cli.commands.repl import repl
from k3cli.commands.runtime import head_of, load_engine, other_model, recorded_model, refuse_existing, sampling_of
from k3cli.commands.turns import finish, refuse_unsaved, run_turn, show
from k3cli.config import Settings
from k3cli.errors import ContextError, UsageError

if TYPE_CHECKING:
    from k3_sessions.store import Store

    from k3cli.commands.drafts import Drafts
    from k3cli.engine.conversation import Conversation, Mode


def talk(
    store: Store,
    settings: Settings,
    printer: Printer,
    request: Request,
    name: str,
    *,
    mode: Mode,
    new: str | None = None,
    at: str | None = None,
    system: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    drafts: Drafts | None = None,
) -> None:
    """Load the model, open the conversation, and answer. See `Conversation.open` for mode, new and at (a turn id).

    drafts: where drafts come from; None: plain decoding.

    Raises typer.Exit with the code of a signal or a closed pipe, after the turn is saved.
    """
    if request.tool_choice == "required" and not request.add_tools:
        require_tools(tools if mode == "create" else declared_tools(store, name, at))
    from k3_sessions.errors import IdentityMismatch, StoreError

    from k3cli.engine.conversation import Conversation
    from k3cli.engine.events import Notice

    head = head_of(settings, system, tools, new=mode == "create")
    refuse_early(store, request, name, head, mode=mode, at=at)
    if mode != "create":
        settings = recorded_model(settings, store, name, printer)
    sampling = sampling_of(settings)
    # Who else is writing there is told before minutes are spent on loading a model; and nobody begins meanwhile.
    written = {"create": [name], "resume": [name], "fork": [new] if new is not None else [], "ephemeral": []}[mode]
    with store.reserving(*written):
        for made in written if mode != "resume" else ():
            refuse_existing(store, made)  # somebody may have been quicker
        engine = load_engine(settings, printer)
        if drafts is not None:
            problem = drafts.apply(engine, store)
            if problem:
                printer.notice(problem)
        try:
            conversation = Conversation.open(
                engine,
                store,
                name,
                mode=mode,
                new=new,
                at=at,
                head=head,
                require_cached=settings.require_cached,
                emit=lambda event: show(event, printer),
            )
        except IdentityMismatch as problem:
            raise other_model(problem, store, name) from None
    if not request.one_shot:
        free = partial(new_name, store.exists)
        finish(repl(conversation, printer, sampling, settings.home / "history", free))
        return
    try:
        with conversation:
            code = run_turn(
                conversation,
                messages_of(request, conversation),
                printer,
                sampling,
                tools=request.add_tools,
                tool_choice=request.tool_choice,
                response_format=request.response_format,
            )
            refuse_unsaved(conversation)
    except (ContextError, UsageError):  # refused before anything was evaluated: whoever asks again finds the name free
        if mode == "fork" and new is not None:
            try:
                store.remove(new)
                told = Notice("fork-removed", f"session {new} is gone again: its first turn was refused")
            except StoreError as problem:
                told = Notice("fork-stays", f"session {new} stays, although its first turn was refused: {problem}")
            show(told, printer)
        raise
    finish(code)


def refuse_early(
    store: Store, request: Request, name: str, head: Mapping[str, Any], *, mode: Mode, at: str | None
) -> None:
    """Refuse what the stored session alone can tell, before minutes are spent on loading a model.

    Another head than the session began with, effort without thinking, results that no open call waits for.
    """
    from k3cli.engine import record
    from k3cli.engine.head import Head

    turn = None
    if mode == "create":
        Head.new(head, thinking=True)  # the format's default may differ; what contradicts itself does so under each
    else:
        session = store.session(name)
        Head.from_json(session.fixed.get("head", {})).require(head, name)
        turn_id = at or session.head
        turn = None if turn_id is None else store.turn(turn_id)
    if request.results is not None:
        bind_tool_results(request.results, record.open_calls(turn))


def declared_tools(store: Store, name: str, at: str | None) -> list[str]:
    """Names of the tools a session has at turn `at` (None: the newest), as that turn recorded them."""
    turn_id = at or store.session(name).head
    return [] if turn_id is None else list(store.turn(turn_id).meta.get("context", {}).get("tool_names", []))


def require_tools(tools: Sequence[Any] | None) -> None:
    """Refuse to require a call where there is nothing to call, before a model is loaded for it."""
    if not tools:
        raise UsageError(
            "--tool-choice required and no tool is declared", "at least one tool", "declare tools with --add-tools FILE"
        )


def messages_of(request: Request, conversation: Conversation) -> list[dict[str, Any]]:
    """The new messages of a one-shot run: tool results first, then the prompt."""
    messages: list[dict[str, Any]] = []
    if request.results is not None:
        messages += bind_tool_results(request.results, conversation.open_calls())
    if request.prompt is not None:
        messages.append({"role": "user", "content": request.prompt})
    return messages
