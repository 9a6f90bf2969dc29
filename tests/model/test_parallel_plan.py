"""The parallel plan: every element of every tensor on the ranks that need it, and refusals that list what works."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from k3cli.config import K3_SHAPE
from k3cli.errors import UsageError
from k3cli.model.blocks import Weights
from k3cli.model.config import ModelConfig
from k3cli.model.parallel import check_world, experts_by_width, part, worlds

K3 = ModelConfig.from_dir(K3_SHAPE)
ON_EVERY_RANK = (
    *("f_a_proj.weight", "o_norm.weight", "q_a_proj.weight", "q_a_layernorm.weight", "kv_a_proj_with_mqa.weight"),
    *("kv_a_layernorm.weight", "layernorm.weight", "gate.weight", "e_score_correction_bias", "_res_norm.weight"),
    *("_res_proj.weight", "routed_expert_down_proj.weight", "routed_expert_up_proj.weight", "model.norm.weight"),
    *("routed_expert_norm.weight", "output_attn_res_norm.weight"),
)


def small(experts: int = 8, intermediate: int = 128) -> ModelConfig:
    """K3's structure at sizes four ranks can share; four layers."""
    assert K3.moe is not None
    return dataclasses.replace(
        K3,
        hidden=48,
        vocab=134,
        intermediate=64,
        layers=("kda", "kda", "mla", "kda"),
        moe_layers=(False, True, True, True),
        attn_res_block=2,
        kda=dataclasses.replace(K3.kda, heads=4, head_dim=6),
        mla=dataclasses.replace(K3.mla, heads=8, q_rank=20, kv_rank=14, nope_dim=10, pe_dim=4, v_dim=12),
        moe=dataclasses.replace(K3.moe, experts=experts, top_k=3, intermediate=intermediate, shared=256, latent=96),
    )


def test_k3_can_be_split_into_powers_of_two_up_to_32():
    assert worlds(K3) == (1, 2, 4, 8, 16, 32)
    with pytest.raises(UsageError, match=r"3 GPUs; expected .*: 1, 2, 4, 8, 16, 32"):
        check_world(K3, 3)
    check_world(K3, 32)


def test_heads_of_either_kind_and_experts_limit_the_world():
    assert worlds(small()) == (1, 2, 4)
    assert worlds(dataclasses.replace(small(), kda=dataclasses.replace(K3.kda, heads=6))) == (1, 2)
    assert worlds(small(experts=7)) == (1,)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("intermediate", [128, 96])
def test_ranks_cover_every_element_once_or_all_hold_it(world: int, intermediate: int):
    """96 columns of an expert are three groups of 32: two ranks can't share them, so experts get owners."""
    config = small(intermediate=intermediate)
    assert experts_by_width(config, 4) == (intermediate == 128)
    for name, sink in Weights(config, torch.device("meta"), torch.bfloat16).sinks().items():
        shape = tuple(sink.shape)
        parts = [part(config, name, shape, rank, world) for rank in range(world)]
        whole = [p for p in parts if p.axis is None]
        if whole:
            owned = ".experts." in name and world > 1
            assert len(whole) == (1 if owned else world), name
            if world > 1 and not owned:
                assert name.endswith(ON_EVERY_RANK), name
            continue
        assert not name.endswith(ON_EVERY_RANK), name
        (axis,) = {p.axis for p in parts}
        assert axis is not None
        covered = [i for p in parts for i in range(p.start, p.stop)]
        assert covered == list(range(shape[axis])), name
        assert all(p.shape(shape)[axis] == p.stop - p.start for p in parts)
        if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            assert len({p.stop - p.start for p in parts}) == 1, name


def test_matrices_that_meet_are_cut_along_the_same_dimension():
    """Columns of o_proj are the rows of q, k, v and the gate; w2's packed columns are the rows of w1 and w3."""
    config, world = small(), 4
    shapes = {name: tuple(s.shape) for name, s in Weights(config, torch.device("meta"), torch.bfloat16).sinks().items()}

    def cut(name: str, rank: int) -> tuple[int | None, int, int]:
        found = part(config, name, shapes[name], rank, world)
        return found.axis, found.start, found.stop

    for rank in range(world):
        start, stop = 6 * rank, 6 * (rank + 1)
        attention = "model.layers.0.self_attn"
        for name in ("q_proj.weight", "v_proj.weight", "g_proj.weight", "f_b_proj.weight", "k_conv1d.weight"):
            assert cut(f"{attention}.{name}", rank) == (0, start, stop)
        assert cut(f"{attention}.dt_bias", rank) == (0, rank, rank + 1)  # [H, K]
        assert cut(f"{attention}.A_log", rank) == (0, rank, rank + 1)
        assert cut(f"{attention}.o_proj.weight", rank) == (1, start, stop)
        expert = "model.layers.1.block_sparse_moe.experts.5"
        assert cut(f"{expert}.w1.weight_packed", rank) == (0, 32 * rank, 32 * (rank + 1))
        assert cut(f"{expert}.w2.weight_packed", rank) == (1, 16 * rank, 16 * (rank + 1))
        assert cut(f"{expert}.w2.weight_scale", rank) == (1, rank, rank + 1)
        assert cut("model.layers.2.self_attn.kv_b_proj.weight", rank) == (0, 44 * rank, 44 * (rank + 1))
        assert cut("model.layers.2.self_attn.o_proj.weight", rank) == (1, 24 * rank, 24 * (rank + 1))


def test_vocabulary_is_padded_on_the_last_rank_only():
    config = small()
    sizes = [part(config, "lm_head.weight", (134, 48), rank, 4).shape((134, 48))[0] for rank in range(4)]
    assert sizes == [34, 34, 34, 32]
