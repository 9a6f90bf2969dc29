"""What drafts bring on this machine: the same conversations decoded with each drafter in turns.

Each text is one conversation. In a round every drafter has its own, and they decode in turns of some tokens, in every
other round in the opposite order, so that whatever else the machine does hits all alike: whole conversations one after
the other differed by a tenth and more without any drafts. Every time they are new, and nothing is known from before but
what steps cost; a few tokens with each drafter, which are not measured, warm the process up. Every id drawn with drafts
must be the one drawn without, else the row fails.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from k3cli.bench.ceilings import ceilings
from k3cli.bench.device import device_name, references
from k3cli.bench.record import Results, Row, measured, run_row
from k3cli.bench.texts import TEXTS
from k3cli.config import Settings
from k3cli.engine.drafting.choose import choose, draft_folder
from k3cli.engine.engine import Engine
from k3cli.engine.sampling import Sampling
from k3cli.errors import UsageError

LONGEST = 400
"""Tokens of one answer at most."""
WARMING = 16
"""Tokens that warm the process up, with each drafter."""
TURN = 16
"""Tokens that a drafter decodes before it is the next one's turn."""
NOISE = 5.0
"""Temperature of the text "noise", whatever else is asked for."""
ALL = ("off", "suffix", "dspark")
"""What `--spec all` compares; dspark where the model has a draft of its own."""
PUBLISHED = (1.84, 2.45, 2.87, 3.22, 3.44, 3.54, 3.78, 3.88)
"""Tokens a step with 1, 2, ... drafts of K3's published DSpark draft on coding prompts (InferenceX, golden acceptance
lengths)."""


@dataclass(frozen=True)
class Request:
    """specs: drafters to compare, "off" first. texts: keys of TEXTS. longest: tokens of one answer at most.

    asked: whether the drafters were named; of `all`, those that are not there are left out.
    """

    specs: tuple[str, ...]
    texts: tuple[str, ...]
    rounds: int = 3
    temperature: float = 0.0
    longest: int = LONGEST
    asked: bool = True

    def heat(self, text: str) -> float:
        """The temperature that a text is drawn at."""
        return NOISE if text == "noise" else self.temperature


@dataclass
class Run:
    """One conversation. seconds: of all decode steps, as are draft, verify and commit; processor: CPU seconds."""

    ids: list[int] = field(default_factory=list)
    processor: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    steps: int = 0
    tokens: int = 0
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    failed: str = ""

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.commit


def read_request(spec: str, texts: str | None, rounds: int | None, temperature: float | None) -> Request:
    """What the command line asks for, None: the default; "off" is always among the drafters. UsageError."""
    specs = list(ALL) if spec == "all" else [part.strip() for part in spec.split(",")]
    for name in specs:
        choose(name)
    names = list(TEXTS) if texts is None else [part.strip() for part in texts.split(",")]
    if not set(names) <= set(TEXTS):
        raise UsageError(f"--texts is {texts!r}", f"some of {', '.join(TEXTS)}, with commas between")
    request = Request(("off", *(name for name in dict.fromkeys(specs) if name != "off")), tuple(dict.fromkeys(names)))
    if rounds is not None:
        request = replace(request, rounds=rounds)
    if request.rounds < 1:
        raise UsageError(f"--rounds is {rounds}", "1 or more")
    if temperature is not None:
        request = replace(request, temperature=temperature)
        if not temperature >= 0:
            raise UsageError(f"--temperature is {temperature}", "0 or more")
        if request.texts == ("noise",):
            raise UsageError("--temperature with --texts noise", f"another text: noise is drawn at {NOISE:g}")
    return replace(request, asked=spec != "all", longest=LONGEST)


def converse(
    engine: Engine, spec: str, text: str, request: Request, rows: int | None = None, messages: int | None = None
) -> Run:
    """The messages of a text one after the other, decoded with `spec`. rows: of a step at most; messages: how many."""
    *_, run = conversing(engine, spec, text, request, rows, messages)
    return run


def conversing(
    engine: Engine, spec: str, text: str, request: Request, rows: int | None = None, messages: int | None = None
) -> Iterator[Run]:
    """As `converse`, in turns: yields the run as far as it has come, whole with the last one."""
    engine.speculate(choose(spec, model=engine.folder), rows)
    renderer, sampling = engine.renderer, Sampling(temperature=request.heat(text), seed=1)
    timeline, context = engine.timeline(), renderer.new_context(True)
    window = engine.model.window
    run = Run(tested=[0] * (window - 1), accepted=[0] * (window - 1), rows=[0] * (window + 1))
    close: list[int] = []
    stop = frozenset() if text == "noise" else renderer.stop_ids
    for n, message in enumerate(TEXTS[text][:messages]):
        ids = [*close, *(renderer.render_head((), True, renderer.default_effort, None) if n == 0 else ())]
        ids += renderer.render_messages([{"role": "user", "content": message}], context)
        timeline.extend([*ids, *renderer.generation_prompt(True)])
        for _ in timeline.prefill():
            pass
        parser = renderer.parser(True)
        began = time.process_time()
        for drawn, token in enumerate(timeline.generate(sampling, stop, request.longest)):
            if drawn and drawn % TURN == 0:
                run.processor += time.process_time() - began
                yield run
                began = time.process_time()
            run.ids.append(token)
            if not parser.ended:
                parser.feed(token)
        run.processor += time.process_time() - began
        close = renderer.close_turn(parser)
        parser.finish(timeline.stop_reason)
        context.reply(parser.message())
        stats = timeline.decoding
        run.draft += stats.draft_seconds
        run.verify += stats.verify_seconds
        run.commit += stats.commit_seconds
        run.steps += stats.steps
        run.tokens += stats.tokens
        for mine, new in ((run.tested, stats.tested), (run.accepted, stats.accepted), (run.rows, stats.rows)):
            mine[:] = [a + b for a, b in zip(mine, new, strict=True)]
    if timeline.speculator is not None:
        run.failed = timeline.speculator.failure
    yield run


def in_turns(talks: Sequence[Iterator[Run]]) -> list[Run]:
    """What the conversations come to, each carried on in its turn until all have ended.

    Always in the same order: there and back again, the outer ones would have their turns two by two, and caches warm.
    """
    runs: dict[int, Run] = {}
    going = list(range(len(talks)))
    while going:
        for number in list(going):
            run = next(talks[number], None)
            if run is None:
                going.remove(number)
            else:
                runs[number] = run
    return [runs[number] for number in range(len(talks))]


def compare_drafts(engine: Engine, text: str, request: Request, rows: int | None = None) -> Iterator[Row]:
    """All drafters on one text: a row for each."""
    runs: dict[str, list[Run]] = {spec: [] for spec in request.specs}
    for number in range(request.rounds):
        order = request.specs if number % 2 == 0 else request.specs[::-1]
        talks = [conversing(engine, spec, text, request, rows) for spec in order]
        for spec, run in zip(order, in_turns(talks), strict=True):
            runs[spec].append(run)
    for spec, done in runs.items():
        yield {"row": "spec", "text": text, "spec": spec, "temperature": request.heat(text)} | told(runs["off"], done)


def told(off: Sequence[Run], runs: Sequence[Run]) -> Row:
    """The fields of a drafter's row, or why it failed. off: the runs without drafts, in the same order."""
    last = runs[-1]
    for run in (*off, *runs):
        if run.ids != off[0].ids:
            place = next((i for i, (a, b) in enumerate(zip(run.ids, off[0].ids, strict=False)) if a != b), -1)
            return {"error": f"the ids drawn differ from those drawn without drafts, first at {place}"}
        if run.failed:
            return {"error": f"the drafter failed: {run.failed}"}
    pairs = [a.seconds / b.seconds for a, b in zip(off, runs, strict=True)]
    row = measured([run.seconds for run in runs])
    return row | {
        "tokens": last.tokens,
        "cached_tokens": 0,
        "steps": last.steps,
        "tokens_per_second": last.tokens / row["seconds"],
        "tokens_per_step": last.tokens / last.steps,
        "acceptance": [round(a / t, 4) for a, t in zip(last.accepted, last.tested, strict=True) if t],
        "rows": last.rows[1:],
        "ratio": statistics.median(pairs),
        "ratios": pairs,
        "processor_ratio": statistics.median(a.processor / b.processor for a, b in zip(off, runs, strict=True)),
        "draft_seconds": last.draft,
        "verify_seconds": last.verify,
        "commit_seconds": last.commit,
    }


def conversations(
    settings: Settings, request: Request, file: Path | None, tell: Callable[[str], None]
) -> Iterator[Row]:
    """The run's conditions as the first row, then a row for each text and drafter. tell: one line for people."""
    engine = Engine.load(
        settings.model_ref, device=settings.device, dtype=settings.dtype, gpus=settings.gpus, tell=tell
    )
    folder = engine.folder
    assert folder is not None
    specs = []
    for spec in request.specs:
        choice = choose(spec, model=folder)
        try:
            if choice.model_based:
                draft_folder(choice, folder)
        except UsageError as problem:
            if request.asked:
                raise
            tell(f"without {spec}: {problem.found}")
        else:
            specs.append(spec)
    request = replace(request, specs=tuple(specs))
    limits = ceilings(engine.device, engine.model.dtype, engine.ranks)
    run = run_row(
        model=engine.name,
        config=engine.identity.weights,
        weights=engine.identity.weights,
        device=device_name(engine.device),
        world=engine.ranks,
        dtype=engine.dtype,
        window=settings.window or engine.model.window,
        chunk=engine.model.prefill_chunk,
        cache="warm",
        kernels=engine.model.kernels,
        reference=references(engine.model.config, engine.device, engine.model.dtype, engine.model.window, engine.ranks),
        bandwidth=limits[0],
        matrix_rate=limits[1],
    )
    results = Results.open(run, file, tell)
    yield results.run
    warm = False
    for text in request.texts:
        cells = [{"row": "spec", "text": text, "spec": spec, "temperature": request.heat(text)} for spec in specs]
        if all(results.done(**cell) for cell in cells):
            continue
        if not warm:
            for spec in specs:
                converse(engine, spec, text, replace(request, longest=WARMING), settings.window, messages=1)
            warm = True
        for row in compare_drafts(engine, text, request, settings.window):
            yield results.add(row)


def implied(step_seconds: Mapping[int, float], depth: int, of: str) -> Row:
    """The speed-up that measured steps allow for published acceptance. step_seconds: by rows, 1 among them."""
    plain = step_seconds[1]
    found = {n: length * plain / step_seconds[n + 1] for n, length in enumerate(PUBLISHED, 1) if n + 1 in step_seconds}
    best = max(found, key=lambda n: found[n])
    listed = ", ".join(f"n={n} {ratio:.2f}" for n, ratio in found.items())
    return {
        "row": "spec",
        "depth": depth,
        "tokens": best + 1,
        "derived": True,
        "ratio": found[best],
        "speed_ups": found,
        "step_ratios": {n: seconds / plain for n, seconds in step_seconds.items()},
        "formula": f"speed-up for n drafts = published tokens a step (coding) x time of 1 row / time of n + 1 rows, "
        f"{of}, the draft itself for nothing: {listed}; best {found[best]:.2f} at n={best}",
    }
