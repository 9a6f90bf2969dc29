"""Text to token ids and back: the ranks of `tiktoken.model`, the split pattern, the specials, and a streaming decoder.

Text never becomes a special id here: `encode_text` treats every name of a special token as ordinary text, and markers
are placed by id (`special`). Source: facts of the public format, sections 1.2 to 1.5 of the chat-format notes.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tiktoken

from k3cli.chat.specials import MOST_DIGITS, Family, Specials, read_specials
from k3cli.errors import ModelError, UsageError
from k3cli.model_files import read_file

RANKS_FILE = "tiktoken.model"
MAX_CHARS = 400_000
"""Characters of text that are encoded as one piece."""
MAX_RUN = 25_000
"""Longest run of white space, or of other characters, inside a piece."""
PATTERN_VERSION = "1"
"""Goes into the digest; raised when the pattern or the cutting of long text changes."""

_CASED = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]*[\p{{Ll}}{_CASED}]+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]+[\p{{Ll}}{_CASED}]*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Words before byte-pair merging, first alternative that matches; syntax of the Rust engine inside tiktoken."""

_RUNS = re.compile(r"\s+|\S+")


class Tokenizer:
    """A byte-level BPE vocabulary with 256 specials on top. Immutable and safe to share between threads."""

    def __init__(self, ranks: Sequence[bytes], specials: Specials) -> None:
        """`ranks[i]` are the bytes of token i, every single byte among them (`from_dir` checks files)."""
        self.n_ranks = len(ranks)
        self.family: Family = specials.family
        self.family_reason = specials.reason
        self.special_names = dict(specials.names)
        self.n_vocab = self.n_ranks + len(specials.names)
        self.digest = _digest(ranks, specials)
        self._listed = specials.listed
        self._bytes = tuple(ranks)
        self._ids = {name: token for token, name in specials.names.items()}
        mergeable = {token: rank for rank, token in enumerate(ranks)}
        self._bpe = tiktoken.Encoding("k3", pat_str=SPLIT_PATTERN, mergeable_ranks=mergeable, special_tokens={})

    @classmethod
    def from_dir(cls, path: str | Path, *, expected_digest: str | None = None) -> Tokenizer:
        """Read `tiktoken.model` and the names of the specials from a model folder; nothing is fetched.

        expected_digest: refuse any other vocabulary. Raises ModelError naming the file, the line and what is wrong.
        """
        folder = Path(path)
        ranks = read_ranks(folder / RANKS_FILE)
        tokenizer = cls(ranks, read_specials(folder, len(ranks)))
        if expected_digest is not None and tokenizer.digest != expected_digest:
            raise ModelError(
                f"the tokenizer in {folder} has digest {tokenizer.digest}", expected_digest, "use the recorded model"
            )
        return tokenizer

    def check_model(self, vocab: int) -> None:
        """ModelError when a model of `vocab` ids does not know all of this vocabulary, or knows special tokens by other
        ids: where no file lists them they lie above the ranks, and each rank that is missing would move them."""
        if self.n_vocab > vocab or (self.n_vocab < vocab and not self._listed):
            raise ModelError(
                f"the tokenizer has {self.n_vocab:,} ids, config.json a vocab_size of {vocab:,}",
                "a tokenizer whose ids the model knows" if self.n_vocab > vocab else "as many ids",
                "use the tokenizer files that belong to the model"
                + ("" if self._listed else ", its tokenizer_config.json among them"),
            )

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, none of them special. Raises UsageError for a lone surrogate, which UTF-8 cannot hold."""
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise UsageError(
                f"text with a lone surrogate U+{ord(text[problem.start]):04X} at character {problem.start}",
                "text that UTF-8 can hold",
            ) from None
        return [token for piece in split_long(text) for token in self._bpe.encode_ordinary(piece)]

    def special(self, name: str) -> int:
        """The id of a special token. Raises ModelError when this vocabulary has no such name."""
        if name not in self._ids:
            named = ", ".join(other for other in self._ids if not other.startswith("<|reserved_token_"))
            raise ModelError(f"the tokenizer has no special token {name!r}", f"one of {named}")
        return self._ids[name]

    def specials_among(self, *names: str) -> frozenset[int]:
        """Ids of those names that this vocabulary has."""
        return frozenset(self._ids[name] for name in names if name in self._ids)

    def is_text(self, token: int) -> bool:
        """Whether an id is an ordinary rank, neither special nor out of the vocabulary."""
        return 0 <= token < self.n_ranks

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; a special gives its name. Raises UsageError outside the vocabulary."""
        if 0 <= token < self.n_ranks:
            return self._bytes[token]
        if token in self.special_names:
            return self.special_names[token].encode()
        raise UsageError(f"token id {token}", f"an id from 0 to {self.n_vocab - 1}")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids, joined; specials give their names. Not always UTF-8: a character may be cut."""
        return b"".join(map(self.token_bytes, ids))

    def decode_text(self, ids: Iterable[int]) -> str:
        """`decode_bytes` as text, with U+FFFD where the bytes are not UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


class StreamDecoder:
    """UTF-8 bytes to text as they arrive; an unfinished character is held back until it is complete or given up."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """The characters that `data` completes."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What an unfinished character leaves (U+FFFD), or nothing; the decoder starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def split_long(text: str) -> Iterator[str]:
    """The pieces of `text` that are encoded on their own; joined they are the text."""
    for start in range(0, len(text), MAX_CHARS):
        piece = text[start : start + MAX_CHARS]
        if len(piece) <= MAX_RUN:
            yield piece
            continue
        begin = 0
        for run in _RUNS.finditer(piece):
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield piece[begin:cut]
                begin = cut
        yield piece[begin:]


def read_ranks(path: Path) -> list[bytes]:
    """The tokens of a `tiktoken.model` file in rank order.

    A line is base64 of the token's bytes, a space, the decimal rank; blank lines do not count. Raises ModelError
    naming the line for anything else, for ranks or tokens given twice, for gaps, and for missing single bytes.
    """
    lines = read_file(path, f"a readable {RANKS_FILE}").split(b"\n")
    tokens: dict[bytes, tuple[int, int]] = {}
    for number, line in enumerate(lines, start=1):
        parts = line.split()
        if not parts:
            continue
        try:
            token = base64.b64decode(parts[0], validate=True)
        except binascii.Error:
            raise _bad_line(path, number, "text that is no base64") from None
        if len(parts) != 2 or not parts[1].isdigit() or len(parts[1]) > MOST_DIGITS or not token:
            raise _bad_line(path, number, f"{line[:60].decode(errors='replace')!r}")
        first = tokens.setdefault(token, (int(parts[1]), number))
        if first[1] != number:
            raise _bad_line(path, number, f"the token of line {first[1]} again")
    lines_of: dict[int, int] = {}
    for rank, number in tokens.values():
        if lines_of.setdefault(rank, number) != number:
            raise _bad_line(path, number, f"rank {rank} again, first in line {lines_of[rank]}")
    for rank, number in lines_of.items():
        if rank >= len(tokens):
            missing = next(free for free in range(rank) if free not in lines_of)
            raise _bad_line(path, number, f"rank {rank} while rank {missing} is missing")
    single = next((byte for byte in range(256) if bytes([byte]) not in tokens), None)
    if single is not None:
        raise ModelError(f"{path} has no token for the single byte {single:#04x}", "all 256 single bytes as tokens")
    ranks = [b""] * len(tokens)
    for token, (rank, _) in tokens.items():
        ranks[rank] = token
    return ranks


def _bad_line(path: Path, number: int, found: str) -> ModelError:
    return ModelError(
        f"{path} line {number} has {found}",
        "base64 token, space, rank; ranks from 0 without gaps, each token and rank once",
        "fetch the file again",
    )


def _digest(ranks: Sequence[bytes], specials: Specials) -> str:
    """Identity of the vocabulary: what decides how text becomes ids, and nothing else (no paths, no file layout)."""
    digest = hashlib.sha256(f"k3 tokenizer {PATTERN_VERSION}\n{SPLIT_PATTERN}\n{len(ranks)}\n".encode())
    digest.update(b"".join(len(token).to_bytes(4, "little") + token for token in ranks))
    for token, name in sorted(specials.names.items()):
        digest.update(f"{token} {name}\n".encode())
    return "sha256:" + digest.hexdigest()
