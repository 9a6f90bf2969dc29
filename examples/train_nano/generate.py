"""Conversations of any length, deterministic by seed: facts told, filler, facts asked back, tools, pasted documents.

`training_row(seed, length)` gives ids and loss classes of exactly `length` tokens. `recall_case(seed, distance)` gives
one context whose facts lie `distance` tokens back, with one question for each fact. Seeds are strings; training uses
"train/...", evaluation "eval/...", so that they can not meet.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import subject
from chatfmt import MARK_CLOSE, MARK_OPEN, Writer
from corpus import Document
from facts import (
    ACK_ONE, ASK_BARE, ASK_ONE, PEOPLE, STATE_ONE, STEMS, WORDS, Fact, codename, fill, new_fact, noun_of, path, pseudo_word,
    roughen, state_many,
)  # fmt: skip
from toolcalls import ToolKind, draw_tools
from vocab import Vocab

LINE = re.compile(r"[^\n]*\n+")


@dataclass
class Library:
    """Documents cut into lines and encoded. `cuts[i]` are the token counts before each line of document i."""

    titles: list[str]
    kinds: list[str]
    ids: list[np.ndarray]  # uint16, one array a document
    cuts: list[np.ndarray]  # int32, starts of lines, with the end
    names: list[list[str]]  # names defined in a code document, in order, by line start
    where: list[np.ndarray]

    @classmethod
    def build(cls, vocab: Vocab, documents: list[Document]) -> Library:
        library = cls([], [], [], [], [], [])
        for document in documents:
            ids: list[int] = []
            cuts, names, where = [0], [], []
            for line in LINE.findall(document.text):  # encoding line by line gives the same ids as encoding the whole
                found = re.match(r"\s*(?:def|class) (\w+)", line)
                if found and document.kind == "code":
                    names.append(found[1])
                    where.append(len(ids))
                ids += vocab.encode(line)
                cuts.append(len(ids))
            library.titles.append(document.title)
            library.kinds.append(document.kind)
            library.ids.append(np.array(ids, np.uint16))
            library.cuts.append(np.array(cuts, np.int32))
            library.names.append(names)
            library.where.append(np.array(where, np.int32))
        return library

    def excerpt(self, rng: random.Random, size: int) -> tuple[str, str, list[int], list[str]]:
        """(title, kind, ids, names defined): whole lines of one document, about `size` tokens or what there is."""
        which = rng.choices(range(len(self.ids)), self._weights())[0]
        cuts = self.cuts[which]
        first = int(cuts[rng.randrange(len(cuts) - 1)]) if len(self.ids[which]) > size else 0
        first = min(first, max(0, int(cuts[-1]) - size))
        first = int(cuts[np.searchsorted(cuts, first, side="right") - 1])
        last = int(cuts[min(np.searchsorted(cuts, first + size), len(cuts) - 1)])
        last = min(last, first + 2 * size + 64)
        inside = [name for name, at in zip(self.names[which], self.where[which], strict=True) if first <= at < last]
        return self.titles[which], self.kinds[which], self.ids[which][first:last].tolist(), inside

    def _weights(self) -> list[float]:
        if not hasattr(self, "_cached"):
            self._cached = [len(i) ** 0.75 * (2.0 if k == "docs" else 0.5) for i, k in zip(self.ids, self.kinds, strict=True)]
        return self._cached


@dataclass
class Talk:
    """One conversation under construction."""

    rng: random.Random
    vocab: Vocab
    library: Library
    out: Writer
    effort: str | None
    paste: tuple[int, int]  # token range of pasted documents
    facts: list[Fact] = field(default_factory=list)
    tools: list[ToolKind] = field(default_factory=list)
    last_user: str = ""

    def think(self, low: str, more: str) -> str:
        """Reasoning text by effort: a hint at low, a sentence at high or unset, both at max."""
        if self.effort == "low":
            return low
        return more if self.effort != "max" else f"{low} {more}"

    def turn(self, user: str, think: str, answer: str) -> None:
        self.out.message("user", user)
        self.out.assistant(think, answer)
        self.last_user = user.replace(MARK_OPEN, "").replace(MARK_CLOSE, "")

    # -- facts

    def fresh_fact(self) -> Fact:
        known = {fact.asked.lower() for fact in self.facts}
        for _ in range(20):
            noun = noun_of(self.rng.choice(self.facts)) if self.facts and self.rng.random() < 0.4 else None
            fact = new_fact(self.rng, noun)
            if fact.asked.lower() not in known and f"the {fact.key}".lower() not in known and f"my {fact.key}".lower() not in known:
                return fact
        return fact

    def keep(self, facts: list[Fact]) -> None:
        for fact in facts:
            fact.position = len(self.out)
        self.facts += facts

    def tell(self) -> None:
        rng = self.rng
        if rng.random() < 0.55:
            fact = self.fresh_fact()
            self.keep([fact])
            user = roughen(rng, fill(rng, rng.choice(STATE_ONE), fact))
            low, more = f"New fact: {fact.answered}.", f"The user tells {fact.answered}. I keep it."
            self.turn(user, self.think(low, more), fill(rng, rng.choice(ACK_ONE), fact))
            return
        facts: list[Fact] = []
        for _ in range(rng.choice((2, 2, 3, 3, 4, 5))):
            fact = self.fresh_fact()
            if fact.asked not in [f.asked for f in facts]:
                facts.append(fact)
        self.keep(facts)
        listed = ", ".join(f.answered for f in facts)
        answer = rng.choice(("Noted.", f"Noted: {listed}.", f"OK, I will remember {len(facts)} facts.", f"I have noted {listed}."))
        self.turn(roughen(rng, state_many(rng, facts)), self.think("New facts.", f"The user tells {len(facts)} facts. I keep them."), answer)

    def update(self) -> None:
        if not self.facts:
            return self.tell()
        rng = self.rng
        fact = rng.choice(self.facts)
        noun = noun_of(fact)
        fact.value = new_fact(rng, noun).value
        fact.position = len(self.out)
        user = rng.choice(("{A} has changed: it is now {v}.", "update: {a} is now {v}", "Correction: {a} is {v}.", "{A} changed to {v}.", "Sorry, {a} is {v}.", "From now on {a} is {v}.", "change {a} to {v}"))
        answer = rng.choice(("Noted: {b} is now {m}.", "Updated: {b} is now {m}.", "OK, {b} is now {m}."))
        self.turn(roughen(rng, fill(rng, user, fact)), self.think("A new value.", f"{fact.answered.capitalize()} has a new value."), fill(rng, answer, fact))

    def pick(self) -> Fact:
        rng = self.rng
        dice = rng.random()
        if dice < 0.5:
            return rng.choice(self.facts)
        if dice < 0.8:
            return rng.choice(sorted(self.facts, key=lambda f: f.position)[: 1 + len(self.facts) // 3])
        return rng.choice(self.facts[-4:])

    def recall(self, fact: Fact | None = None, template: str | None = None) -> None:
        """Ask for a fact; `fact` and `template` are drawn when not given."""
        if not self.facts:
            return self.tell()
        rng = self.rng
        if fact is None and rng.random() < 0.12 and len(self.facts) > 2:
            return self.recall_several()
        given = fact is not None
        fact = fact or self.pick()
        bare = template is None and rng.random() < 0.08
        template = template or rng.choice(ASK_BARE if bare else ASK_ONE)
        user = fill(rng, template, fact)
        if not given:
            user = roughen(rng, user)
        answer = fact.marked if bare else fill(rng, "{B} is {m}.", fact)
        think = self.think(f"Recall {fact.answered}.", f"The user told me {fact.answered}: {fact.marked}." if self.effort == "max" else f"The user asks for {fact.answered}. I recall it.")
        self.turn(user, think, answer)

    def recall_several(self) -> None:
        rng = self.rng
        facts = rng.sample(self.facts, rng.choice((2, 2, 3)) if len(self.facts) > 3 else 2)
        names = [f.asked for f in facts]
        listed = ", ".join(names[:-1]) + " and " + names[-1]
        user = rng.choice(("What are {}?", "Give me {}.", "tell me {}", "I need {}.", "what were {}?", "Repeat {} please."))
        answer = " ".join(fill(rng, "{B} is {m}.", f) for f in facts)
        self.turn(roughen(rng, user.format(listed)), self.think("Recall them.", f"The user asks for {len(facts)} facts. I recall them."), answer)

    def reverse(self) -> None:
        """From the value back to the name."""
        unique = [f for f in self.facts if len(f.value) > 4]
        if not unique:
            return self.tell()
        fact = self.rng.choice(unique)
        user = self.rng.choice(("What is {v}?", "what was {v} again?", "Which fact is {v}?", "do you know what {v} is?"))
        self.turn(fill(self.rng, user, fact), self.think("Find the value.", "The user asks what this value is."), fill(self.rng, "That is {b}.", fact))

    def never_told(self) -> None:
        fact = self.fresh_fact()
        user = roughen(self.rng, fill(self.rng, self.rng.choice(ASK_ONE[:24]), fact))
        self.turn(user, self.think("I was not told.", f"I look for {fact.answered}, but it was not told."), f"You have not told me {fact.answered}.")

    def summary(self) -> None:
        if not 1 <= len(self.facts) <= 5:
            return self.recall()
        user = self.rng.choice(("What did I tell you so far?", "Summarize what you know.", "summarise the facts", "list everything I told you", "What do you remember?", "repeat all facts"))
        answer = "You told me:\n" + "\n".join(f"- {f.answered}: {f.marked}" for f in self.facts)
        self.turn(user, self.think("List the facts.", f"The user told {len(self.facts)} facts so far. I list them."), answer)

    # -- filler

    def subject(self) -> None:
        question, answer = subject.ask(self.rng, self.rng.choice(subject.QA))
        self.turn(question, self.think("A question about k3.", "The user asks something I know about."), answer)

    def chitchat(self) -> None:
        question, answer = subject.ask(self.rng, self.rng.choice(subject.CHAT))
        self.turn(question, self.think("Small talk.", "This is small talk. I answer briefly."), answer)

    def unknown(self) -> None:
        question, answer = subject.unknown(self.rng)
        self.turn(question, self.think("I do not know this.", "This is about the world. I do not know it."), answer)

    def document(self) -> None:
        """The user pastes text, now and then with facts hidden in it, and wants something small from it."""
        rng = self.rng
        low, high = self.paste
        size = int(low * (high / low) ** rng.random())
        title, kind, ids, names = self.library.excerpt(rng, size)
        parts: list[str | list[int]] = []
        where = "a page of documentation" if kind == "docs" else "a Python file"
        head = rng.choice((f"Here is {where}:", f"This is {title}:", f"read this ({title}):", f"I paste {where} from {title}.", "Look at this text:", f"{title}"))
        if rng.random() < 0.3:
            fact = self.fresh_fact()
            line = fill(rng, rng.choice(("NOTE: {a} is {v}.\n", "# {a} = {v}\n", "INFO {a}: {v}\n", "Remember: {a} is {v}.\n", "[{a}] {v}\n")), fact)
            cut = rng.randrange(len(ids) + 1) if rng.random() < 0.7 else 0
            newlines = [i for i in range(cut, len(ids)) if self.vocab.bytes_of[ids[i]].endswith(b"\n")]
            cut = newlines[0] + 1 if newlines else 0
            parts = [head + "\n\n", ids[:cut], line, ids[cut:]]
            self.keep([fact])
        else:
            parts = [head + "\n\n", ids]
        dice = rng.random()
        if names and dice < 0.5:
            shown = names[:6]
            ask = rng.choice(("Which names does it define?", "List the first definitions.", "What functions and classes are in it?", "which functions are defined here?"))
            answer = "It defines " + ", ".join(f"{MARK_OPEN}{n}{MARK_CLOSE}" for n in shown) + ("." if len(shown) == len(names) else " and more.")
        elif dice < 0.65:
            first = self.vocab.decode(ids[: next((i + 1 for i, t in enumerate(ids) if self.vocab.bytes_of[t].endswith(b"\n")), 20)]).strip("\n")
            ask, answer = rng.choice(("What is the first line?", "Repeat the first line.")), f"The first line is:\n{MARK_OPEN}{first}{MARK_CLOSE}"
        else:
            ask = rng.choice(("Please read it.", "Just read it for now.", "Keep it in mind.", "I will ask about it later.", "ok?", "Have you read it?"))
            answer = rng.choice(("I have read it.", "I have read it. What do you want to know?", "OK, I have read it."))
        self.out.message("user", [*parts, ask])
        self.out.assistant(self.think("A pasted text.", f"The user pastes {where}. I read it."), answer)
        self.last_user = ""

    def repeat(self) -> None:
        rng = self.rng
        text = rng.choice((" ".join(rng.sample(WORDS, rng.randrange(2, 9))), codename(rng), new_fact(rng).value, " ".join(str(rng.randrange(1000)) for _ in range(rng.randrange(2, 8)))))
        dice = rng.random()
        marked = f"{MARK_OPEN}{text}{MARK_CLOSE}"
        if dice < 0.3 and self.last_user and len(self.last_user) < 300:
            user, answer = rng.choice(("What did I just say?", "Repeat my last message.", "what was my last message?")), f"You said:\n{MARK_OPEN}{self.last_user}{MARK_CLOSE}"
        elif dice < 0.6:
            user, answer = rng.choice(("Repeat after me: {}", "say: {}", "Echo {}", "Please repeat: {}", "print {}")).format(marked), marked
        elif dice < 0.7:
            items = text.split()
            user, answer = rng.choice(("Sort these: {}", "sort {}")).format(" ".join(items)), " ".join(sorted(items))
        elif dice < 0.8:
            user, answer = rng.choice(("Write in upper case: {}", "uppercase {}")).format(text), text.upper()
        elif dice < 0.9:
            items = text.split()
            user, answer = rng.choice(("Reverse the order: {}", "reverse these words: {}")).format(" ".join(items)), " ".join(reversed(items))
        else:
            items = text.split()
            user, answer = rng.choice(("Make a list of: {}", "as a bullet list: {}")).format(" ".join(items)), "\n".join(f"- {i}" for i in items)
        self.turn(user, self.think("Do it.", "A small job with text."), answer)

    def arithmetic(self) -> None:
        rng = self.rng
        a, b = rng.randrange(20), rng.randrange(20)
        sign, result = rng.choice((("+", a + b), ("-", a - b)))
        user = rng.choice(("What is {} {} {}?", "{} {} {} = ?", "compute {} {} {}", "{} {} {}")).format(a, sign, b)
        self.turn(user, self.think("Compute.", "A small calculation."), f"{a} {sign} {b} = {result}")

    def edit(self) -> None:
        """Repeat a short piece of code with one name replaced."""
        rng = self.rng
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
        user = rng.choice(("Rename {o} to {n}:", "replace {o} by {n} in this code:", "Change {o} to {n} here:", "In this code, {o} should be {n}."))
        changed = code.replace(old, new)
        self.turn(f"{user.format(o=old, n=new)}\n```\n{code}```", self.think("Edit the code.", f"I replace {old} by {new}."), f"```\n{MARK_OPEN}{changed}{MARK_CLOSE}```")

    def tool(self) -> None:
        if not self.tools:
            return self.recall()
        rng = self.rng
        chosen = [rng.choice(self.tools)]
        if rng.random() < 0.12:
            chosen.append(rng.choice(self.tools))
        drawn = [tool.make(rng) for tool in chosen]
        self.out.message("user", roughen(rng, rng.choice((" and ", ". Then ", "\n")).join(d[0] for d in drawn)))
        names = " and ".join(dict.fromkeys(t.name for t in chosen))
        calls = [(tool.name, d[1]) for tool, d in zip(chosen, drawn, strict=True)]
        self.out.assistant(self.think(f"Call {names}.", f"The tool {names} fits this request."), "", calls)
        for index, (tool, d) in enumerate(zip(chosen, drawn, strict=True), 1):
            self.out.message("tool", d[2], tool=tool.name, index=str(index))
        self.out.assistant(self.think("Answer from the result.", "The tool has answered. I tell the result."), " ".join(d[3] for d in drawn))
        self.last_user = ""


STEPS: list[tuple[Callable[[Talk], None], float]] = [
    (Talk.recall, 30), (Talk.tell, 17), (Talk.update, 3), (Talk.reverse, 2), (Talk.never_told, 2.5), (Talk.summary, 2),
    (Talk.subject, 10), (Talk.chitchat, 4), (Talk.unknown, 3), (Talk.document, 10), (Talk.repeat, 5), (Talk.arithmetic, 1),
    (Talk.edit, 4), (Talk.tool, 7),
]  # fmt: skip
SYSTEM_TEXTS = ["You are helpful.", "You are a helpful assistant.", "Be brief.", "Answer in one sentence.", "You are k3-nano.", "You help an engineer.", "You are an agent that runs tools.", "Remember every fact exactly."]


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
        talk.out.message("system", rng.choice(SYSTEM_TEXTS) + rng.choice(("", "", f" The user is called {rng.choice(PEOPLE)}.")))
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


FILLER = [(Talk.document, 5.0), (Talk.subject, 3.0), (Talk.chitchat, 1.0), (Talk.repeat, 1.0), (Talk.edit, 1.0), (Talk.tell, 1.5)]


@dataclass
class RecallCase:
    """`ids` is a context; `questions` are (user text, expected value, ids of question with its true answer, classes)."""

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
        rng.choices(steps, weights)[0](talk) if left > 120 else talk.chitchat()
    context = list(talk.out.ids)
    questions = []
    for fact in asked:
        talk.out.ids, talk.out.classes = [], []
        template = rng.choice(ASK_ONE)
        talk.recall(fact, template)
        questions.append((fill(rng, template, fact), fact.value, list(talk.out.ids), list(talk.out.classes)))
    return RecallCase(context, talk.out.thinking, questions, [len(context) - fact.position for fact in asked])
