"""The whole network with its Triton kernels, interpreted on a CPU: near the reference, and equal however it is cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from k3cli.model.random_weights import write_random_checkpoint
from k3cli.model.weights import load_model

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

CHILD = """
import json, sys
import torch
torch.set_num_threads(1)
from k3cli.model.choices import kernel_choices
from k3cli.model.weights import load_model

folder, out, ids = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[3]))
model = load_model(folder).model
found = kernel_choices(model.config, model.device, model.dtype, model.window)
print(json.dumps([name for name, choice in found.items() if not choice.kernel]))
start, end = 2, ids.numel()
base = model.new_state()
first = model.prefill(ids[:start], base)

def run(cuts):
    state, rows = base.fork(), []
    for n, keep in cuts:
        logits, log = model.verify(ids[state.position : state.position + n], state)
        model.commit(state, log, keep)
        rows.append(logits[:keep])
    return torch.cat(rows), state.checkpoint()

plain, left = run([(1, 1)] * (end - start))
windows, right = run([(3, 1), (2, 2)])
same = [torch.equal(plain, windows)] + [bool((left[name] == right[name]).all()) for name in left]
print(json.dumps(same))
torch.save(torch.cat((first[None], plain)), out)
"""


def test_the_network_with_interpreted_kernels(tmp_path: Path, k3_config: dict):
    text = k3_config["text_config"]
    text |= {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "vocab_size": 64}
    text["linear_attn_config"] |= {"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 32, "num_heads": 2}
    folder = write_random_checkpoint(tmp_path / "model", k3_config, seed=3)
    ids = torch.randint(0, 64, (5,), generator=torch.Generator().manual_seed(4))
    wanted = {"TRITON_INTERPRET": "1", "K3_KERNELS": "triton", "OMP_NUM_THREADS": "1"}
    environment = os.environ | wanted | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", CHILD, str(folder), str(tmp_path / "rows.pt"), json.dumps(ids.tolist())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    references, same = (json.loads(line) for line in done.stdout.splitlines())
    assert references == ["mla.prefill", "moe.experts_grouped", "linear.few"], "libraries; 32 columns; bf16 on Hopper"
    assert same == [True] * len(same)
    model = load_model(folder).model
    expected = model.prefill(ids, model.new_state(), logits="all")
    found = torch.load(tmp_path / "rows.pt")
    assert np.abs((found - expected[1:]).numpy()).max() < 1e-4 * float(expected.abs().max())
