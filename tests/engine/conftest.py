"""A model small enough to read: a decaying sum as recurrent state, one latent row per token, and logits from both.

Prefill and decode sum in different orders on purpose, as the real model does: a test that mixes up the paths sees
different bits.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from k3_sessions.config import StoreConfig
from k3_sessions.store import Store
from k3_sessions.types import FieldSpec, StateLayout
from torch import Tensor

from k3cli.chat.renderer import renderer_of
from k3cli.chat.tokenizer import Tokenizer
from k3cli.engine import events as ev
from k3cli.engine.conversation import Conversation
from k3cli.engine.drafting.drafter import Draft
from k3cli.engine.drafting.policy import Policy
from k3cli.engine.drafting.suffix import SuffixDrafter
from k3cli.engine.engine import Engine
from k3cli.engine.sampling import Sampling
from k3cli.engine.timeline import Timeline
from k3cli.model.random_weights import write_random_checkpoint

VOCAB = 512  # 256 bytes and 256 specials
WIDTH = 16
DECAY = 0.9
LAYOUT = StateLayout(
    (
        FieldSpec("recurrent", "checkpoint", (0,), (WIDTH,), "float32"),
        FieldSpec("kv_latent", "page", (1,), (WIDTH,), "float32"),
    )
)


class FakeState:
    def __init__(self) -> None:
        self.recurrent = torch.zeros(WIDTH)
        self.rows: list[Tensor] = []

    @property
    def position(self) -> int:
        return len(self.rows)

    def fork(self) -> FakeState:
        child = FakeState()
        child.recurrent = self.recurrent.clone()
        child.rows = list(self.rows)
        return child

    def reserve(self, n: int) -> None:
        """Lists have room."""

    def checkpoint(self) -> dict[str, Any]:
        return {"recurrent": self.recurrent.numpy()[None].copy()}

    def page_rows(self, field: str, start: int, stop: int) -> Any:
        assert field == "kv_latent"
        rows = torch.stack(self.rows[start:stop]) if stop > start else torch.zeros(0, WIDTH)
        return rows.numpy()[None].copy()

    def load(self, restored: Any) -> None:
        recurrent = torch.from_numpy(np.array(restored.checkpoint()["recurrent"][0]))
        rows = torch.from_numpy(np.array(restored.page_rows("kv_latent", 0, restored.position)[0]))
        self.recurrent, self.rows = recurrent, list(rows.unbind(0))


class FakeModel:
    def __init__(self, window: int = 4, seed: int = 0) -> None:
        maker = torch.Generator().manual_seed(seed)
        self.window = window
        self.prefill_chunk = 512
        self.embed = torch.randn(VOCAB, WIDTH, generator=maker)
        self.out = torch.randn(2 * WIDTH, VOCAB, generator=maker)
        self.calls: list[tuple[str, int]] = []
        self.script: dict[int, int] = {}  # position -> the id that is drawn there
        self.fail_at: int | None = None

    def state_layout(self) -> StateLayout:
        return LAYOUT

    def new_state(self) -> FakeState:
        return FakeState()

    def reply_at(self, position: int, ids: Sequence[int]) -> None:
        self.script.update(enumerate(ids, position))

    def _logits(self, recurrent: Tensor, rows: list[Tensor]) -> Tensor:
        mean = torch.stack(rows[-64:]).sum(0) / 64
        logits = torch.cat([recurrent, mean]) @ self.out
        if len(rows) in self.script:
            logits[self.script[len(rows)]] += 200
        return logits

    def prefill(self, ids: Tensor, state: FakeState, *, logits: str = "last") -> Tensor | None:
        self.calls.append(("prefill", len(ids)))
        vectors = self.embed[ids]
        n = len(ids)
        start, rows = state.recurrent.clone(), list(state.rows)
        if self.fail_at is not None and state.position + n > self.fail_at:
            state.recurrent += 1  # half a step
            raise RuntimeError("the device failed")
        out = []
        rows += (vectors * 0.5).unbind(0)
        for i in range(n) if logits == "all" else [n - 1]:
            powers = DECAY ** torch.arange(i, -1, -1, dtype=torch.float32)
            recurrent = start * DECAY ** (i + 1) + (powers[:, None] * vectors[: i + 1]).sum(0)
            out.append(self._logits(recurrent, rows[: len(rows) - n + i + 1]))
        state.recurrent, state.rows = recurrent, rows
        return torch.stack(out)

    def verify(self, ids: Tensor, state: FakeState) -> tuple[Tensor, Any]:
        assert 1 <= len(ids) <= self.window
        self.calls.append(("verify", len(ids)))
        child = state.fork()
        out = []
        for vector in self.embed[ids]:
            child.recurrent = child.recurrent * DECAY + vector
            child.rows.append(vector * 0.5)
            out.append(self._logits(child.recurrent, child.rows))
        return torch.stack(out), self.embed[ids]

    def commit(self, state: FakeState, log: Tensor, n: int) -> None:
        for vector in log[:n]:
            state.recurrent = state.recurrent * DECAY + vector
            state.rows.append(vector * 0.5)


@pytest.fixture
def fake_model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def make_fake_model() -> Callable[..., FakeModel]:
    return FakeModel


@pytest.fixture
def fake_timeline(fake_model: FakeModel) -> Callable[..., Timeline]:
    def make(tokens: list[int] | None = None, limit: int = 4096) -> Timeline:
        return Timeline(fake_model, fake_model.new_state(), tokens or [], limit=limit)

    return make


@pytest.fixture
def state_bytes() -> Callable[[Any], Mapping[str, bytes]]:
    """Every bit of a timeline's state, for equality."""

    def read(timeline: Timeline) -> Mapping[str, bytes]:
        source = timeline.snapshot()
        fields = {name: array.tobytes() for name, array in source.checkpoint().items()}
        return fields | {"kv_latent": source.page_rows("kv_latent", 0, source.position).tobytes()}

    return read


@pytest.fixture(scope="session")
def byte_vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder's small files: one rank per byte, K3's specials on top."""
    folder = tmp_path_factory.mktemp("vocab")
    lines = (base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k3"}))
    return folder


@pytest.fixture
def make_fake_engine(byte_vocab: Path) -> Callable[..., Engine]:
    def make(model: FakeModel | None = None, weights: str = "sha256:fake", limit: int = 8192) -> Engine:
        tokenizer = Tokenizer.from_dir(byte_vocab)
        return Engine(
            model or FakeModel(),
            tokenizer,
            renderer_of(tokenizer),
            weights_digest=weights,
            name="fake",
            context_limit=limit,
        )

    return make


@pytest.fixture
def fake_engine(make_fake_engine: Callable[..., Engine]) -> Engine:
    return make_fake_engine()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = Store.open(tmp_path / "store", config=StoreConfig(free_floor_bytes=0, free_floor_share=0.0))
    yield found
    found.close()


@pytest.fixture
def talk() -> Callable[..., list[ev.Event]]:
    """Run a turn to its end. reply: what the fake model is made to say, as text (the ids that end it are added)."""

    def run(
        conversation: Conversation,
        text: str | None = "Hello",
        reply: str | Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> list[ev.Event]:
        asked = messages if messages is not None else [{"role": "user", "content": text}]
        events = []
        for event in conversation.turn(
            asked, sampling or Sampling(seed=7, max_tokens=20 if reply is None else 200), **options
        ):
            if isinstance(event, ev.Prompt) and reply is not None:
                ids = answer_ids(conversation.engine, reply) if isinstance(reply, str) else reply
                conversation.engine.model.reply_at(event.reused + event.prefill, ids)
            events.append(event)
        return events

    return run


def answer_ids(engine: Engine, text: str, thinking: bool = True) -> list[int]:
    """The ids of an answer after the generation prompt, through the renderer."""
    renderer = engine.renderer
    context = renderer.new_context(thinking)
    whole = renderer.render_message({"role": "assistant", "content": text}, context)
    return whole[len(renderer.generation_prompt(thinking)) :]


@pytest.fixture
def answer() -> Callable[..., list[int]]:
    return answer_ids


TINY = {
    "model_type": "kimi_k3",
    "architectures": ["KimiK3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "kimi_linear",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "attn_res_block_size": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-05,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "gate_lower_bound": -5.0,
            "head_dim": 32,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
    },
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, byte_vocab: Path) -> Path:
    """A whole model folder: K3 layout, random weights, a vocabulary of bytes."""
    folder = write_random_checkpoint(tmp_path_factory.mktemp("tiny"), TINY, seed=5, shards=1)
    (folder / "tiktoken.model").write_bytes((byte_vocab / "tiktoken.model").read_bytes())
    return folder


@pytest.fixture(scope="session")
def tiny_engine(tiny_model: Path) -> Iterator[Engine]:
    """The same in this process. One thread, as in the processes that tests start."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Engine.load(tiny_model, device="cpu")
    torch.set_num_threads(before)


class Guesser:
    """A drafter that says what a function of (position, k) tells it to: ids for position + 1, position + 2, ..."""

    needs_hidden = False

    def __init__(self, name: str, guess: Callable[[int, int], Sequence[int]]) -> None:
        self.name = name
        self.guess = guess

    def begin(self, context: Sequence[int], sampling: Sampling) -> None:
        pass

    def propose(self, context: Sequence[int], position: int, k: int) -> Draft:
        assert position == len(context) - 1
        # Sure of itself, so that the policy hands every guess on.
        ids = list(self.guess(position, k))
        return Draft(ids, [1.0] * len(ids))

    def observe(self, accepted: Sequence[int], position: int, hidden: Any) -> None:
        assert len(accepted) >= 1

    def fork(self) -> Guesser:
        return self


def hostile_drafters(truth: Sequence[int], vocab: int, special: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """Makers of drafters that try to lead decoding astray. truth: every token of a plain run; special: control ids."""
    rng = random.Random(3)

    def right(position: int, k: int) -> list[int]:
        return list(truth[position + 1 : position + 1 + k])

    def beyond(position: int, k: int) -> list[int]:
        """The whole truth, and the next turn behind the end of the message."""
        return (right(position, k) + list(special))[:k]

    def half(position: int, k: int) -> list[int]:
        n = rng.randrange(k + 1)
        return [*right(position, n), *(rng.randrange(vocab) for _ in range(k - n))][:k]

    guesses: dict[str, Callable[[int, int], Sequence[int]]] = {
        "right": right,
        "wrong": lambda position, k: [(token + 1) % vocab for token in right(position, k)],
        "random": lambda position, k: [rng.randrange(vocab) for _ in range(k)],
        "special": lambda position, k: [special[(position + i) % len(special)] for i in range(k)],
        "beyond": beyond,
        "half": half,
    }
    makers: dict[str, Callable[[], Any]] = {name: partial(Guesser, name, guess) for name, guess in guesses.items()}
    return makers | {"suffix": SuffixDrafter}


@pytest.fixture
def hostile() -> Callable[..., dict[str, Callable[[], Any]]]:
    return hostile_drafters


@pytest.fixture
def reckless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft is verified, whatever it costs."""
    monkeypatch.setattr(Policy, "choose", lambda self, drafts, confidence, *_: 1 + min(drafts, self.rows - 1))
    monkeypatch.setattr(Policy, "resting", lambda self: False)
    monkeypatch.setattr(Policy, "asleep", lambda self: False)
