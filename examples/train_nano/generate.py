"""Conversations of any length, deterministic by seed: facts told, filler, facts asked back, tools, pasted documents.

`training_row(seed, length)` gives ids and loss classes of exactly `length` tokens. `recall_case(seed, distance)` gives
one context whose facts lie `distance` tokens back, with one question for each fact. Seeds are strings; training uses
"train/...", evaluation "eval/...", so that they can not meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import filler
import numpy as np
from chatfmt import Writer
from facts import ASK_ONE, PEOPLE, fill
from library import Library
from talk import Talk
from toolcalls import draw_tools
from vocab import Vocab

STEPS: list[tuple[Callable[[Talk], None], float]] = [
    (Talk.recall, 30), (Talk.tell, 17), (Talk.update, 3), (Talk.reverse, 2), (Talk.never_told, 2.5), (Talk.summary, 2),
    (filler.about_k3, 10), (filler.chitchat, 4), (filler.about_the_world, 3), (filler.document, 10),
    (filler.repeat, 5), (filler.arithmetic, 1), (filler.edit, 4), (filler.tool, 7),
]  # fmt: skip
SYSTEM_TEXTS = [
    "You are helpful.",
    "You are a helpful assistant.",
    "Be brief.",
    "Answer in one sentence.",
    "You are k3-nano.",
    "You help an engineer.",
    "You are an agent that runs tools.",
    "Remember every fact exactly.",
]


def begin(rng: random.Random, vocab: Vocab, library: Library, length: int, with_tools: bool | None = None) -> Talk:
    """The head of a conversation: tools, effort, system text."""
    thinking = rng.random() < 0.8
    talk = Talk(rng, vocab, library, Writer(vocab, thinking), None, (48, max(256, min(2048, length // 6))))
    if with_tools or (with_tools is None and rng.random() < 0.3):
        talk.tools = draw_tools(rng)
        talk.out.tools([tool.schema() for tool in talk.tools])
    if thinking and rng.random() < 0.8:
        talk.effort = rng.choice(("low", "high", "max", "max"))
        talk.out.effort(talk.effort)
    if rng.random() < 0.3:
        talk.out.message(
            "system", rng.choice(SYSTEM_TEXTS) + rng.choice(("", "", f" The user is called {rng.choice(PEOPLE)}."))
        )
    return talk


def training_row(seed: str, length: int, vocab: Vocab, library: Library) -> tuple[np.ndarray, np.ndarray]:
    """(ids uint16 [length], classes uint8 [length]) of one conversation cut at `length`."""
    rng = random.Random(seed)
    talk = begin(rng, vocab, library, length)
    steps = [step for step, _ in STEPS]
    # A conversation has a character: some are mostly facts, some mostly talk, some mostly documents.
    weights = [weight * rng.choice((0.4, 1.0, 1.0, 1.6)) for _, weight in STEPS]
    if talk.tools:
        weights[-1] *= 3
    while len(talk.out) < length:
        rng.choices(steps, weights)[0](talk)
    return np.array(talk.out.ids[:length], np.uint16), np.array(talk.out.classes[:length], np.uint8)


FILLER = [
    (filler.document, 5.0),
    (filler.about_k3, 3.0),
    (filler.chitchat, 1.0),
    (filler.repeat, 1.0),
    (filler.edit, 1.0),
    (Talk.tell, 1.5),
]


@dataclass
class RecallCase:
    """`ids` is a context; `questions` are (user text, expected value, ids of question and true answer, classes)."""

    ids: list[int]
    thinking: bool
    questions: list[tuple[str, str, list[int], list[int]]]
    distances: list[int]


def recall_case(seed: str, distance: int, vocab: Vocab, library: Library, n_facts: int = 8) -> RecallCase:
    """Facts told in the first turns, filler until they lie at least `distance` tokens back, then one question each."""
    rng = random.Random(seed)
    talk = begin(rng, vocab, library, max(distance, 1024), with_tools=False)
    while len(talk.facts) < n_facts:
        talk.tell()
    asked = talk.facts[:n_facts]
    told = len(talk.out)
    steps, weights = zip(*FILLER, strict=True)
    while len(talk.out) < told + distance:
        left = told + distance - len(talk.out)
        talk.paste = (48, max(96, min(talk.paste[1], left)))
        rng.choices(steps, weights)[0](talk) if left > 120 else filler.chitchat(talk)
    context = list(talk.out.ids)
    questions = []
    for fact in asked:
        talk.out.ids, talk.out.classes = [], []
        template = rng.choice(ASK_ONE)
        talk.recall(fact, template)
        questions.append((fill(rng, template, fact), fact.value, list(talk.out.ids), list(talk.out.classes)))
    return RecallCase(context, talk.out.thinking, questions, [len(context) - fact.position for fact in asked])
