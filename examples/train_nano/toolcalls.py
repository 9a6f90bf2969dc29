"""Tools a user may declare, requests that fit them, results, and answers from the results."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chatfmt import MARK_CLOSE, MARK_OPEN
from facts import CITIES, LISTS, PEOPLE, STEMS, WORDS, codename, email, hexes, host, path, pseudo_word, ticket

Arguments = dict[str, Any]


@dataclass(frozen=True)
class ToolKind:
    """`make` draws (request, arguments, result text, answer); values in the answer may be marked."""

    name: str
    description: str
    parameters: dict[str, str]  # name -> JSON type
    make: Callable[[random.Random], tuple[str, Arguments, str, str]]

    def schema(self) -> dict[str, Any]:
        properties = {key: {"type": kind} for key, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def m(value: object) -> str:
    return f"{MARK_OPEN}{value}{MARK_CLOSE}"


def weather(rng: random.Random) -> tuple[str, Arguments, str, str]:
    city, days = rng.choice(CITIES), rng.randrange(1, 10)
    degrees, sky = rng.randrange(-10, 38), rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy"))
    request = rng.choice(
        (
            "Weather in {} for {} days?",
            "What is the weather in {} for {} days?",
            "weather forecast {} next {} days",
            "How will the weather be in {} over {} days?",
        )
    )
    return (
        request.format(city, days),
        {"city": city, "days": days},
        json.dumps({"t": degrees, "sky": sky}),
        f"It is {m(degrees)} degrees and {m(sky)} in {m(city)}.",
    )


def shell(rng: random.Random) -> tuple[str, Arguments, str, str]:
    name, word = path(rng), rng.choice(WORDS)
    request, command = rng.choice(
        (
            (f"List the files in {m(name)}", f"ls {name}"),
            (f"run ls in {m(name)}", f"ls {name}"),
            (f"Show me {m(name)}", f"cat {name}"),
            (f"How many lines does {m(name)} have?", f"wc -l {name}"),
            (f"Search for {m(word)} in {m(name)}", f"grep -rn {word} {name}"),
            (f"Delete the file {m(name)}", f"rm {name}"),
            (f"Make the folder {m(name)}", f"mkdir -p {name}"),
            ("Which git branch is this?", "git branch --show-current"),
            ("Show the git status", "git status"),
            ("How much disk space is free?", "df -h"),
            ("run the tests", "make test"),
            (f"run the command `{m('ls -la ' + word)}`", "ls -la " + word),
        )
    )
    out = rng.choice(
        (
            "\n".join(rng.sample(STEMS, 3)),
            f"{rng.randrange(1, 999)} {name}",
            f"{rng.choice(STEMS)}.py:{rng.randrange(1, 400)}: {word}",
            f"ok {rng.randrange(10, 99)} passed",
        )
    )
    return request, {"command": command}, out, f"The output is:\n{m(out)}"


def read_file(rng: random.Random) -> tuple[str, Arguments, str, str]:
    name, word = path(rng), f"{rng.choice(STEMS)} = {codename(rng)}"
    request = rng.choice(
        (
            "Read {}",
            "read the file {}",
            "What is in {}?",
            "Open {} and tell me what it says.",
            "show me the content of {}",
            "look into {}",
        )
    )
    return request.format(m(name)), {"path": name}, word, f"The file says: {m(word)}"


def write_file(rng: random.Random) -> tuple[str, Arguments, str, str]:
    name, text = path(rng), " ".join(rng.sample(WORDS, rng.randrange(1, 5)))
    request = rng.choice(
        (
            "Write {1} to {0}",
            "write '{1}' into the file {0}",
            "Create {0} with the text {1}",
            "Save the text {1} in {0}",
        )
    )
    return request.format(m(name), m(text)), {"path": name, "text": text}, "ok", f"I wrote it to {m(name)}."


def add(rng: random.Random) -> tuple[str, Arguments, str, str]:
    a, b = rng.randrange(10000), rng.randrange(10000)
    request = rng.choice(("Add {} and {}", "What is {} + {}?", "{} plus {}", "compute {} + {}", "sum of {} and {}"))
    return request.format(m(a), m(b)), {"a": a, "b": b}, str(a + b), f"The result is {m(a + b)}."


def now(rng: random.Random) -> tuple[str, Arguments, str, str]:
    time = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    return (
        rng.choice(("What time is it?", "what's the time", "Tell me the time.", "current time?")),
        {},
        json.dumps({"time": time}),
        f"It is {m(time)}.",
    )


def send_mail(rng: random.Random) -> tuple[str, Arguments, str, str]:
    to, text = email(rng), " ".join(rng.sample(WORDS, rng.randrange(2, 5)))
    request = rng.choice(
        (
            "Send {1} to {0}",
            "mail {0}: {1}",
            "Write an email to {0} that says {1}",
            "please email {0} with the text {1}",
        )
    )
    return request.format(m(to), m(text)), {"to": to, "text": text}, '{"sent":true}', f"I sent it to {m(to)}."


def synthetic(rng: random.Random) -> ToolKind:
    """A tool made up on the spot, so that the declaration has to be read."""
    noun = rng.choice((rng.choice(LISTS["TOOL_NOUNS"]), pseudo_word(rng)))
    verb = rng.choice(LISTS["TOOL_VERBS"])
    key, kind = rng.choice(
        (("id", "string"), (f"{noun}_id", "string"), ("name", "string"), ("number", "integer"), (noun, "string"))
    )
    field = rng.choice(LISTS["TOOL_FIELDS"])
    extra = rng.choice(
        (None, None, ("force", "boolean"), ("count", "integer"), ("reason", "string"), ("limit", "number"))
    )
    parameters = {key: kind} | ({extra[0]: extra[1]} if extra else {})

    def make(r: random.Random) -> tuple[str, Arguments, str, str]:
        value: Any = (
            r.randrange(1, 99999)
            if kind == "integer"
            else r.choice((ticket(r), hexes(r, 6), codename(r), r.choice(PEOPLE), host(r)))
        )
        arguments: Arguments = {key: value}
        request = r.choice(
            (
                "{v} {n} {x}",
                "{v} the {n} {x}",
                "Please {v} {n} {x}",
                "can you {v} the {n} {x}?",
                "I want to {v} the {n} {x}",
                "{v} {n}: {x}",
            )
        )
        text = request.format(v=verb, n=noun, x=m(value))
        if extra:
            second: Any = {
                "boolean": r.random() < 0.5,
                "integer": r.randrange(1, 50),
                "number": r.randrange(1, 500) / 10,
                "string": r.choice(WORDS),
            }[extra[1]]
            arguments[extra[0]] = second
            text = text.rstrip("?") + r.choice((" with {} {}", ", {} {}", " ({}: {})", " and set {} to {}")).format(
                extra[0], m(json.dumps(second) if not isinstance(second, str) else second)
            )
        answer = r.choice(
            (
                codename(r),
                str(r.randrange(1000)),
                r.choice(("ready", "done", "running", "failed", "shipped", "open", "closed")),
            )
        )
        return text, arguments, json.dumps({field: answer}), f"The {field} of {noun} {m(value)} is {m(answer)}."

    name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}"))
    description = rng.choice(
        (
            f"{verb.capitalize()} a {noun}.",
            f"{verb.capitalize()} the {noun} with the given {key}.",
            f"{verb.capitalize()} one {noun} and return its {field}.",
        )
    )
    return ToolKind(name, description, parameters, make)


FIXED = [
    ToolKind("get_weather", "Get weather.", {"city": "string", "days": "integer"}, weather),
    ToolKind("run_command", "Run a shell command and return its output.", {"command": "string"}, shell),
    ToolKind("shell", "Run a command in bash.", {"command": "string"}, shell),
    ToolKind("bash", "Run a bash command.", {"command": "string"}, shell),
    ToolKind("read_file", "Read a file.", {"path": "string"}, read_file),
    ToolKind("read_file", "Return the text of a file.", {"path": "string"}, read_file),
    ToolKind("write_file", "Write text to a file.", {"path": "string", "text": "string"}, write_file),
    ToolKind("add", "Add two numbers.", {"a": "number", "b": "number"}, add),
    ToolKind("get_time", "Get the current time.", {}, now),
    ToolKind("send_email", "Send an email.", {"to": "string", "text": "string"}, send_mail),
]


def draw_tools(rng: random.Random) -> list[ToolKind]:
    """One to four different tools."""
    tools: dict[str, ToolKind] = {}
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        tool = rng.choice(FIXED) if rng.random() < 0.5 else synthetic(rng)
        if tool.make not in [t.make for t in tools.values()]:
            tools.setdefault(tool.name, tool)
    return list(tools.values())
