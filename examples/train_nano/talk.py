"""One conversation under construction: facts are told, changed, asked for, listed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from chatfmt import MARK_CLOSE, MARK_OPEN, Writer
from facts import ACK_ONE, ASK_BARE, ASK_ONE, STATE_ONE, Fact, fill, new_fact, noun_of, roughen, state_many
from library import Library
from toolcalls import ToolKind
from vocab import Vocab


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
            if (
                fact.asked.lower() not in known
                and f"the {fact.key}".lower() not in known
                and f"my {fact.key}".lower() not in known
            ):
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
        answer = rng.choice(
            ("Noted.", f"Noted: {listed}.", f"OK, I will remember {len(facts)} facts.", f"I have noted {listed}.")
        )
        self.turn(
            roughen(rng, state_many(rng, facts)),
            self.think("New facts.", f"The user tells {len(facts)} facts. I keep them."),
            answer,
        )

    def update(self) -> None:
        if not self.facts:
            self.tell()
            return
        rng = self.rng
        fact = rng.choice(self.facts)
        noun = noun_of(fact)
        fact.value = new_fact(rng, noun).value
        fact.position = len(self.out)
        user = rng.choice(
            (
                "{A} has changed: it is now {v}.",
                "update: {a} is now {v}",
                "Correction: {a} is {v}.",
                "{A} changed to {v}.",
                "Sorry, {a} is {v}.",
                "From now on {a} is {v}.",
                "change {a} to {v}",
            )
        )
        answer = rng.choice(("Noted: {b} is now {m}.", "Updated: {b} is now {m}.", "OK, {b} is now {m}."))
        self.turn(
            roughen(rng, fill(rng, user, fact)),
            self.think("A new value.", f"{fact.answered.capitalize()} has a new value."),
            fill(rng, answer, fact),
        )

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
            self.tell()
            return
        rng = self.rng
        if fact is None and rng.random() < 0.12 and len(self.facts) > 2:
            self.recall_several()
            return
        given = fact is not None
        fact = fact or self.pick()
        bare = template is None and rng.random() < 0.08
        template = template or rng.choice(ASK_BARE if bare else ASK_ONE)
        user = fill(rng, template, fact)
        if not given:
            user = roughen(rng, user)
        answer = fact.marked if bare else fill(rng, "{B} is {m}.", fact)
        think = self.think(
            f"Recall {fact.answered}.",
            f"The user told me {fact.answered}: {fact.marked}."
            if self.effort == "max"
            else f"The user asks for {fact.answered}. I recall it.",
        )
        self.turn(user, think, answer)

    def recall_several(self) -> None:
        rng = self.rng
        facts = rng.sample(self.facts, rng.choice((2, 2, 3)) if len(self.facts) > 3 else 2)
        names = [f.asked for f in facts]
        listed = ", ".join(names[:-1]) + " and " + names[-1]
        user = rng.choice(
            ("What are {}?", "Give me {}.", "tell me {}", "I need {}.", "what were {}?", "Repeat {} please.")
        )
        answer = " ".join(fill(rng, "{B} is {m}.", f) for f in facts)
        self.turn(
            roughen(rng, user.format(listed)),
            self.think("Recall them.", f"The user asks for {len(facts)} facts. I recall them."),
            answer,
        )

    def reverse(self) -> None:
        """From the value back to the name."""
        unique = [f for f in self.facts if len(f.value) > 4]
        if not unique:
            self.tell()
            return
        fact = self.rng.choice(unique)
        user = self.rng.choice(
            ("What is {v}?", "what was {v} again?", "Which fact is {v}?", "do you know what {v} is?")
        )
        self.turn(
            fill(self.rng, user, fact),
            self.think("Find the value.", "The user asks what this value is."),
            fill(self.rng, "That is {b}.", fact),
        )

    def never_told(self) -> None:
        fact = self.fresh_fact()
        user = roughen(self.rng, fill(self.rng, self.rng.choice(ASK_ONE[:24]), fact))
        self.turn(
            user,
            self.think("I was not told.", f"I look for {fact.answered}, but it was not told."),
            f"You have not told me {fact.answered}.",
        )

    def summary(self) -> None:
        if not 1 <= len(self.facts) <= 5:
            self.recall()
            return
        user = self.rng.choice(
            (
                "What did I tell you so far?",
                "Summarize what you know.",
                "summarise the facts",
                "list everything I told you",
                "What do you remember?",
                "repeat all facts",
            )
        )
        answer = "You told me:\n" + "\n".join(f"- {f.answered}: {f.marked}" for f in self.facts)
        self.turn(
            user, self.think("List the facts.", f"The user told {len(self.facts)} facts so far. I list them."), answer
        )
