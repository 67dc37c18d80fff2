"""Seconds per GRPO step: this library against TRL's GRPOTrainer, on the laptop model, in one run.

    python benchmarks/trl_step.py [--steps 8] [--out result.json]

Both sample 16 prompts x 8 responses of at most 64 tokens with the same weights, grade them with the same
function and take one AdamW step, in float32 on one thread; TRL generates with transformers' own `generate`.
The learning rate is so small that neither policy moves, so that response lengths stay those of the base
model. TRL cannot stop at a string, so the like-for-like row of ours does not either; the other row stops at
</answer>, as the training job does. The first step of each is left out. Steps alternate between the three in
blocks, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)
LR = 1e-9


class WithoutStop:
    """A sampler that generates on to the end-of-text token, as TRL does."""

    def __init__(self, sampler):
        self.sampler = sampler

    def generate(self, prompts, params, n=1):
        return self.sampler.generate(prompts, dataclasses.replace(params, stop=()), n)

    def sync_weights(self, model, step=None):
        self.sampler.sync_weights(model, step)

    def close(self):
        self.sampler.close()


def ours(steps: int, folder: str, model_name: str, stop: bool) -> tuple[list[float], list[float], float]:
    """(wall seconds of each step but the first, its CPU seconds, mean response length)."""
    from rlkit import Config, load_model, make_sampler, train

    model, tokenizer = load_model(model_name)
    sampler = make_sampler("transformers", model, tokenizer)
    config = Config(
        n_steps=steps + 1,
        n_val=0,
        lr=LR,
        run_dir=tempfile.mkdtemp(dir=folder),
        resume=False,
        rollouts_every=0,
        checkpoint_every=0,
    )
    run = train(config, model=model, tokenizer=tokenizer, sampler=sampler if stop else WithoutStop(sampler))
    table = run.metrics
    seconds = (
        table[["time_sync", "time_sample", "time_train"]].sum(axis=1).tolist()[1:]
    )  # wall time of a step
    return seconds, table.time_cpu.tolist()[1:], float(table.response_length.mean())


def theirs(steps: int, folder: str, model_name: str) -> tuple[list[float], list[float], float]:
    """The same for TRL: 4 microbatches of 32 rows, no KL term, no checkpointing, group-scaled rewards."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rlkit import load_model, load_problems, load_prompt

    model, tokenizer = load_model(model_name)
    prompt = load_prompt("r1_zero")
    problems = load_problems("laptop", "train", 1024)
    data = Dataset.from_list([{"prompt": prompt.fill(p.question), "gold": p.answer} for p in problems])

    def reward(completions, gold, **_):
        return [prompt.reward_fn(text, answer)["reward"] for text, answer in zip(completions, gold)]

    class Stopwatch(TrainerCallback):
        def __init__(self):
            self.marks = []

        def on_step_begin(self, *_, **__):
            self.marks.append((time.perf_counter(), time.process_time()))

        on_train_end = on_step_begin

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        per_device_train_batch_size=32,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=64,
        temperature=1.0,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_steps=steps + 1,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )
    watch = Stopwatch()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    logged = [
        row["completions/mean_length"]
        for row in trainer.state.log_history
        if "completions/mean_length" in row
    ]
    steps_taken = list(zip(watch.marks, watch.marks[1:]))[1:]
    return (
        [b[0] - a[0] for a, b in steps_taken],
        [b[1] - a[1] for a, b in steps_taken],
        float(statistics.mean(logged)) if logged else float("nan"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="timed steps in each block")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--model", default="laptop")
    parser.add_argument("--out", help="write the numbers to this JSON file, too")
    options = parser.parse_args()
    import trl

    rows = {
        name: {"wall": [], "cpu": [], "length": []}
        for name in ("TRL GRPOTrainer", "rlkit, no stop string", "rlkit, stop at </answer>")
    }
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.blocks):
            found = (
                theirs(options.steps, folder, options.model),
                ours(options.steps, folder, options.model, False),
                ours(options.steps, folder, options.model, True),
            )
            for row, (wall, cpu, length) in zip(rows.values(), found):
                row["wall"] += wall
                row["cpu"] += cpu
                row["length"].append(length)
    base = rows["TRL GRPOTrainer"]
    print(
        f"16 x 8 rollouts of at most 64 tokens, one thread, TRL {trl.__version__}, torch {torch.__version__}"
    )
    for name, row in rows.items():
        for kind in ("wall", "cpu"):
            row[f"{kind}_median"] = statistics.median(row[kind])
            row[f"{kind}_ratio"] = statistics.median(base[kind]) / row[f"{kind}_median"]
        print(
            f"{name:25s} CPU {row['cpu_median']:5.2f} s/step ({min(row['cpu']):.2f} to "
            f"{max(row['cpu']):.2f}), "
            f"{row['cpu_ratio']:.2f}x; wall {row['wall_median']:5.2f} s ({min(row['wall']):.2f} to "
            f"{max(row['wall']):.2f}), {row['wall_ratio']:.2f}x; n = {len(row['cpu'])}, "
            f"{statistics.mean(row['length']):.1f} tokens"
        )
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"trl": trl.__version__, "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
