"""Seconds per train step, against scoring the whole batch plainly, by the share of rows that teach.

    python benchmarks/train_step.py [--model NAME_OR_PATH] [--repeats 7] [--threads 1] [--out result.json]

The batch has the laptop testbed's shape: 16 prompts x 8 responses; prompts of about 134 tokens, of which the
first 90 are the same for all; responses of 20 to 64 tokens. Time depends on these lengths and not on which
tokens they are, so the tokens are random; without --model the weights are, too (an Olmo2 of the laptop
model's size).

"plain" is the step one would write first: all 128 rows padded into one forward pass, log_softmax of all
logits in float32, backward, clip, AdamW. Each way is timed in turn, `repeats` times over, so that a busy
machine slows all alike; reported are medians of CPU seconds, the ratio to plain, and the cost relative to the
batch in which every row teaches. The gradients of all ways are compared as well. "Decided" rows have
advantage
zero: whole groups of them on-policy, where all answers are right or all wrong; single rows with RFT.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from rlkit import ALGORITHMS, get_response_log_probs
from rlkit import grpo as grpo_module
from rlkit.batch import RolloutBatch
from rlkit.tokenization import join_and_shift

N_PROMPTS, GROUP_SIZE = 16, 8


def laptop_sized_model():
    from transformers import Olmo2Config, Olmo2ForCausalLM

    torch.manual_seed(0)
    return Olmo2ForCausalLM(
        Olmo2Config(
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=640,
            max_position_embeddings=1024,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def make_rollouts(vocabulary, seed=0):
    """(prompt ids, response ids) of 128 rows."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(2, vocabulary, (n,), generator=generator).tolist()

    def length(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    start, end, prompts, responses = draw(90), draw(18), [], []
    for _ in range(N_PROMPTS):
        prompt = start + draw(length(19, 33)) + end
        prompts += [prompt] * GROUP_SIZE
        responses += [draw(length(20, 64)) for _ in range(GROUP_SIZE)]
    return prompts, responses


def plain_step(model, optimizer, batch):
    """The whole batch in one forward pass, nothing pruned, sorted or shared."""
    mask = batch.response_mask
    log_p = model(batch.input_ids).logits.float().log_softmax(dim=-1)
    log_probs = log_p.gather(2, batch.labels[..., None])[..., 0]
    loss = ((-batch.advantages[:, None] * log_probs * mask).sum(dim=1) / mask.sum(dim=1)).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def our_step(model, optimizer, batch, steps=4):
    options = dict(gradient_accumulation_steps=steps, max_grad_norm=1.0)
    return grpo_module.train_step(model, optimizer, batch, ALGORITHMS["grpo"], **options)[1]["grad_norm"]


def not_shared(model, optimizer, batch):
    with mock.patch.object(grpo_module, "get_shared_prefix_log_probs", get_response_log_probs):
        return our_step(model, optimizer, batch)


WAYS = {
    "plain, whole batch": plain_step,
    "ours, prompts not shared": not_shared,
    "ours": our_step,
    "ours, one microbatch": lambda *rest: our_step(*rest, steps=1),
}


def measure(model, batch, repeats):
    models = {name: copy.deepcopy(model) for name in WAYS}
    optimizers = {
        name: torch.optim.AdamW(m.parameters(), lr=1e-9, weight_decay=0.0) for name, m in models.items()
    }
    seconds, norms = {name: [] for name in WAYS}, {}
    for repeat in range(repeats + 1):
        for name, way in WAYS.items():
            start = time.process_time()
            norms[name] = way(models[name], optimizers[name], batch)
            if repeat:  # the first one warms up
                seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    plain = next(iter(WAYS))
    return {
        name: {
            "cpu_seconds": round(medians[name], 4),
            "times_faster": round(medians[plain] / medians[name], 2),
            "grad_norm_difference": abs(norms[name] - norms[plain]) / max(norms[plain], 1e-30),
        }
        for name in WAYS
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.model:
        from rlkit import load_model

        model, _ = load_model(args.model)
    else:
        model = laptop_sized_model()
    prompts, responses = make_rollouts(model.config.vocab_size)
    n_rows, n_groups = len(prompts), N_PROMPTS
    advantages = torch.randn(n_rows, generator=torch.Generator().manual_seed(1))
    chance = torch.rand(n_rows, generator=torch.Generator().manual_seed(2))
    group = torch.arange(n_rows) // GROUP_SIZE
    decided = {
        "every row teaches": torch.zeros(n_rows, dtype=torch.bool),
        "25 % decided (4 of 16 groups)": group < n_groups // 4,
        "60 % decided (rows at random)": chance.argsort().argsort() < round(0.6 * n_rows),
        "62 % decided (10 of 16 groups)": group < 10,
        "all rows decided": torch.ones(n_rows, dtype=torch.bool),
    }
    batch = RolloutBatch(**join_and_shift(prompts, responses, 0))
    batch.entropies = torch.zeros(batch.labels.shape)  # as the in-process sampler gives them
    report = {
        "threads": args.threads,
        "torch": torch.__version__,
        "rows": n_rows,
        "tokens": sum(map(len, prompts)) + sum(map(len, responses)),
        "response_tokens": sum(map(len, responses)),
        "repeats": args.repeats,
    }
    print(f"median CPU seconds of {args.repeats} repeats, {args.threads} thread(s)")
    for title, rows in decided.items():
        batch.advantages = advantages.masked_fill(rows, 0.0)
        report[title] = measure(model, batch, args.repeats)
        print(f"\n{title}: {int((~rows).sum())} of {n_rows} rows teach")
        for name, row in report[title].items():
            row["cost"] = round(row["cpu_seconds"] / report["every row teaches"][name]["cpu_seconds"], 3)
            print(
                f"  {name:26s} {row['cpu_seconds']:7.3f} s  {row['times_faster']:6.2f}x"
                f"  cost {row['cost']:.2f}"
                f"  grad norm off by {row['grad_norm_difference']:.0e}"
            )
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
