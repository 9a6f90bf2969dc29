"""What happens between facts: questions about k3, small talk, pasted documents, small jobs with text, tool calls."""

from __future__ import annotations

import subject
from chatfmt import MARK_CLOSE, MARK_OPEN
from facts import STEMS, WORDS, codename, fill, new_fact, pseudo_word, roughen
from talk import Talk


def about_k3(talk: Talk) -> None:
    question, answer = subject.ask(talk.rng, talk.rng.choice(subject.QA))
    talk.turn(question, talk.think("A question about k3.", "The user asks something I know about."), answer)


def chitchat(talk: Talk) -> None:
    question, answer = subject.ask(talk.rng, talk.rng.choice(subject.CHAT))
    talk.turn(question, talk.think("Small talk.", "This is small talk. I answer briefly."), answer)


def about_the_world(talk: Talk) -> None:
    question, answer = subject.unknown(talk.rng)
    talk.turn(question, talk.think("I do not know this.", "This is about the world. I do not know it."), answer)


def document(talk: Talk) -> None:
    """The user pastes text, now and then with facts hidden in it, and wants something small from it."""
    rng = talk.rng
    low, high = talk.paste
    size = int(low * (high / low) ** rng.random())
    title, kind, ids, names = talk.library.excerpt(rng, size)
    parts: list[str | list[int]] = []
    where = "a page of documentation" if kind == "docs" else "a Python file"
    head = rng.choice(
        (
            f"Here is {where}:",
            f"This is {title}:",
            f"read this ({title}):",
            f"I paste {where} from {title}.",
            "Look at this text:",
            f"{title}",
        )
    )
    if rng.random() < 0.3:
        fact = talk.fresh_fact()
        line = fill(
            rng,
            rng.choice(
                (
                    "NOTE: {a} is {v}.\n",
                    "# {a} = {v}\n",
                    "INFO {a}: {v}\n",
                    "Remember: {a} is {v}.\n",
                    "[{a}] {v}\n",
                )
            ),
            fact,
        )
        cut = rng.randrange(len(ids) + 1) if rng.random() < 0.7 else 0
        newlines = [i for i in range(cut, len(ids)) if talk.vocab.bytes_of[ids[i]].endswith(b"\n")]
        cut = newlines[0] + 1 if newlines else 0
        parts = [head + "\n\n", ids[:cut], line, ids[cut:]]
        talk.keep([fact])
    else:
        parts = [head + "\n\n", ids]
    dice = rng.random()
    if names and dice < 0.5:
        shown = names[:6]
        ask = rng.choice(
            (
                "Which names does it define?",
                "List the first definitions.",
                "What functions and classes are in it?",
                "which functions are defined here?",
            )
        )
        answer = (
            "It defines "
            + ", ".join(f"{MARK_OPEN}{n}{MARK_CLOSE}" for n in shown)
            + ("." if len(shown) == len(names) else " and more.")
        )
    elif dice < 0.65:
        first = talk.vocab.decode(
            ids[: next((i + 1 for i, t in enumerate(ids) if talk.vocab.bytes_of[t].endswith(b"\n")), 20)]
        ).strip("\n")
        ask, answer = (
            rng.choice(("What is the first line?", "Repeat the first line.")),
            f"The first line is:\n{MARK_OPEN}{first}{MARK_CLOSE}",
        )
    else:
        ask = rng.choice(
            (
                "Please read it.",
                "Just read it for now.",
                "Keep it in mind.",
                "I will ask about it later.",
                "ok?",
                "Have you read it?",
            )
        )
        answer = rng.choice(("I have read it.", "I have read it. What do you want to know?", "OK, I have read it."))
    talk.out.message("user", [*parts, ask])
    talk.out.assistant(talk.think("A pasted text.", f"The user pastes {where}. I read it."), answer)
    talk.last_user = ""


def repeat(talk: Talk) -> None:
    rng = talk.rng
    text = rng.choice(
        (
            " ".join(rng.sample(WORDS, rng.randrange(2, 9))),
            codename(rng),
            new_fact(rng).value,
            " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(2, 8))),
        )
    )
    dice = rng.random()
    marked = f"{MARK_OPEN}{text}{MARK_CLOSE}"
    if dice < 0.3 and talk.last_user and len(talk.last_user) < 300:
        user, answer = (
            rng.choice(("What did I just say?", "Repeat my last message.", "what was my last message?")),
            f"You said:\n{MARK_OPEN}{talk.last_user}{MARK_CLOSE}",
        )
    elif dice < 0.6:
        user, answer = (
            rng.choice(("Repeat after me: {}", "say: {}", "Echo {}", "Please repeat: {}", "print {}")).format(marked),
            marked,
        )
    elif dice < 0.7:
        items = text.split()
        user, answer = rng.choice(("Sort these: {}", "sort {}")).format(" ".join(items)), " ".join(sorted(items))
    elif dice < 0.8:
        user, answer = rng.choice(("Write in upper case: {}", "uppercase {}")).format(text), text.upper()
    elif dice < 0.9:
        items = text.split()
        user, answer = (
            rng.choice(("Reverse the order: {}", "reverse these words: {}")).format(" ".join(items)),
            " ".join(reversed(items)),
        )
    else:
        items = text.split()
        user, answer = (
            rng.choice(("Make a list of: {}", "as a bullet list: {}")).format(" ".join(items)),
            "\n".join(f"- {i}" for i in items),
        )
    talk.turn(user, talk.think("Do it.", "A small job with text."), answer)


def arithmetic(talk: Talk) -> None:
    rng = talk.rng
    a, b = rng.randrange(20), rng.randrange(20)
    sign, result = rng.choice((("+", a + b), ("-", a - b)))
    user = rng.choice(("What is {} {} {}?", "{} {} {} = ?", "compute {} {} {}", "{} {} {}")).format(a, sign, b)
    talk.turn(user, talk.think("Compute.", "A small calculation."), f"{a} {sign} {b} = {result}")


def edit(talk: Talk) -> None:
    """Repeat a short piece of code with one name replaced."""
    rng = talk.rng
    names = [rng.choice((rng.choice(STEMS), rng.choice(WORDS), pseudo_word(rng))) for _ in range(5)]
    a, b, c, d, new = names
    code = rng.choice((
        f"def {a}({b}, {c}):\n    {d} = {b} + {c}\n    return {d}\n",
        f"for {a} in {b}:\n    if {a} == {c}:\n        print({a})\n    {d}.append({a})\n",
        f"class {a.capitalize()}:\n    def __init__(self, {b}):\n        self.{b} = {b}\n        self.{c} = None\n",
        f"import {a}\n\n{b} = {a}.load(\"{c}\")\n{d} = {b}.{c}()\nprint({d})\n",
        f"with open({a}) as {b}:\n    {c} = {b}.read()\n    {d}({c})\n",
        f"{a}:\n  {b}: 1\n  {c}: true\n  {d}: none\n",
    ))  # fmt: skip
    old = rng.choice([n for n in (a, b, c, d) if n in code])
    user = rng.choice(
        (
            "Rename {o} to {n}:",
            "replace {o} by {n} in this code:",
            "Change {o} to {n} here:",
            "In this code, {o} should be {n}.",
        )
    )
    changed = code.replace(old, new)
    talk.turn(
        f"{user.format(o=old, n=new)}\n```\n{code}```",
        talk.think("Edit the code.", f"I replace {old} by {new}."),
        f"```\n{MARK_OPEN}{changed}{MARK_CLOSE}```",
    )


def tool(talk: Talk) -> None:
    if not talk.tools:
        talk.recall()
        return
    rng = talk.rng
    chosen = [rng.choice(talk.tools)]
    if rng.random() < 0.12:
        chosen.append(rng.choice(talk.tools))
    drawn = [tool.make(rng) for tool in chosen]
    talk.out.message("user", roughen(rng, rng.choice((" and ", ". Then ", "\n")).join(d[0] for d in drawn)))
    names = " and ".join(dict.fromkeys(t.name for t in chosen))
    calls = [(tool.name, d[1]) for tool, d in zip(chosen, drawn, strict=True)]
    talk.out.assistant(talk.think(f"Call {names}.", f"The tool {names} fits this request."), "", calls)
    for index, (tool, d) in enumerate(zip(chosen, drawn, strict=True), 1):
        talk.out.message("tool", d[2], tool=tool.name, index=str(index))
    talk.out.assistant(
        talk.think("Answer from the result.", "The tool has answered. I tell the result."),
        " ".join(d[3] for d in drawn),
    )
    talk.last_user = ""
