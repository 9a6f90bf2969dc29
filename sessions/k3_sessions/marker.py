"""The FORMAT file, which makes a folder a store: checked at every open, written last when a store is made."""

from __future__ import annotations

from k3_sessions.blobs import TEMP_PREFIX, write_file
from k3_sessions.disk import FileSystem
from k3_sessions.errors import BadName, Damaged, FormatUnsupported
from k3_sessions.records import seal, unseal

FOLDERS = ("objects", "refs", "locks", "quarantine")


def check_format(fs: FileSystem, mend: bool) -> str:
    """Make sure that `fs` holds a store, or make one; what is wrong with its FORMAT file, if `mend` allows that."""
    names = [name for name in fs.names("") if not name.startswith(TEMP_PREFIX)]
    fault = ""
    if "FORMAT" not in names and mend and {"objects", "refs"} <= set(names) <= set(FOLDERS):
        fault = "FORMAT is missing"
    if "FORMAT" in names or fault:
        try:
            if not fault:
                unseal(fs.read("FORMAT"), "store", "FORMAT")
        except Damaged as error:
            if not mend:  # `verify` could not open the store either
                raise Damaged(error.found, error.expected, "run `k3 repair`", object="FORMAT") from None
            fault = str(error)
        if lacking := " and ".join(sorted({"objects", "refs"} - set(names))):
            raise Damaged(f"{fs.where} has no folder {lacking}", "a whole store", "copy it again", object=lacking)
        for folder in sorted({"locks", "quarantine"} - set(names)):
            fs.make_dir(folder)  # empty ones hold nothing, and some tools that copy folders leave them out
        return fault
    foreign = sorted(set(names) - set(FOLDERS))
    if foreign or any(fs.names(name) for name in names if name != "locks"):
        # Nothing in it is a store's: the wrong folder, and no damage.
        wrong = FormatUnsupported if set(names) & set(FOLDERS) else BadName
        raise wrong(
            f"{fs.where} has no FORMAT file but holds {', '.join(foreign or names)[:80]}",
            "a session store or an empty folder",
            "choose another folder" if foreign else "run `k3 repair` if this was a store",
        )
    # FORMAT is written last: until it is there, the folder counts as empty.
    for folder in FOLDERS:
        fs.make_dir(folder)
    # Made now, so that readers of a store that later turns read-only can still take them. Held while FORMAT is
    # written, so that a process that is through already does not collect the unfinished file.
    held = [fs.lock(f"locks/{lock}", shared=True, wait=1.0) for lock in ("store", "refs")]
    try:
        # The folders must be on disk first: a FORMAT without them would be a store that cannot be written.
        fs.sync_dir("")
        write_format(fs)
    finally:
        for lock in held:
            if lock is not None:
                fs.unlock(lock)
    return ""


def write_format(fs: FileSystem) -> None:
    write_file(fs, "FORMAT", [seal({"k3": "store", "hash": "sha256"})])
    fs.sync_dir("")
