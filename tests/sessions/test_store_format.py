"""The bytes of this release: golden files, and the constants of the document beside those of the code."""

from __future__ import annotations

import re
import struct
import subprocess
import sys

import k3_sessions
import pytest
from k3_sessions import HASH_BLOCK, Store, codec, hints, objects, portable, records, state_objects
from k3_sessions.blobs import TEMP_PREFIX

from tests.sessions.toy import CONFIG, IDENTITY, LAYOUT, Toy, check, draft

GOLDEN_HEAD = "d84fca109f5b1a4e324aebc2a819db90aeb34e9c19be31003b785335b80f14d3"
GOLDEN_1_2 = "6c8c675e2b3bd6d5c5848ff3c1f1662bf8cc3ef5ce5a7fb3b1b9e7a2e8a316e9"
GOLDEN_1_3 = "de8ebc06e1b445c52f9a9c6b5923096ac8f683a55f30372cfb70e2b8890d58ae"
GOLDEN_CHECK = "5f0c86b63a328fd7557f30903b3bd66c"
GOLDEN_FORMAT = (
    b'{"hash":"sha256","k3":"store","sha256":"01a6a39d2545dcd4bf7b179a3d11827fbef015d6f16c945a503e20bb599aa70c",'
    b'"version":"1.0"}\n'
)
TOKENS = [*range(3), *range(21, 541)]


def test_a_session_stored_by_release_1_0_still_comes_back(tmp_path, repo_root):
    store = Store.open(tmp_path / "s", config=CONFIG)
    report = store.import_(repo_root / "tests/sessions/golden/session-1.0.k3s")
    session = store.session("golden")
    assert (report.objects, session.head, session.identity) == (10, GOLDEN_HEAD, IDENTITY)
    assert (session.fixed, session.meta, list(session.marks)) == ({"system": "golden"}, {"title": "Golden"}, ["early"])
    log = store.log("golden")
    assert [(t.position, len(t.tokens), t.meta["turn"]) for t in log] == [(0, 0, 0), (2, 3, 1), (522, 520, 2)]
    for turn in log:
        plan = store.plan(turn.id, IDENTITY, LAYOUT)
        assert plan.replay == ()
        check(store.restore(plan, IDENTITY, LAYOUT), TOKENS)
    assert store.verify().problems == ()
    # It goes on, and the file can be made again, byte for byte.
    store.export("golden", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (repo_root / "tests/sessions/golden/session-1.0.k3s").read_bytes()
    with store.writer("golden", create=False, identity=IDENTITY, layout=LAYOUT) as writer:
        writer.commit(draft([1], 524), Toy([*TOKENS, 1], 524))


def test_the_marker_file_of_release_1_0(tmp_path):
    Store.open(tmp_path / "s", config=CONFIG)
    assert (tmp_path / "s/FORMAT").read_bytes() == GOLDEN_FORMAT


def test_a_session_stored_by_release_1_2_still_comes_back(tmp_path, repo_root):
    store = Store.open(tmp_path / "s", config=CONFIG)
    golden = repo_root / "tests/sessions/golden/session-1.2.k3s"
    store.import_(golden)
    head = store.session("golden").head
    assert head == GOLDEN_1_2
    (turn,) = store.catalog.path(head)
    assert [blob.check for blob in turn.checkpoint] == [GOLDEN_CHECK]
    assert all(len(page.blob.check) == 32 for page in turn.pages)
    check(store.restore(store.plan(head, IDENTITY, LAYOUT), IDENTITY, LAYOUT), store.tokens(head).tolist())
    store.export("golden", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == golden.read_bytes()


def test_a_session_stored_by_release_1_3_still_comes_back(tmp_path, repo_root):
    store = Store.open(tmp_path / "s", config=CONFIG)
    golden = repo_root / "tests/sessions/golden/session-1.3.k3s"
    store.import_(golden)
    head = store.session("golden").head
    assert head == GOLDEN_1_3
    plan = store.plan(head, IDENTITY, LAYOUT)
    check(store.restore(plan, IDENTITY, LAYOUT), store.tokens(head).tolist())
    found = store.hints(plan, IDENTITY, LAYOUT)
    assert {name: (str(a.dtype), a.tolist()) for name, a in found.items()} == {
        "draft.one": ("float32", [[0.0, 0.5, 1.0], [1.5, 2.0, 2.5]]),
        "draft.two": ("uint16", [1, 2, 3]),
    }
    store.export("golden", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == golden.read_bytes()


@pytest.fixture(scope="module")
def document(repo_root):
    return (repo_root / "sessions/README.md").read_text(encoding="utf-8")


def test_constants_in_the_document_are_those_of_the_code(document):
    stated = dict(re.findall(r"^\| `([A-Z_.a-z]+)` \| `([^`]+)` \|", document, re.M))
    config = k3_sessions.StoreConfig()
    actual = {
        "HASH_BLOCK": HASH_BLOCK,
        "MAJOR": objects.MAJOR,
        "MINOR": objects.MINOR,
        "MAGIC": objects.MAGIC.hex(" "),
        "PREFIX": f"{objects.PREFIX.size} bytes",
        "EXPORT_MAGIC": portable.MAGIC.hex(" "),
        "FRAME_ITEMS": codec.FRAME_ITEMS,
        "MIN_GAIN": f"{codec._MIN_GAIN:.0%}",
        "MIN_SPLIT_GAIN": f"{codec._MIN_SPLIT_GAIN:.0%}",
        "PLAIN_ITEMS": codec.PLAIN_ITEMS,
        "RAW": codec.RAW,
        "ZSTD": codec.ZSTD,
        "PLAIN": codec.PLAIN,
        "GROUP_BYTES": state_objects.GROUP_BYTES,
        "HINT_BYTES": hints.HINT_BYTES,
        "TEMP_PREFIX": TEMP_PREFIX,
        "kinds": ", ".join(f"{kind.value} {kind.name.lower()}" for kind in objects.Kind),
        "thinning.last": config.thinning.last,
        "thinning.max_kept": config.thinning.max_kept,
        "zstd_level": config.zstd_level,
        "staging_bytes": config.staging_bytes,
        "free_floor_bytes": config.free_floor_bytes,
        "free_floor_share": config.free_floor_share,
        "lock_wait_seconds": config.lock_wait_seconds,
    }
    assert stated == {name: str(value) for name, value in actual.items()}


def test_field_names_in_the_document_are_those_of_the_code(document):
    for record in (records.Ref, records.TurnRecord, records.Root):
        for name in record.__dataclass_fields__:
            if name not in ("unknown", "id", "size"):
                assert f"`{name}`" in document, (record.__name__, name)


def test_the_prefix_is_laid_out_as_documented():
    data = b"".join(objects.pack(objects.Kind.PAGE, {"a": 1}, (), 1))
    assert data[:8] == bytes.fromhex("4b334f424a0d0a1a")
    assert struct.unpack("<BBHI", data[8:16]) == (1, 0, 3, len(data) - 16)


def test_the_package_needs_no_torch():
    code = "import sys, k3_sessions; sys.exit('torch' in sys.modules or 'k3cli' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
