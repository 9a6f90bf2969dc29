"""Timelines over a fake model: chunk boundaries, pending tokens, schedules, forks, cancels, torn steps."""

from __future__ import annotations

import pytest

from k3cli.engine.limits import room_for_answer
from k3cli.engine.sampling import Sampling, draw
from k3cli.engine.schedule import Schedule
from k3cli.engine.timeline import Timeline
from k3cli.errors import ContextError, DamagedError, K3Error

GREEDY = Sampling(temperature=0, seed=0)
WARM = Sampling(temperature=1.0, seed=42)


def run(timeline, sampling, n, stop=()):
    return list(timeline.generate(sampling, stop, n))


def test_prefill_chunks_end_at_multiples_of_absolute_positions(fake_timeline, fake_model) -> None:
    timeline = fake_timeline()
    timeline.extend(range(100))
    assert list(timeline.prefill()) == [100]
    timeline.extend([i % 300 for i in range(1100)])
    assert list(timeline.prefill()) == [412, 924, 1100]
    assert timeline.position == 1200
    assert timeline.schedule.to_json() == [["prefill", 100], ["prefill", 412], ["prefill", 512], ["prefill", 176]]
    assert fake_model.prefill_chunk == 512


def test_the_last_drawn_token_is_pending_and_the_first_comes_from_prefill(fake_timeline, fake_model) -> None:
    timeline = fake_timeline([5, 6, 7])
    ids = run(timeline, WARM, 6)
    assert len(ids) == 6
    assert timeline.tokens == [5, 6, 7, *ids]
    assert timeline.pending == ids[-1:]
    assert timeline.stop_reason == "length"
    assert fake_model.calls == [("prefill", 3)] + [("verify", 1)] * 5
    assert timeline.schedule.to_json() == [["prefill", 3], ["decode", 5]]


def test_generation_can_go_on_where_it_stopped(fake_timeline) -> None:
    for sampling in (GREEDY, WARM):
        once = fake_timeline([5, 6, 7])
        twice = fake_timeline([5, 6, 7])
        assert run(once, sampling, 40) == run(twice, sampling, 13) + run(twice, sampling, 27)
        assert once.schedule == twice.schedule


def test_stop_ids_end_the_answer(fake_timeline) -> None:
    ids = run(fake_timeline([5, 6, 7]), WARM, 20)
    timeline = fake_timeline([5, 6, 7])
    at = next(i for i in range(3, 20) if ids[i] not in ids[:i])
    assert run(timeline, WARM, 20, stop={ids[at]}) == ids[: at + 1]
    assert timeline.stop_reason == "stop"
    assert timeline.pending == [ids[at]]


def test_forks_are_independent_and_draw_the_same_noise(fake_timeline, state_bytes) -> None:
    whole = fake_timeline([5, 6, 7])
    want = run(whole, WARM, 30)
    parent = fake_timeline([5, 6, 7])
    start = run(parent, WARM, 10)
    child = parent.fork()
    got: dict[str, list[int]] = {"parent": [], "child": []}
    streams = {"parent": parent.generate(WARM, (), 20), "child": child.generate(WARM, (), 20)}
    for _ in range(20):
        for who, stream in streams.items():
            got[who].append(next(stream))
    assert start + got["parent"] == start + got["child"] == want
    assert state_bytes(parent) == state_bytes(child) == state_bytes(whole)
    run(child, Sampling(seed=1), 5)
    assert state_bytes(parent) == state_bytes(whole)
    assert parent.tokens == whole.tokens


def test_a_snapshot_stays_as_it_was(fake_timeline) -> None:
    timeline = fake_timeline([5, 6, 7])
    run(timeline, WARM, 5)
    source = timeline.snapshot()
    before = {k: v.copy() for k, v in source.checkpoint().items()}
    rows = source.page_rows("kv_latent", 0, source.position)
    run(timeline, WARM, 5)
    assert source.position == 7
    assert source.checkpoint()["recurrent"].tobytes() == before["recurrent"].tobytes()
    assert source.page_rows("kv_latent", 0, 7).tobytes() == rows.tobytes()
    assert rows.flags.c_contiguous


@pytest.mark.parametrize("window", [1, 4, 8])
def test_following_a_schedule_gives_the_same_bits(make_fake_model, state_bytes, window: int) -> None:
    model = make_fake_model(window=window)
    first = Timeline(model, model.new_state(), [i % 200 for i in range(700)], limit=4096)
    run(first, WARM, 50)
    first.extend([1, 2, 3])
    run(first, WARM, 20)
    again = Timeline(model, model.new_state(), first.tokens, limit=4096)
    rows = list(again.follow(first.schedule))
    assert state_bytes(again) == state_bytes(first)
    assert again.schedule == first.schedule
    # each row is the one its token was drawn from
    drawn = {at + i: draw(row[None], [at + i], WARM)[0] for at, logits in rows for i, row in enumerate(logits)}
    generated = [*range(700, 750), *range(753, 773)]
    assert [drawn[i] for i in generated] == [first.tokens[i] for i in generated]
    cold = Timeline(model, model.new_state(), first.tokens[: first.position], limit=4096)
    list(cold.prefill())
    assert state_bytes(cold) != state_bytes(first), "the fake must tell the two paths apart"


def test_cancel_before_every_step_leaves_a_usable_timeline(fake_timeline, state_bytes) -> None:
    want = fake_timeline([i % 200 for i in range(1300)])
    ids = run(want, WARM, 12)
    for steps in range(16):
        timeline = fake_timeline([i % 200 for i in range(1300)])
        asked = 0

        def cancel(steps: int = steps) -> bool:
            nonlocal asked
            asked += 1
            return asked > steps

        got = list(timeline.generate(WARM, (), 12, cancel))
        assert got == ids[: len(got)]
        if len(got) < 12:
            assert timeline.stop_reason == "cancelled"
        rest = run(timeline, WARM, 12 - len(got)) if len(got) < 12 else []
        assert got + rest == ids
        assert timeline.schedule == want.schedule
        assert state_bytes(timeline) == state_bytes(want)


def test_closing_the_iterator_leaves_a_usable_timeline(fake_timeline) -> None:
    ids = run(fake_timeline([5, 6]), WARM, 10)
    timeline = fake_timeline([5, 6])
    stream = timeline.generate(WARM, (), 10)
    start = [next(stream) for _ in range(4)]
    stream.close()
    assert timeline.stop_reason == "cancelled"
    assert start + run(timeline, WARM, 6) == ids


def test_a_failed_step_tears_the_timeline(fake_timeline, fake_model) -> None:
    timeline = fake_timeline([i % 200 for i in range(1300)])
    fake_model.fail_at = 1024
    with pytest.raises(RuntimeError, match="device failed"):
        list(timeline.prefill())
    fake_model.fail_at = None
    for use in (timeline.fork, timeline.snapshot, lambda: run(timeline, WARM, 1), lambda: timeline.extend([1])):
        with pytest.raises(K3Error, match="prefill step at position 1024 was interrupted"):
            use()


def test_a_closed_timeline_refuses_use(fake_timeline) -> None:
    timeline = fake_timeline([5, 6])
    timeline.close()
    with pytest.raises(K3Error, match="it was closed"):
        run(timeline, WARM, 1)


def test_the_context_limit_is_refused_with_both_counts(fake_timeline, fake_model) -> None:
    timeline = fake_timeline([1] * 90, limit=100)
    with pytest.raises(ContextError, match=r"holds 90 tokens and 11 more make 101; expected at most 100"):
        timeline.extend([2] * 11)
    assert len(timeline.tokens) == 90
    assert not fake_model.calls
    assert room_for_answer(90, 9, 100) == 1
    with pytest.raises(ContextError):
        room_for_answer(90, 10, 100)
    assert len(run(timeline, WARM, 50)) == 10
    assert timeline.stop_reason == "length"


def test_nothing_to_continue_from(fake_timeline) -> None:
    with pytest.raises(K3Error, match="nothing to continue from"):
        run(fake_timeline(), WARM, 1)


def test_schedules_join_cut_and_read_back() -> None:
    schedule = Schedule(0, [("prefill", 512), ("prefill", 37), ("decode", 3), ("decode", 4), ("prefill", 5)])
    assert schedule.to_json() == [["prefill", 512], ["prefill", 37], ["decode", 7], ["prefill", 5]]
    assert Schedule.from_json(0, schedule.to_json()) == schedule
    assert schedule.between(512, 552).to_json() == [["prefill", 37], ["decode", 3]]
    assert schedule.between(552, 561).to_json() == [["decode", 4], ["prefill", 5]]
    joined = schedule.between(0, 552)
    joined.extend(schedule.between(552, 561))
    assert joined == schedule
    with pytest.raises(DamagedError, match="cut at 100"):
        schedule.between(100, 549)
    for bad in ([["draft", 3]], [["prefill", 0]], [["prefill"]], ["prefill"], [["decode", "3"]]):
        with pytest.raises(DamagedError, match="recorded schedule"):
            Schedule.from_json(0, bad)
