"""Seconds per train step: grpo_train_step against scoring the whole batch plainly, in one run.

    python benchmarks/train_step.py [--model NAME_OR_PATH] [--repeats 7] [--threads 1] [--out result.json]

The batch has the laptop testbed's shape: 16 prompts x 8 responses; prompts of about 134 tokens, of which the
first 90 are the same for all; responses of 20 to 64 tokens. Time depends on these lengths and not on which
tokens they are, so the tokens are random; without --model the weights are, too (an Olmo2 of the laptop
model's size).

"plain" is the step one would write first: all 128 rows padded into one forward pass, log_softmax of all
logits in float32, backward, clip, AdamW. Each way is timed in turn, `repeats` times over, so that a busy
machine slows all alike; reported are medians of CPU seconds and the ratio to plain. The gradients of all ways
are compared as well.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from rlkit import grpo_train_step, tokenize_prompt_and_output

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


class Ids:
    pad_token_id, eos_token_id = 0, 1


def plain_step(model, optimizer, prompts, responses, advantages):
    """The whole batch in one forward pass, nothing pruned, sorted or shared."""
    batch = tokenize_prompt_and_output(None, None, Ids, prompt_token_ids=prompts, output_token_ids=responses)
    mask = batch["response_mask"]
    log_p = model(batch["input_ids"]).logits.float().log_softmax(dim=-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(dim=-1)[mask].mean().item()
    log_probs = log_p.gather(2, batch["labels"][..., None])[..., 0]
    loss = ((-advantages[:, None] * log_probs * mask).sum(dim=1) / mask.sum(dim=1)).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad()
    return norm, entropy


def our_step(model, optimizer, prompts, responses, advantages, steps=4, **options):
    _, metadata = grpo_train_step(
        model,
        Ids,
        optimizer,
        steps,
        1.0,
        None,
        None,
        None,
        None,
        GROUP_SIZE,
        prompt_token_ids=prompts,
        response_token_ids=responses,
        advantages=advantages,
        **options,
    )
    return metadata["grad_norm"], metadata["token_entropy"]


WAYS = {
    "plain, whole batch": plain_step,
    "ours, prompts not shared": lambda *rest: our_step(*rest, shared_prefix=False),
    "ours": our_step,
    "ours, one microbatch": lambda *rest: our_step(*rest, steps=1),
}


def measure(model, prompts, responses, advantages, repeats):
    models = {name: copy.deepcopy(model) for name in WAYS}
    optimizers = {
        name: torch.optim.AdamW(m.parameters(), lr=1e-9, weight_decay=0.0) for name, m in models.items()
    }
    seconds, results = {name: [] for name in WAYS}, {}
    for repeat in range(repeats + 1):
        for name, way in WAYS.items():
            start = time.process_time()
            results[name] = way(models[name], optimizers[name], prompts, responses, advantages)
            if repeat:  # the first one warms up
                seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    plain = next(iter(WAYS))
    return [
        {
            "way": name,
            "cpu_seconds": round(medians[name], 4),
            "times_faster": round(medians[plain] / medians[name], 2),
            "grad_norm_difference": abs(results[name][0] / results[plain][0] - 1),
            "entropy_difference": abs(results[name][1] - results[plain][1]),
        }
        for name in WAYS
    ]


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
    advantages = torch.randn(len(prompts), generator=torch.Generator().manual_seed(1))
    some_decided = advantages.clone()
    some_decided[: 2 * GROUP_SIZE] = (
        0.0  # 2 of 16 groups all right or all wrong, as on-policy training has them
    )
    most_wrong = advantages.clone()
    most_wrong[torch.rand(len(prompts), generator=torch.Generator().manual_seed(2)) < 0.6] = (
        0.0  # as RFT has them
    )
    report = {
        "threads": args.threads,
        "torch": torch.__version__,
        "rows": len(prompts),
        "tokens": sum(map(len, prompts)) + sum(map(len, responses)),
        "response_tokens": sum(map(len, responses)),
    }
    for title, values in (
        ("every row learns", advantages),
        ("2 of 16 groups decided", some_decided),
        ("60% of the rows decided", most_wrong),
    ):
        report[title] = measure(model, prompts, responses, values, args.repeats)
        print(f"\n{title} ({args.repeats} repeats, {args.threads} thread(s), median CPU seconds)")
        for row in report[title]:
            print(
                f"  {row['way']:28s} {row['cpu_seconds']:7.3f} s  {row['times_faster']:5.2f}x   grad norm "
                f"and entropy"
                f" off by {row['grad_norm_difference']:.0e}, {row['entropy_difference']:.0e}"
            )
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
