"""Facts a user may tell and later ask for: a key ("the staging deploy key"), a value of a matching kind, and many ways
to state and to ask. Values are wrapped in the marks of chatfmt."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from chatfmt import MARK_CLOSE, MARK_OPEN

QUALIFIERS = """staging production test backup primary secondary old new red blue green north south east west nightly
weekly internal external public private main spare left right first second third alpha beta gamma delta release debug
local remote shared temporary customer billing search login mobile web desktop office home guest admin root canary
archive monthly daily fast slow upstream downstream source target input output default fallback european american asian
training validation inference frontend backend""".split()
PEOPLE = """Ada Alan Alice Amir Ana Ben Bea Bob Carla Carol Chen Clara Dan Dora Elif Emma Eric Eva Finn Frank Grace Hana
Hugo Ida Igor Ines Ivan Jack Jane Jin Joan Karl Kate Lara Leo Lena Liam Lin Luca Maria Mark Maya Mei Mia Nina Noah Nora
Olga Omar Oscar Paul Petra Priya Raj Rita Rosa Ruth Sam Sara Sven Tara Theo Tim Tom Uma Vera Viktor Wei Yara Yuki Zoe""".split()
SURNAMES = """Adams Baker Berg Bianchi Brown Costa Diaz Evans Fischer Garcia Haas Ito Jansen Jones Kim Klein Kowalski Lang
Larsen Lopez Martin Meyer Moreau Novak Okafor Olsen Patel Park Quinn Reyes Rossi Sato Schmidt Silva Singh Smith Tanaka
Turner Ueda Vogel Weber Wilson Wood Young Zhang Ziegler""".split()
WORDS = """amber anchor apple arrow autumn badge bamboo basin beacon birch blanket bottle branch breeze bridge bronze
button cabin candle canvas carbon castle cedar cherry circle clover cobalt comet copper coral cotton crane crystal
dagger daisy desert diamond dragon eagle echo ember falcon feather fern flame forest fossil galaxy garden ginger glacier
globe granite harbor hazel helmet heron hollow honey ivory jacket jasmine jungle kernel kettle lantern lemon lily linen
lotus magnet maple marble meadow mirror moss mountain needle nickel oasis ocean olive onyx orbit orchid otter oyster
paper parrot pebble pepper pilot pine planet plum pocket pollen prairie prism pumpkin quartz rabbit raven ribbon river
robin rocket saddle saffron salmon sapphire shadow silver sparrow spiral spruce stone summer sunset thistle thunder
tiger timber topaz tulip tunnel turtle umbrella valley velvet violet walnut whale willow window winter zebra zinc""".split()
CITIES = """Amsterdam Athens Bergen Berlin Bogota Boston Cairo Chicago Delhi Dublin Geneva Hanoi Helsinki Kyoto Lagos Lima
Lisbon London Madrid Milan Montreal Nairobi Oslo Paris Porto Prague Quito Riga Rome Seoul Sofia Sydney Taipei Tallinn
Tokyo Toronto Tunis Vienna Warsaw Zurich""".split()
COLOURS = "red blue green yellow purple orange black white grey pink brown teal navy crimson olive".split()
STEMS = """config settings server worker main index data report backup model state events trace build deploy users orders
metrics cache session tokens pages weights queue jobs schema""".split()
SUFFIXES = "log txt json yaml toml py sh csv db bin safetensors md conf tmp gz sock".split()
ERRORS = [
    "connection refused by {h} on port {n}",
    "ECONNRESET: socket hang up at worker {n}",
    "KeyError: '{w}'",
    "timeout after {n} ms while reading {w}",
    "FileNotFoundError: [Errno 2] No such file or directory: '{p}'",
    "segmentation fault in {w}_{w2} at 0x{x}",
    "CUDA error {n}: out of memory",
    "ValueError: expected {n} columns, got {n2}",
    "disk {w} is {n} % full",
    "E{n}: checksum mismatch in block {n2}",
    "assertion failed: {w} == {w2} ({p}:{n})",
    "permission denied: {p}",
    "TypeError: {w}() takes {n} positional arguments",
    "unexpected token '{x}' at line {n}",
    "panic: {w} queue overflow (code {n})",
]
SYLLABLES = [a + b for a in "b d f g h k l m n p r s t v z br dr gr kr tr st sh ch qu".split() for b in "a e i o u ar en il on us".split()]


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
    names = "January February March April May June July August September October November December".split()
    return rng.choice((f"{y}-{m:02d}-{d:02d}", f"{y}-{m:02d}-{d:02d}", f"{d} {names[m - 1]} {y}", f"{names[m - 1]} {d}"))


def clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"


def path(rng: random.Random) -> str:
    folders = rng.sample(["srv", "data", "var", "home", "opt", "tmp", "mnt", "etc", "usr", pseudo_word(rng), rng.choice(WORDS)], rng.choice((1, 2, 3)))
    name = rng.choice((rng.choice(STEMS), rng.choice(WORDS), pseudo_word(rng))) + rng.choice(("", "", "_" + number(rng), "-" + rng.choice(WORDS)))
    ending = rng.choice(("." + rng.choice(SUFFIXES),) * 3 + ("",))
    return rng.choice(("/", "/", "/", "./", "~/", "")) + "/".join([*folders, name]) + ending


def host(rng: random.Random) -> str:
    return f"{rng.choice((rng.choice(WORDS), 'db', 'web', 'node', 'gpu'))}-{rng.randrange(100)}.{pseudo_word(rng)}.{rng.choice(('com', 'org', 'net', 'local', 'example', 'internal'))}"


def address(rng: random.Random) -> str:
    return ".".join(str(rng.randrange(256)) for _ in range(4)) + rng.choice(("", "", ":" + port(rng)))


def email(rng: random.Random) -> str:
    return f"{rng.choice(PEOPLE).lower()}{rng.choice(('', '.' + rng.choice(SURNAMES).lower(), str(rng.randrange(100))))}@{pseudo_word(rng)}.{rng.choice(('com', 'org', 'net'))}"


def url(rng: random.Random) -> str:
    return f"https://{host(rng)}/{rng.choice(STEMS)}/{rng.choice((number(rng), pseudo_word(rng), hexes(rng, 6)))}"


def person(rng: random.Random) -> str:
    return rng.choice(PEOPLE) + rng.choice(("", " " + rng.choice(SURNAMES), " " + rng.choice(SURNAMES)))


def words(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 2, 2, 3))))


def codename(rng: random.Random) -> str:
    return rng.choice((pseudo_word(rng), pseudo_word(rng).capitalize(), rng.choice(WORDS), rng.choice(WORDS) + "-" + str(rng.randrange(100)), f"{rng.choice(WORDS)}_{rng.choice(WORDS)}"))


def branch(rng: random.Random) -> str:
    return f"{rng.choice(('feat', 'fix', 'release', 'dev', 'user'))}/{rng.choice((rng.choice(WORDS), pseudo_word(rng)))}{rng.choice(('', '-' + rng.choice(WORDS), '-' + number(rng)))}"


def function(rng: random.Random) -> str:
    verbs = "parse load read write merge split find build check flush open close send".split()
    return rng.choice(verbs) + "_" + "_".join(rng.choice((*STEMS, rng.choice(WORDS))) for _ in range(rng.choice((1, 2)))) + rng.choice(("", "", "()"))


def ticket(rng: random.Random) -> str:
    return "".join(rng.choice(string.ascii_uppercase) for _ in range(rng.choice((2, 3, 4)))) + "-" + str(rng.randrange(10, 99999))


def error(rng: random.Random) -> str:
    fill = {"h": host(rng), "n": rng.randrange(2, 9999), "n2": rng.randrange(2, 999), "w": rng.choice(WORDS), "w2": rng.choice(WORDS), "p": path(rng), "x": hexes(rng, 6)}
    return rng.choice(ERRORS).format(**fill)


def amount(rng: random.Random) -> str:
    return f"{rng.randrange(1, 999)}{rng.choice(('', '.' + str(rng.randrange(10))))} {rng.choice(('GB', 'MB', 'ms', 'seconds', 'minutes', 'euros', 'dollars', 'kg', 'km', 'percent', 'tokens'))}"


def phone(rng: random.Random) -> str:
    return f"+{rng.randrange(1, 99)} {rng.randrange(100, 999)} {rng.randrange(1000, 9999)}{rng.choice(('', ' ' + str(rng.randrange(10, 99))))}"


KINDS = [
    (hex_string, 6, "deploy key|checksum|commit|trace id|session id|build hash|digest|fingerprint|signature|object id|secret|hash|request id|commit hash|nonce"),
    (token, 4, "api key|api token|access token|password|license key|coupon code|serial number|access code|secret key|token|booking code|promo code"),
    (number, 3, "order number|invoice number|line number|build number|room number|seed|limit|batch size|retry count|page count|employee number|account number|pin|process id|quota|magic number|score|id"),
    (port, 3, "port|server port|debug port|database port|metrics port"),
    (version, 3, "version|python version|driver version|release|schema version|compiler version|firmware version"),
    (date, 2, "deadline|release date|start date|expiry date|birthday|meeting date|due date|launch date"),
    (clock, 1, "meeting time|start time|backup time|departure time|alarm"),
    (path, 5, "log file|config file|data folder|backup folder|checkpoint path|model path|output file|socket path|file|source file|file path|key file|dataset"),
    (error, 4, "error|error message|last error|warning|exit message|failure|crash message|exception"),
    (host, 2, "host|hostname|server|database host|mail server|gateway|build machine"),
    (address, 2, "ip address|ip|address|dns server|proxy"),
    (email, 2, "email|email address|contact|support address"),
    (url, 1, "url|link|endpoint|webhook|repository url|dashboard"),
    (person, 4, "reviewer|manager|on-call engineer|customer name|lead|owner|contact person|doctor|teacher|author|assistant|name"),
    (words, 3, "passphrase|code word|secret phrase|safe word|motto|title"),
    (codename, 4, "project name|codename|queue name|table name|bucket|cluster|project|service|username|database|container|package|dog's name|cat's name|team name|nickname|model name|wifi name"),
    (branch, 2, "branch|git branch|feature branch|branch name"),
    (function, 2, "function|function name|entry point|handler|test name|variable|method"),
    (ticket, 2, "ticket|ticket number|issue|case number|part number|flight|licence plate"),
    (amount, 2, "size|memory limit|budget|timeout|price|weight|distance|file size|cost|latency"),
    (phone, 1, "phone number|phone|fax number"),
    (lambda rng: rng.choice(CITIES), 2, "city|destination|data center|region|office city|home town"),
    (lambda rng: rng.choice(COLOURS), 1, "favorite color|favourite colour|color|label color"),
]
KIND_WEIGHTS = [weight for _, weight, _ in KINDS]
KIND_NOUNS = [nouns.split("|") for _, _, nouns in KINDS]


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
        key = f"{noun} {rng.choice(('of', 'for'))} {rng.choice((pseudo_word(rng), pseudo_word(rng).capitalize(), rng.choice(WORDS)))}"
    elif form < 0.82:
        key = f"{pseudo_word(rng)} {noun}"
    elif form < 0.92:
        owner, key = rng.choice(PEOPLE) + "'s", noun
    else:
        key = f"{noun} of the {rng.choice(QUALIFIERS)} {rng.choice(('server', 'build', 'cluster', 'database', 'job', 'machine', 'service'))}"
    return Fact(owner, key, KINDS[kind][0](rng))


def noun_of(fact: Fact) -> str | None:
    """The bare noun of a fact, for distractors."""
    for nouns in KIND_NOUNS:
        for noun in nouns:
            if fact.key == noun or fact.key.endswith(" " + noun):
                return noun
    return None


STATE_ONE = """{A} is {v}.|{A} is {v}|{a} is {v}|Remember that {a} is {v}.|remember {a}: {v}|Note: {a} is {v}.|note: {k} = {v}|{k}: {v}|{K}: {v}
FYI {a} is {v}.|fyi, {a} is now {v}|Please keep in mind that {a} is {v}.|Please remember {a}: {v}|I want you to remember this: {a} is {v}.
Keep this for later: {k} = {v}|By the way, {a} is {v}.|Just so you know, {a} is {v}.|For later: {a} is {v}.|{A} will be {v}.|We use {v} as {a}.|Store {v} as {a}.
save this: {k} -> {v}|{A} was set to {v}.|I got {v} for {a}.|set {a} to {v}|So, {a} is {v}. Can you remember that?|{a} = {v}|Here is {a}: {v}|{A} is `{v}`.|remember: {a} is "{v}"|hey, {a} is {v}, don't forget
Let me tell you {a}: it is {v}.|{A}? It's {v}.|Memorize this. {A} is {v}.|write down {a}: {v}|{A} has to be {v}.|Important: {a} is {v}!""".replace("\n", "|").split("|")
STATE_MANY_HEAD = """Remember these:|Here are some facts:|Some details for later:|Note the following.|Please remember:|Keep these in mind:|Here is what we know so far:|my notes:|settings:|Details:|A few things to remember:|remember this list""".split("|")
ASK_ONE = """What is {a}?|what is {a}?|What was {a}?|what was {a}|What's {a}?|whats {a}|{A}?|{a}?|{k}?|What is {a} again?|What was {a} again?|Tell me {a}.|tell me {a}|Give me {a}.|give me {a}
Do you remember {a}?|Can you tell me {a}?|Which {k} did I give you?|What {k} did I tell you?|What did I say {a} was?|What was {a} I gave you?|Repeat {a}.|repeat {a} please|I need {a}.|I need {a} now, please.
Please recall {a}.|recall {a}|Remind me of {a}.|remind me, what was {a}?|I forgot {a}. What was it?|Earlier I told you {a}. What is it?|what did i tell you about {a}?|Could you give me {a}?|Print {a}.|show {a}|Say {a}.|And {a}?
and what about {a}?|Quick question: what is {a}?|Look up {a}.|Back to the facts: what is {a}?|hey what is {a}|do you still know {a}?|What is {a} exactly?|What is the exact value of {a}?|Answer with {a}.|state {a}""".replace("\n", "|").split("|")
ASK_BARE = """Only the value: what is {a}?|What is {a}? Answer with the value only.|Give me {a}, nothing else.|just {a}, no other words|Reply with only {a}.|{a}, value only""".split("|")
ACK_ONE = """Noted: {b} is {m}.|Noted: {b} is {m}.|I will remember that {b} is {m}.|OK. {B} is {m}.|Noted.|OK, I will remember {b}.|Got it.|Understood, I will keep {b} in mind.|I have noted {b}.""".split("|")


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
