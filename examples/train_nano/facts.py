"""Facts a user may tell and later ask for: a key ("the staging deploy key"), a value of a matching kind, and many ways
to state and to ask. Values are wrapped in the marks of chatfmt."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from chatfmt import MARK_CLOSE, MARK_OPEN
from lists import load_lists

LISTS = load_lists("phrases.txt")
QUALIFIERS, PEOPLE, SURNAMES, WORDS = (LISTS[n] for n in ("QUALIFIERS", "PEOPLE", "SURNAMES", "WORDS"))
CITIES, COLOURS, STEMS, SUFFIXES = (LISTS[n] for n in ("CITIES", "COLOURS", "STEMS", "SUFFIXES"))
ERRORS = LISTS["ERRORS"]  # messages with places for names and numbers
STATE_ONE, STATE_MANY_HEAD = LISTS["STATE_ONE"], LISTS["STATE_MANY_HEAD"]
ASK_ONE, ASK_BARE, ACK_ONE = LISTS["ASK_ONE"], LISTS["ASK_BARE"], LISTS["ACK_ONE"]
SYLLABLES = [onset + rime for onset in LISTS["ONSETS"] for rime in LISTS["RIMES"]]


def pseudo_word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3))))


def hexes(rng: random.Random, n: int) -> str:
    return f"{rng.getrandbits(4 * n):0{n}x}"


def hex_string(rng: random.Random) -> str:
    form = rng.random()
    if form < 0.55:
        return hexes(rng, rng.choice((6, 7, 8, 8, 10, 12, 16)))
    if form < 0.65:
        return hexes(rng, rng.choice((20, 24, 32, 40)))
    if form < 0.75:
        return "sha256:" + hexes(rng, rng.choice((8, 12, 16, 24)))
    if form < 0.85:
        return "0x" + hexes(rng, rng.choice((4, 6, 8)))
    if form < 0.92:
        return hexes(rng, 8).upper()
    return "-".join(hexes(rng, n) for n in rng.choice(((8, 4, 4), (4, 4, 4), (8, 4, 4, 4, 12), (4, 4))))


def token(rng: random.Random) -> str:
    letters = string.ascii_letters + string.digits if rng.random() < 0.6 else string.ascii_uppercase + string.digits
    body = "".join(rng.choice(letters) for _ in range(rng.choice((6, 8, 8, 10, 12, 16, 20))))
    return rng.choice(("", "", "ghp_", "sk-", "tok_", "key-", "AK", "id_")) + body


def number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** rng.choice((1, 2, 3, 4, 4, 5, 6, 8))))


def port(rng: random.Random) -> str:
    return str(rng.choice((rng.randrange(1024, 65536), 8000 + rng.randrange(1000))))


def version(rng: random.Random) -> str:
    text = ".".join(str(rng.randrange(rng.choice((10, 30)))) for _ in range(rng.choice((2, 3, 3))))
    return rng.choice(("", "", "", "v")) + text + rng.choice(("", "", "", "-rc1", "-beta", "+cu130"))


def date(rng: random.Random) -> str:
    y, m, d = rng.randrange(2015, 2035), rng.randrange(1, 13), rng.randrange(1, 29)
    names = LISTS["MONTHS"]
    return rng.choice(
        (f"{y}-{m:02d}-{d:02d}", f"{y}-{m:02d}-{d:02d}", f"{d} {names[m - 1]} {y}", f"{names[m - 1]} {d}")
    )


def clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


def path(rng: random.Random) -> str:
    folders = rng.sample(
        ["srv", "data", "var", "home", "opt", "tmp", "mnt", "etc", "usr", pseudo_word(rng), rng.choice(WORDS)],
        rng.choice((1, 2, 3)),
    )
    name = rng.choice((rng.choice(STEMS), rng.choice(WORDS), pseudo_word(rng))) + rng.choice(
        ("", "", "_" + number(rng), "-" + rng.choice(WORDS))
    )
    ending = rng.choice(("." + rng.choice(SUFFIXES),) * 3 + ("",))
    return rng.choice(("/", "/", "/", "./", "~/", "")) + "/".join([*folders, name]) + ending


def host(rng: random.Random) -> str:
    machine = f"{rng.choice((rng.choice(WORDS), 'db', 'web', 'node', 'gpu'))}-{rng.randrange(100)}"
    return f"{machine}.{pseudo_word(rng)}.{rng.choice(('com', 'org', 'net', 'local', 'example', 'internal'))}"


def address(rng: random.Random) -> str:
    return ".".join(str(rng.randrange(256)) for _ in range(4)) + rng.choice(("", "", ":" + port(rng)))


def email(rng: random.Random) -> str:
    first = rng.choice(PEOPLE).lower()
    rest = rng.choice(("", "." + rng.choice(SURNAMES).lower(), str(rng.randrange(100))))
    return f"{first}{rest}@{pseudo_word(rng)}.{rng.choice(('com', 'org', 'net'))}"


def url(rng: random.Random) -> str:
    return f"https://{host(rng)}/{rng.choice(STEMS)}/{rng.choice((number(rng), pseudo_word(rng), hexes(rng, 6)))}"


def person(rng: random.Random) -> str:
    return rng.choice(PEOPLE) + rng.choice(("", " " + rng.choice(SURNAMES), " " + rng.choice(SURNAMES)))


def words(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 2, 2, 3))))


def codename(rng: random.Random) -> str:
    return rng.choice(
        (
            pseudo_word(rng),
            pseudo_word(rng).capitalize(),
            rng.choice(WORDS),
            rng.choice(WORDS) + "-" + str(rng.randrange(100)),
            f"{rng.choice(WORDS)}_{rng.choice(WORDS)}",
        )
    )


def branch(rng: random.Random) -> str:
    kind = rng.choice(("feat", "fix", "release", "dev", "user"))
    topic = rng.choice((rng.choice(WORDS), pseudo_word(rng)))
    return f"{kind}/{topic}{rng.choice(('', '-' + rng.choice(WORDS), '-' + number(rng)))}"


def function(rng: random.Random) -> str:
    verbs = LISTS["VERBS"]
    return (
        rng.choice(verbs)
        + "_"
        + "_".join(rng.choice((*STEMS, rng.choice(WORDS))) for _ in range(rng.choice((1, 2))))
        + rng.choice(("", "", "()"))
    )


def ticket(rng: random.Random) -> str:
    return (
        "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.choice((2, 3, 4))))
        + "-"
        + str(rng.randrange(10, 99999))
    )


def error(rng: random.Random) -> str:
    fill = {
        "h": host(rng),
        "n": rng.randrange(2, 9999),
        "n2": rng.randrange(2, 999),
        "w": rng.choice(WORDS),
        "w2": rng.choice(WORDS),
        "p": path(rng),
        "x": hexes(rng, 6),
    }
    return rng.choice(ERRORS).format(**fill)


def amount(rng: random.Random) -> str:
    size = f"{rng.randrange(1, 999)}{rng.choice(('', '.' + str(rng.randrange(10))))}"
    return f"{size} {rng.choice(LISTS['UNITS'])}"


def phone(rng: random.Random) -> str:
    start = f"+{rng.randrange(1, 99)} {rng.randrange(100, 999)} {rng.randrange(1000, 9999)}"
    return start + rng.choice(("", " " + str(rng.randrange(10, 99))))


# What draws the values of each kind, and how often; the nouns are the lines of NOUNS, in this order.
KINDS: list[tuple[Callable[[random.Random], str], int]] = [
    (hex_string, 6),
    (token, 4),
    (number, 3),
    (port, 3),
    (version, 3),
    (date, 2),
    (clock, 1),
    (path, 5),
    (error, 4),
    (host, 2),
    (address, 2),
    (email, 2),
    (url, 1),
    (person, 4),
    (words, 3),
    (codename, 4),
    (branch, 2),
    (function, 2),
    (ticket, 2),
    (amount, 2),
    (phone, 1),
    (lambda rng: rng.choice(CITIES), 2),
    (lambda rng: rng.choice(COLOURS), 1),
]
KIND_WEIGHTS = [weight for _, weight in KINDS]
KIND_NOUNS = [nouns.split("|") for nouns in LISTS["NOUNS"]]


@dataclass
class Fact:
    """`owner` is "the" or "my"; the key reads "the staging deploy key" or "my staging deploy key"."""

    owner: str
    key: str
    value: str
    position: int = 0
    said: str = ""  # "the old value" when it was overwritten

    @property
    def asked(self) -> str:
        """How the user names it."""
        return f"{self.owner} {self.key}"

    @property
    def answered(self) -> str:
        """How the assistant names it."""
        return f"{'your' if self.owner == 'my' else 'the'} {self.key}"

    @property
    def marked(self) -> str:
        return f"{MARK_OPEN}{self.value}{MARK_CLOSE}"


def new_fact(rng: random.Random, noun: str | None = None) -> Fact:
    """A fact; with `noun` given, another fact about the same thing (a distractor)."""
    if noun is None:
        kind = rng.choices(range(len(KINDS)), KIND_WEIGHTS)[0]
        noun = rng.choice(KIND_NOUNS[kind])
    else:
        kind = next(i for i, nouns in enumerate(KIND_NOUNS) if noun in nouns)
    form = rng.random()
    owner = "my" if rng.random() < 0.25 else "the"
    if form < 0.25:
        key = noun
    elif form < 0.6:
        key = f"{rng.choice(QUALIFIERS)} {noun}"
    elif form < 0.72:
        word = rng.choice(("of", "for"))
        key = f"{noun} {word} {rng.choice((pseudo_word(rng), pseudo_word(rng).capitalize(), rng.choice(WORDS)))}"
    elif form < 0.82:
        key = f"{pseudo_word(rng)} {noun}"
    elif form < 0.92:
        owner, key = rng.choice(PEOPLE) + "'s", noun
    else:
        key = f"{noun} of the {rng.choice(QUALIFIERS)} {rng.choice(LISTS['SYSTEMS'])}"
    return Fact(owner, key, KINDS[kind][0](rng))


def noun_of(fact: Fact) -> str | None:
    """The bare noun of a fact, for distractors."""
    for nouns in KIND_NOUNS:
        for noun in nouns:
            if fact.key == noun or fact.key.endswith(" " + noun):
                return noun
    return None


def fill(rng: random.Random, template: str, fact: Fact) -> str:
    asked, answered = fact.asked, fact.answered
    upper = asked[0].upper() + asked[1:]
    return template.format(
        a=asked, A=upper, k=fact.key, K=fact.key.capitalize(), v=fact.marked,
        b=answered, B=answered[0].upper() + answered[1:], m=fact.marked,
    )  # fmt: skip


def state_many(rng: random.Random, facts: list[Fact]) -> str:
    """Several facts in one message: list, table, JSON, environment, prose."""
    form = rng.randrange(7)
    head = rng.choice(STATE_MANY_HEAD)
    if form == 0:
        return head + "\n" + "\n".join(f"- {f.asked}: {f.marked}" for f in facts)
    if form == 1:
        return head + "\n" + "\n".join(f"{i}. {f.asked} is {f.marked}" for i, f in enumerate(facts, 1))
    if form == 2:
        return head + "\n{" + ", ".join(f'"{f.asked}": "{f.marked}"' for f in facts) + "}"
    if form == 3:
        return head + "\n" + "\n".join(f"{f.asked} = {f.marked}" for f in facts)
    if form == 4:
        return " ".join(fill(rng, rng.choice(STATE_ONE[:6]), f).rstrip(".") + "." for f in facts)
    if form == 5:
        return head + "\n| name | value |\n" + "\n".join(f"| {f.asked} | {f.marked} |" for f in facts)
    return ", ".join(f"{f.asked} is {f.marked}" for f in facts[:-1]) + f" and {facts[-1].asked} is {facts[-1].marked}."


def roughen(rng: random.Random, text: str) -> str:
    """What people do to text: case, missing punctuation, a typo. Marked values stay as they are."""
    pieces = [(piece, i % 2 == 1) for i, piece in enumerate(text.replace(MARK_CLOSE, MARK_OPEN).split(MARK_OPEN))]
    dice = rng.random()
    out = []
    for piece, is_value in pieces:
        if is_value:
            piece = MARK_OPEN + piece + MARK_CLOSE
        elif dice < 0.12:
            piece = piece.lower()
        elif dice < 0.15:
            piece = piece.upper()
        elif dice < 0.2:
            piece = piece.replace("?", "").replace(".", "")
        elif dice < 0.25 and len(piece) > 12:
            at = rng.randrange(1, len(piece) - 2)
            if piece[at : at + 2].isalpha():
                piece = piece[:at] + piece[at + 1] + piece[at] + piece[at + 2 :]
        out.append(piece)
    return "".join(out)
