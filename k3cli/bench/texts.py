"""Messages of the conversations that drafters are compared on.

edit: code that is renamed name by name, each message with the code as it stands, as an agent's edits go. prose:
questions about k3, whose answers share little. code: edits of code that was not seen before. noise: 400 tokens at
temperature 5, in which nothing repeats: what drafts cost where they can't help.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def edits(code: str, renames: Sequence[tuple[str, str]]) -> list[str]:
    """One message for each rename, with the code as the renames before it left it."""
    messages = []
    for old, new in renames:
        messages.append(f"Rename {old} to {new}:\n```\n{code}```")
        code = code.replace(old, new)
    return messages


TEXTS: Mapping[str, Sequence[str]] = {
    "edit": [
        *edits(
            "with open(path) as handle:\n    data = handle.read()\n    store(data)\n",
            [
                ("handle", "file"),
                ("data", "text"),
                ("store", "save"),
                ("text", "body"),
                ("file", "log"),
                ("save", "send"),
            ],
        ),
        *edits(
            "for item in queue:\n    if item == limit:\n        print(item)\n    found.append(item)\n",
            [("item", "node"), ("queue", "stack"), ("limit", "bound"), ("found", "seen"), ("stack", "heap")],
        ),
    ],
    "prose": [
        "How does k3 keep sessions?",
        "What is a turn?",
        "What happens when the disk is full?",
        "How do I fork a session?",
        "What does k3 doctor show?",
        "Why is a checkpoint thinned?",
        "Who are you?",
        "What is the exit code for a locked session?",
    ],
    "code": [
        "Rename total to amount:\n```\ndef report(total, rate):\n    fee = total + rate\n    return fee\n```",
        "Change host to name here:\n```\nclass Server:\n    def __init__(self, host):\n        self.host = host\n```",
        'In this code, lamp should be river:\n```\nimport lamp\n\nstone = lamp.load("oak")\nprint(stone)\n```',
        "replace copper by silver in this code:\n```\ncopper:\n  size: 1\n  bright: true\n```",
    ],
    "noise": ["Hello"],
}
