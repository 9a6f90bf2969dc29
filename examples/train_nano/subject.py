"""What k3-nano can talk about: the k3 program, sessions, a little shell and Python, small talk; and what it must admit
it does not know. `QA` and `CHAT` pair several questions with several answers (subject.txt)."""

from __future__ import annotations

import random

from facts import CITIES, LISTS, PEOPLE, SURNAMES, pseudo_word
from lists import load_lists

UNKNOWN_ANSWERS = [
    "I do not know. I am k3-nano, a very small model without world knowledge.",
    "I do not know that. I am a tiny model; please use a larger one for such questions.",
    "I can not answer that: I am too small to know facts about the world.",
]


def entries(lines: list[str]) -> list[tuple[list[str], list[str]]]:
    """Pairs of (questions, answers) from alternating lines."""
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [(q.split("|"), a.replace("\\n", "\n").split("|")) for q, a in pairs]


TALK = load_lists("subject.txt")
QA, CHAT = entries(TALK["QA"]), entries(TALK["CHAT"])
POLITE_BEFORE = [
    "",
    "",
    "",
    "",
    "",
    "please ",
    "ok, ",
    "so ",
    "and ",
    "hey, ",
    "one question: ",
    "another question: ",
    "tell me, ",
    "hello, ",
]
POLITE_AFTER = ["", "", "", "", "", " please", " thanks", " exactly", " in short"]


def ask(rng: random.Random, entry: tuple[list[str], list[str]]) -> tuple[str, str]:
    """A question in one of its wordings, and an answer."""
    question = rng.choice(entry[0])
    if rng.random() < 0.3:
        end = question[-1] if question[-1] in "?!." else ""
        question = rng.choice(POLITE_BEFORE) + question.removesuffix(end) + rng.choice(POLITE_AFTER) + end
    if rng.random() < 0.5:
        question = question[0].upper() + question[1:]
    if rng.random() < 0.15:
        question = question.rstrip("?!.")
    return question, rng.choice(entry[1])


def unknown(rng: random.Random) -> tuple[str, str]:
    """A question about the world, and the admission that the model does not know."""
    names = LISTS["THINGS"]
    question = rng.choice(LISTS["UNKNOWN"]).format(
        x=rng.choice([*names, pseudo_word(rng).capitalize(), rng.choice(CITIES)]),
        z=rng.choice(names),
        y=rng.randrange(1500, 2030),
        p=f"{rng.choice(PEOPLE)} {rng.choice(SURNAMES)}",
        c=rng.choice(CITIES),
        c2=rng.choice(CITIES),
    )
    return ask(rng, ([question], UNKNOWN_ANSWERS))
