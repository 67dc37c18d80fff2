"""The memory estimate against what a train step really takes on the CPU, and README's table."""

import json
import os
import subprocess
import sys

import pytest

from rlkit.jobs.memory import memory_table

# one process imports once and forks for each case; a step whose rows teach nothing comes first, so that
# AdamW's moments are there; the peak is that of the second
SCRIPT = """
import json, os, resource, sys
import psutil, torch
import peft
from transformers import Olmo2Config, Olmo2ForCausalLM, Qwen2Config, Qwen2ForCausalLM
from rlkit import ALGORITHMS, Config
from rlkit.batch import RolloutBatch
from rlkit.grpo import train_step
from rlkit.jobs import loop
from rlkit.jobs.memory import memory_estimate, memory_peak, shape_of
from rlkit.support.adapters import add_lora
from rlkit.support.recompute import recomputed_layers

ROWS, PROMPT, RESPONSE = 8, 64, 64
KINDS = {"olmo2": (Olmo2ForCausalLM, Olmo2Config, 8), "qwen2": (Qwen2ForCausalLM, Qwen2Config, 2)}

def case(kind, values, hidden=512):
    before = psutil.Process().memory_info().rss
    config = Config(rollout_batch_size=ROWS, group_size=ROWS, gradient_accumulation_steps=1,
                    max_tokens=RESPONSE, **values).resolved()
    model_class, config_class, kv_heads = KINDS[kind]
    model = model_class(config_class(
        vocab_size=2000, hidden_size=hidden, num_hidden_layers=8, num_attention_heads=8, bos_token_id=0,
        num_key_value_heads=kv_heads, intermediate_size=4 * hidden, pad_token_id=0, eos_token_id=1)).eval()
    model.to(getattr(torch, config.dtype))
    if config.lora_rank:
        add_lora(model, config.lora_rank)
    if config.gradient_checkpointing:
        recomputing = recomputed_layers(model)  # kept: it would end with the generator
        recomputing.__enter__()
    ids = torch.randint(2, 2000, (ROWS, PROMPT + RESPONSE))
    ids[:, :PROMPT] = ids[0, :PROMPT]
    mask = (torch.arange(PROMPT + RESPONSE - 1) >= PROMPT - 1).expand(ROWS, -1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    for advantage in (0.0, 1.0):
        batch = RolloutBatch(ids[:, :-1], ids[:, 1:], mask)
        batch.advantages = torch.full((ROWS,), advantage)
        train_step(model, optimizer, batch, ALGORITHMS["grpo"], max_grad_norm=1.0,
                   autocast_dtype=loop.autocast_dtype(config))
    lengths = {"longest": PROMPT, "mean": PROMPT}
    memory = memory_estimate(config, shape_of(model), lengths, torch.device("cpu"), own_sampler=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, memory_peak(memory)

torch.set_num_threads(1)
for values in (dict(lora_rank=8, autocast=True), dict(dtype="bfloat16", gradient_checkpointing=True), {}):
    case("olmo2", values, hidden=64)  # what libraries take when they are first used is not the model's
for kind, values in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(case(kind, values)).encode())
        os._exit(0)
    os.close(write)
    print(os.fdopen(read).read(), flush=True)
    os.wait()
"""

CASES = {
    "float32": ("olmo2", {}),
    "float32, layers recomputed": ("olmo2", dict(gradient_checkpointing=True)),
    "a LoRA": ("olmo2", dict(lora_rank=8)),
    "a LoRA, layers recomputed": ("qwen2", dict(lora_rank=8, gradient_checkpointing=True)),
    "few keys and values": ("qwen2", {}),
    "bfloat16 autocast": ("qwen2", dict(autocast=True)),
    "bfloat16, a LoRA": ("olmo2", dict(dtype="bfloat16", lora_rank=8)),
}


@pytest.mark.slow
def test_the_estimate_is_within_a_quarter_of_what_a_step_takes():
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(list(CASES.values()))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    ratios = {}
    for name, line in zip(CASES, done.stdout.splitlines(), strict=True):
        measured, estimated = json.loads(line)
        ratios[name] = estimated / measured
    assert all(1 / 1.25 < ratio < 1.25 for ratio in ratios.values()), ratios


def test_readme_has_the_table_of_what_fits(repo):
    lines = (repo / "README.md").read_text().splitlines()
    assert [line for line in memory_table() if line not in lines] == []
