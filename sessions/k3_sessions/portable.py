"""One file per session, to carry it to another machine.

    0   8  magic
    8   8  bytes of the head, u64 LE
    16  .  head: a sealed JSON line {"ref": the session's ref, "objects": [[id, bytes], ...] by id}
    .   .  the objects, in that order
    .   32 sha256 of everything before

The same session gives the same bytes each time. Nothing in the file is a path; the name in it is only a proposal.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from k3_sessions import room, upkeep
from k3_sessions.blobs import TEMP_PREFIX, Batch, is_id, path_of
from k3_sessions.catalog import Need, check_name
from k3_sessions.common import now
from k3_sessions.errors import BadName, Damaged, SessionExists, StoreError, os_errors
from k3_sessions.fs import RealFS
from k3_sessions.objects import Kind
from k3_sessions.opened import OpenStore
from k3_sessions.records import Ref, read_ref, seal, unseal

MAGIC = b"K3EXP\r\n\x1a"
LIMIT_HEAD = 1 << 30


@dataclass(frozen=True)
class ExportReport:
    """One exported session: the file, its bytes, how many objects it holds, and what was left out, and why."""

    name: str
    file: str
    bytes: int
    objects: int
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class ImportReport:
    """One imported session. bytes: of the file. written: bytes of objects that were new to this store; known: of those
    that were there already.
    """

    name: str
    bytes: int
    written: int
    known: int
    objects: int


def export(store: OpenStore, name: str, file: str | os.PathLike[str]) -> ExportReport:
    """See Store.export."""
    target = Path(file).absolute()
    if not target.parent.is_dir():
        raise BadName(f"folder {target.parent} does not exist", "a new file in a folder that does")
    with os_errors(f"writing {file}"):
        out = RealFS(target.parent, create=False)
        if out.info(target.name) is not None:
            raise _taken(file)
    temp = f"{TEMP_PREFIX}{secrets.token_hex(8)}"
    try:
        size, count, notices = _write_all(store, name, out, temp, str(file))
        with os_errors(f"writing {file}"):
            try:
                out.place(temp, target.name)
            except FileExistsError:
                raise _taken(file) from None
            out.sync_dir("")
    except BaseException:
        with suppress(OSError):
            out.remove(temp)
        raise
    return ExportReport(check_name(name), str(target), size, count, notices)


def _taken(file: str | os.PathLike[str]) -> BadName:
    return BadName(f"file {file} exists", "a new file name", "choose another, or remove it")


def _write_all(store: OpenStore, name: str, out: RealFS, temp: str, file: str) -> tuple[int, int, tuple[str, ...]]:
    """Write and sync the whole content; returns its bytes, the number of objects, and what was left out."""
    digest = hashlib.sha256()
    total = 0
    with os_errors(f"writing {file}"):
        handle = out.create(temp)
    try:
        with store.using():
            ref = store.catalog.ref(name)
            needed = store.catalog.need(ref)
            notices = _leave_out(store, needed)
            need = needed.all()
            parts = chain(_head(ref, need), (store.blobs.get(key, need[key]) for key in sorted(need)))
            for part in parts:
                digest.update(part)
                total += len(part)
                with os_errors(f"writing {file}"):
                    out.write(handle, part)
        with os_errors(f"writing {file}"):
            out.write(handle, digest.digest())
            out.sync(handle)
    finally:
        out.close(handle)
    return total + digest.digest_size, len(need), notices


def _leave_out(store: OpenStore, need: Need) -> tuple[str, ...]:
    """Take hints that cannot be read out of `need`: the session is whole without them. What there is to say of it."""
    notices: list[str] = []
    for key, size in list(need.hints.items()):
        try:
            store.blobs.get(key, size)
        except StoreError as error:
            del need.hints[key]
            notices.append(f"hints were left out: {error}")
    return tuple(notices)


def _head(ref: Ref, need: dict[str, int]) -> tuple[bytes, bytes]:
    # What changes without the session changing stays out, so that two exports are equal.
    still = replace(ref, updated=ref.created, pinned=False, evicted="")
    objects = [[key, need[key]] for key in sorted(need)]
    line = seal({"k3": "export", "ref": still.pack().decode(), "objects": objects})
    return MAGIC + len(line).to_bytes(8, "little"), line


def import_(store: OpenStore, file: str | os.PathLike[str], name: str | None) -> ImportReport:
    """See Store.import_."""
    source = Path(file).resolve()
    if not source.is_file():
        what = "is a folder" if source.is_dir() else "is no regular file" if source.exists() else "does not exist"
        raise BadName(f"{file} {what}", "a file made by `k3 export`")
    with os_errors(f"reading {file}"):
        folder = RealFS(source.parent, create=False)
        info = folder.info(source.name)
        if info is None:
            raise BadName(f"{file} does not exist", "a file made by `k3 export`")
        begin = folder.read(source.name, 0, 64)
    prefix = begin[:16]
    # One whose first bytes alone are wrong is a damaged export; so is one of which only these are left.
    if not prefix or not (MAGIC.startswith(prefix[:8]) or b'"k3":"export"' in begin):
        what = f"begins with {prefix.decode('latin-1')!r}" if prefix else "is empty"
        raise BadName(f"{file} is no exported session: it {what}", "a file made by `k3 export`")
    size = int.from_bytes(prefix[8:16], "little")
    if prefix[:8] != MAGIC or not 0 < size <= min(LIMIT_HEAD, info.size):
        raise Damaged(f"{file} ends early, or its head is damaged", do="copy it again", object=str(file))
    with os_errors(f"reading {file}"):
        line = folder.read(source.name, 16, size)
    ref, objects = _read_head(line, str(file))
    end = 16 + size + sum(length for _, length in objects)
    if info.size != end + 32:
        raise Damaged(f"{file} has {info.size} bytes", f"{end + 32}", "copy it again", object=str(file))
    new = check_name(ref.name if name is None else name)
    written: list[str] = []
    with store.owning(new):
        if store.catalog.find(new) is not None:
            raise SessionExists(f"session {new} exists", do="import it under another name with `--name NEW`")
        room.make(store, end, new, what=f"session {new}")
        try:
            with store.using():
                batch = Batch()
                _copy(store, folder, source.name, (prefix, line), objects, batch, written)
                stamp = now()
                ref = replace(ref, name=new, updated=stamp)
                _check_whole(store, ref, {key for key, _ in objects}, str(file))
                store.blobs.settle(batch)
                with store.changing_refs():
                    store.save_ref(ref)
        except BaseException:
            _take_back(store, written)
            raise
    known = sum(length for _, length in objects) - batch.written
    return ImportReport(new, info.size, batch.written, known, len(objects))


def _read_head(line: bytes, file: str) -> tuple[Ref, list[tuple[str, int]]]:
    body = unseal(line, "export", file)
    try:
        ref = read_ref(str(body["ref"]).encode(), file)
        objects = [(str(key), int(length)) for key, length in body["objects"]]
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{file} has an unreadable head ({error})", object=file) from error
    turns = [ref.head, ref.root, *(entry.turn for entry in ref.keep), *ref.marks.values()]
    if not all(is_id(key) and length >= 0 for key, length in objects) or not all(is_id(turn) for turn in turns):
        raise Damaged(f"{file} lists something that is no object", object=file)
    return ref, objects


def _copy(
    store: OpenStore,
    folder: RealFS,
    name: str,
    head: tuple[bytes, bytes],
    objects: list[tuple[str, int]],
    batch: Batch,
    written: list[str],
) -> None:
    """Store every object of the file. Raises Damaged as soon as one is not what its name says."""
    digest = hashlib.sha256(head[0] + head[1])
    at = len(head[0]) + len(head[1])
    for key, length in objects:
        with os_errors(f"reading {name}"):
            data = folder.read(name, at, length)
        digest.update(data)
        if hashlib.sha256(data).hexdigest() != key:
            raise Damaged(f"{name}: object {key[:10]} does not match its hash", do="copy the file again", object=name)
        _, new = store.blobs.put([data], batch)
        if new:
            written.append(key)
        at += length
    with os_errors(f"reading {name}"):
        if folder.read(name, at, 32) != digest.digest():
            raise Damaged(f"{name} does not match its checksum", do="copy the file again", object=name)


def _check_whole(store: OpenStore, ref: Ref, objects: set[str], file: str) -> None:
    """The session the file describes is complete and consistent with its objects."""
    store.catalog.root(ref.root)
    need = store.catalog.need(ref)
    # Hints may be missing: they were gone, or the version that wrote the file knows of none.
    missing = {*need.pages, *need.checkpoints, *need.other} - objects
    if missing:
        raise Damaged(f"{file} lacks object {min(missing)[:10]}", do="export the session again", object=file)
    # What is removed or set aside as one thing must not be another thing to another session.
    for kind, keys in ((Kind.PAGE, need.pages), (Kind.CHECKPOINT, need.checkpoints), (Kind.HINTS, need.hints)):
        for key in keys:
            with suppress(OSError):  # of hints that are not in the file anything may be there
                if store.fs.read(path_of(key), 10, 2) == kind.to_bytes(2, "little"):
                    continue
                if key in objects or hashlib.sha256(store.fs.read(path_of(key))).hexdigest() == key:
                    raise Damaged(f"{file}: object {key[:10]} is no {kind.name.lower()} object", object=file)
    for entry in ref.keep:
        turn = store.catalog.turn(entry.turn)
        if (turn.position, turn.prefix) != (entry.position, entry.prefix):
            raise Damaged(f"{file} misstates turn {turn.id[:10]}", do="export the session again", object=file)


def _take_back(store: OpenStore, written: list[str]) -> None:
    """Remove what a failed import brought; `gc` collects it if that is not possible now."""
    try:
        with store.alone():
            upkeep.delete_unneeded(store, written)
    except StoreError:
        return
