"""`kda.step` and `kda.commit` at K3's layer (96 heads of 128) and at shards of it, against FLA's recurrent kernel and
against a variant that keeps a state behind every row of a window instead of a log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from k3_kernels import kda
from k3_kernels.bench.harness import Case

K = V = 128
W = 8
DEPTH = 69
Run = Callable[[], object]


@dataclass
class Layers:
    """All KDA layers of a model that decodes one sequence: 69 times everything, so that a walk through them is cold."""

    heads: int
    recurrent: Tensor
    conv: Tensor
    log: kda.StepLog
    w: kda.StepWeights
    projected: Tensor
    f: Tensor

    @staticmethod
    def random(heads: int, state: torch.dtype, depth: int = DEPTH) -> Layers:
        """bf16 activations; x, gate and b are slices of one projection, as in the network."""
        torch.manual_seed(0)
        width = 3 * heads * K

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=dtype)

        fp32 = torch.float32
        log = kda.StepLog(normal(depth, W, width), normal(depth, W, heads, K), normal(depth, W, heads))
        w = kda.StepWeights(
            normal(depth, 4, width, dtype=fp32).mT * 0.5,
            normal(depth, heads, dtype=fp32),
            normal(depth, heads, K, dtype=fp32) - 1,
            normal(depth, V, dtype=fp32),
            -5.0,
            1e-5,
        )
        recurrent = normal(1, depth, heads, V, K, dtype=state)
        projected = normal(depth, W, width + heads * V + 128 + heads)
        return Layers(heads, recurrent, normal(1, depth, 3, width), log, w, projected, normal(depth, W, heads, K))

    def weights(self, layer: int) -> kda.StepWeights:
        w = self.w
        return kda.StepWeights(
            w.conv[layer], w.A_log[layer], w.dt_bias[layer], w.o_norm[layer], w.lower_bound, w.norm_eps
        )

    def rows(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, f, b, gate of a layer."""
        width = 3 * self.heads * K
        x, gate, _, b = self.projected[layer].split([width, self.heads * V, 128, self.heads], -1)
        return x, self.f[layer], b, gate.unflatten(1, (self.heads, V))

    def steps(self, step: Callable[..., Tensor], accepted: int, n: int) -> list[Run]:
        """One call a layer: the window at position 1000 behind `accepted` rows of the log."""
        cursor = torch.tensor([1000, accepted, 0, 0], device="cuda")
        return [
            partial(
                step,
                *self.rows(i),
                self.weights(i),
                self.recurrent[:, i],
                self.conv[:, i],
                self.log.layer(i),
                cursor,
                n,
            )
            for i in range(self.recurrent.shape[1])
        ]

    def commits(self, commit: Callable[..., None], accepted: int) -> list[Run]:
        cursor = torch.tensor([1000, accepted, 0, 0], device="cuda")
        return [partial(commit, self.recurrent, self.conv, self.log, self.w, cursor)]

    def bytes(self, accepted: int, n: int) -> int:
        """What one layer must move: state in and out, rows of the log in and out, projections, output, weights."""
        row = (3 * self.heads * K + self.heads * K + self.heads) * 2
        state = self.recurrent[0, 0].nbytes * (2 if accepted else 1)
        rows = (accepted + n) * row + n * row + 2 * n * self.heads * V * 2
        return state + rows + 2 * self.conv[0, 0].nbytes + sum(part[0].nbytes for part in self.w[:4])

    def flops(self, accepted: int, n: int) -> int:
        """5 operations an element for a replayed row, 7 for a live one."""
        return self.recurrent[0, 0].numel() * (5 * accepted + 7 * n)

    def peer(self, tokens: int) -> list[Run]:
        """FLA's recurrent kernel on as many tokens, state in and out, gate, l2 norm and beta inside; no convolution,
        no output norm. Empty without FLA."""
        try:
            from fla.ops.kda import fused_recurrent_kda
        except ImportError:
            return []
        shape = (1, tokens, self.heads, K)
        runs: list[Run] = []
        for i in range(self.recurrent.shape[1]):
            q, k, v = (part.reshape(shape) for part in self.log.x[i, :tokens].chunk(3, -1))
            runs.append(
                partial(
                    fused_recurrent_kda,
                    q,
                    k,
                    v,
                    self.f[i, :tokens].unsqueeze(0),
                    self.log.b[i, :tokens].unsqueeze(0),
                    A_log=self.w.A_log[i],
                    dt_bias=self.w.dt_bias[i].flatten(),
                    initial_state=self.recurrent[:, i].float(),
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                    use_gate_in_kernel=True,
                    use_beta_sigmoid_in_kernel=True,
                    lower_bound=-5.0,
                    state_v_first=True,
                )
            )
        return runs

    def snapshots(self) -> list[Run]:
        """The same window with a state stored behind every row: as many layers as make a walk cold."""
        from k3_kernels.bench.kda_snapshots_triton import snapshot_step

        cursor = torch.tensor([1000, W, 0, 0], device="cuda")
        depth = 12
        states = torch.randn(depth, W, self.heads, V, K, device="cuda")
        return [
            partial(snapshot_step, *self.rows(i), self.weights(i), states[i], self.conv[0, i], cursor, W)
            for i in range(depth)
        ]


def cases() -> list[Case]:
    """The window of eight behind eight accepted rows is the worst case; plain decoding is one behind one."""
    found: list[Case] = []
    for heads in (96, 24, 12):
        for state, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            layers = Layers.random(heads, state)
            whole = heads == 96
            for accepted, n in ((1, 1), (0, 8), (8, 8)):
                aims = {("fp32", 1, 1): 7.0, ("bf16", 1, 1): 5.5, ("fp32", 8, 8): 8.0}
                target = aims.get((name, accepted, n)) if whole else None
                peer = layers.peer(n) if whole and state == torch.float32 and accepted == n else []
                found.append(
                    Case(
                        "kda.step",
                        f"{heads} heads, {name}, {accepted} accepted, n {n}",
                        layers.steps(kda.step, accepted, n),
                        layers.bytes(accepted, n),
                        layers.flops(accepted, n),
                        peer,
                        f"FLA recurrent, {n} tokens",
                        target,
                    )
                )
            if whole and state == torch.float32:
                one = layers.recurrent[0, 0].nbytes
                found.append(
                    Case(
                        "kda.step, snapshots",
                        f"{heads} heads, {name}, n {W}",
                        layers.snapshots(),
                        layers.bytes(0, W) + W * one,
                        layers.flops(0, W),
                        note=f"snapshots {DEPTH * W * one / 1e9:.2f} GB",
                    )
                )
            if whole:
                for accepted in (1, 8):
                    found.append(
                        Case(
                            "kda.commit",
                            f"{DEPTH} layers, {name}, {accepted} accepted",
                            layers.commits(kda.commit, accepted),
                            DEPTH * layers.bytes(accepted, 0),
                            DEPTH * layers.flops(accepted, 0),
                            target_us=350.0,
                            note=f"log {layers.log.nbytes / 1e6:.1f} MB",
                        )
                    )
    return found
