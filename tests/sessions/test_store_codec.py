"""Frames: every array comes back, equal arrays give equal bytes, and frames that lie are refused."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from k3_sessions import Damaged, FieldSpec, FormatUnsupported, StateLayout, Store, codec, objects
from k3_sessions.source import Memory

from tests.sessions.toy import CONFIG, check, grow, identity_for

GOLDEN_1_1 = "608e56ddb3992f8913ca9367d8ca32766f50d886174ed8a3bf4ff99d912c6efd"
LARGE = StateLayout(
    fields=(
        FieldSpec("recurrent", "checkpoint", (0,), (128, 128), "float32"),
        FieldSpec("conv", "checkpoint", (0,), (4, 3), "bfloat16"),
        FieldSpec("kv_latent", "page", (2, 4), (6,), "bfloat16"),
    )
)
SIZES = (0, 1, 100, codec.PLAIN_ITEMS - 1, codec.PLAIN_ITEMS, 65537, codec.FRAME_ITEMS, codec.FRAME_ITEMS + 3)


def content(kind: str, size: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(size)
    if kind == "noise":
        raw = rng.integers(0, 256, size * np.dtype(dtype).itemsize, dtype=np.uint8)
        return raw.view(dtype)
    if kind == "state":  # mantissas are noise, exponents are not
        values = rng.standard_normal(size, dtype="f4")
        return values if dtype == "<f4" else (values.view("<u4") >> 16).astype("<u2").astype(dtype)
    values = np.zeros(size, dtype=dtype)
    values[size // 2 :] = content("noise", size - size // 2, dtype) if kind == "half" else 0
    return values


@pytest.mark.parametrize("dtype", ["<f4", "<u2", "<u4"])
@pytest.mark.parametrize("kind", ["noise", "state", "half", "zeros"])
@pytest.mark.parametrize("size", SIZES)
def test_every_array_comes_back_and_equal_ones_give_equal_bytes(dtype, kind, size):
    array = content(kind, size, dtype)
    table, parts = codec.encode(array, 1)
    data = b"".join(parts)
    again = codec.encode(array.copy(), 1)
    assert (table, data) == (again[0], b"".join(again[1]))
    out = np.full_like(array, 1)
    codec.decode(Memory(memoryview(data)), table, out)
    assert out.tobytes() == array.tobytes()


def test_an_array_is_plain_only_where_planes_would_save_little():
    assert codec.encode(content("state", 10**6, "<f4"), 1)[0] == [(codec.PLAIN, 4 * 10**6)]
    for size in (codec.PLAIN_ITEMS, 20000, 65537, 10**6):
        assert codec.encode(content("noise", size, "<f4"), 1)[0] == [(codec.PLAIN, 4 * size)]
    split, _ = codec.encode(content("state", 10**6, "<u2"), 1)
    assert {number for number, _ in split} == {codec.RAW, codec.ZSTD}
    assert sum(stored for _, stored in split) < 0.75 * 2 * 10**6
    small, _ = codec.encode(content("noise", codec.PLAIN_ITEMS - 1, "<f4"), 1)
    assert {number for number, _ in small} == {codec.RAW}


def test_bytes_stored_by_release_1_0_still_decode():
    """One run of two-byte items as that release wrote it: low plane raw, high plane zstd."""
    low = bytes(range(256)) * 4
    high = bytes.fromhex("28b52ffd6000034d00001040400100fb2b8005")
    table = [(codec.RAW, len(low)), (codec.ZSTD, len(high))]
    out = np.empty(1024, dtype="<u2")
    codec.decode(Memory(memoryview(low + high)), table, out)
    assert (out.tobytes()[::2], set(out.tobytes()[1::2])) == (low, {0x40})


@pytest.mark.parametrize(
    "table",
    [
        [(codec.PLAIN, 63)],
        [(codec.PLAIN, 65)],
        [(codec.PLAIN, 32), (codec.PLAIN, 32)],
        [(codec.RAW, 64)],
        [(codec.PLAIN, 16), (codec.RAW, 16), (codec.RAW, 16), (codec.RAW, 16)],
        [(codec.RAW, 16), (codec.RAW, 16), (codec.RAW, 16), (9, 16)],
        [],
    ],
)
def test_frames_that_do_not_fit_are_refused(table):
    data = memoryview(bytes(sum(stored for _, stored in table)))
    with pytest.raises(codec.BadFrames):
        codec.decode(Memory(data), table, np.empty(16, dtype="<f4"))


def test_an_object_states_the_lowest_version_that_reads_it():
    plain = b"".join(objects.pack(objects.Kind.PAGE, {}, [("a", "float32", content("noise", 20000, "<f4"))], 1))
    split = b"".join(objects.pack(objects.Kind.PAGE, {}, [("a", "float32", content("zeros", 20000, "<f4"))], 1))
    assert (plain[8:10], split[8:10]) == (b"\1\1", b"\1\0")
    section = objects.unpack(plain, objects.Kind.PAGE, "x").sections["a"]
    back = section.new()
    section.read(back)
    assert back.tobytes() == content("noise", 20000, "<f4").tobytes()


def packed(minor: int, number: int, dims: list[int], body: bytes) -> bytes:
    sections = [{"name": "a", "dtype": "float32", "dims": dims, "frames": [[number, len(body)]]}]
    header = orjson.dumps({"meta": {}, "sections": sections})
    return objects.PREFIX.pack(objects.MAGIC, 1, minor, objects.Kind.PAGE, len(header)) + header + body


def test_frames_of_a_newer_version_are_said_to_be_that():
    with pytest.raises(FormatUnsupported, match=r"format 1\.7 and frames"):
        objects.unpack(packed(7, 9, [2], bytes(8)), objects.Kind.PAGE, "x", known=("a",))
    same = objects.unpack(packed(1, 9, [2], bytes(8)), objects.Kind.PAGE, "x", known=("a",)).sections["a"]
    with pytest.raises(codec.BadFrames):
        same.read(same.new())
    with pytest.raises(codec.BadFrames):
        objects.unpack(packed(1, codec.PLAIN, [2**40], bytes(8)), objects.Kind.PAGE, "x").sections["a"].new()


def test_large_state_is_stored_plain_and_a_changed_byte_is_refused(tmp_path):
    store = Store.open(tmp_path / "s", config=CONFIG)
    tokens, turns = grow(store, "a", [20], layout=LARGE)
    identity = identity_for(LARGE)
    plan = store.plan(turns[-1].id, identity, LARGE)
    check(store.restore(plan, identity, LARGE), tokens, LARGE)
    (big,) = [path for path in (tmp_path / "s/objects").rglob("*") if path.is_file() and path.stat().st_size > 60000]
    data = bytearray(big.read_bytes())
    data[-1] ^= 1
    big.write_bytes(data)
    with pytest.raises(Damaged, match="does not match its hash"):
        store.restore(plan, identity, LARGE)


def test_a_session_stored_by_release_1_1_still_comes_back(tmp_path, repo_root):
    store = Store.open(tmp_path / "s", config=CONFIG)
    golden = repo_root / "tests/sessions/golden/session-1.1.k3s"
    store.import_(golden)
    identity = identity_for(LARGE)
    head = store.session("golden").head
    assert head == GOLDEN_1_1
    check(store.restore(store.plan(head, identity, LARGE), identity, LARGE), store.tokens(head).tolist(), LARGE)
    store.export("golden", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == golden.read_bytes()
