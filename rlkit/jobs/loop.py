"""What the training loop asks around the algorithm: order, schedule, and rows to log."""

from contextlib import nullcontext

import numpy as np
import torch

from rlkit.batch import RolloutBatch
from rlkit.jobs.planning import prompt_lengths
from rlkit.support.running import stream

VAL_ROLLOUTS = 16  # validation responses kept per evaluation


def prompts_of_step(problems: list, n_prompts: int, step: int, seed: int) -> list:
    """The problems of step 1, 2, ...: epoch after epoch, each shuffled by itself, whole batches only."""
    epoch, place = divmod(step - 1, len(problems) // n_prompts)
    order = np.random.default_rng(stream(seed, epoch, "epoch")).permutation(len(problems))
    return [problems[i] for i in order[place * n_prompts : (place + 1) * n_prompts]]


def train_batches(n_rows: int, size: int, seed: int) -> list[list[int]]:
    """The rows of each train batch: all in order if there is one, else shuffled and cut."""
    rows = np.arange(n_rows) if size == n_rows else np.random.default_rng(seed).permutation(n_rows)
    return rows.reshape(-1, size).tolist()


def evaluation_due(config, step: int) -> bool:
    if not config.n_val or (step == 0 and not config.eval_at_start):
        return False
    return step in (0, config.n_steps) or bool(config.eval_every and step % config.eval_every == 0)


def rollouts_due(config, step: int) -> bool:
    """The first and the last step, and every ``rollouts_every``-th."""
    return bool(config.rollouts_every) and (step in (1, config.n_steps) or step % config.rollouts_every == 0)


def sampler_options(config, tokenizer, problems, prompt) -> dict:
    """What ``make_sampler`` is told beyond the model: for vLLM, how weights travel, in which type to compute, and
    the length to make room for, without which it reserves memory for the longest sequence the model could hold."""
    if config.sampler != "vllm":
        return {}
    longest = prompt_lengths(tokenizer, problems, prompt)["longest"] + config.max_tokens
    dtype = "bfloat16" if config.autocast else None
    return {"weight_sync": config.weight_sync, "dtype": dtype, "max_model_len": longest}


def autocast(config, model):
    """The precision that rollouts are computed in: the same as the train step's."""
    device_type = next(model.parameters()).device.type
    return torch.autocast(device_type, dtype=torch.bfloat16) if config.autocast else nullcontext()


def training_rows(step: int, batch: RolloutBatch, groups, texts, problems, rewards) -> list[dict]:
    """A rollout batch for rollouts.jsonl."""
    completions = [completion for group in groups for completion in group]
    names = ("step", "split", "group", "prompt", "response", "gold", "advantage", "length", "finish_reason")
    return [
        dict(
            zip(
                names,
                (
                    step,
                    "train",
                    g,
                    texts[g],
                    c.text,
                    problems[g].answer,
                    a,
                    len(c.token_ids),
                    c.finish_reason,
                ),
            )
        )
        | {name: values[i].item() for name, values in rewards.items()}
        for i, (g, a, c) in enumerate(zip(batch.groups.tolist(), batch.advantages.tolist(), completions))
    ]


def validation_rows(found, step: int) -> list[dict]:
    """The first responses of an evaluation, for rollouts.jsonl."""
    names = [
        "prompt",
        "response",
        "gold",
        "reward",
        "format_reward",
        "answer_reward",
        "length",
        "finish_reason",
    ]
    rows = found.rows.head(VAL_ROLLOUTS).to_dict("records")
    return [
        {"step": step, "split": "validation", "group": int(row["problem"])} | {n: row[n] for n in names}
        for row in rows
    ]


def validation_metrics(found) -> dict:
    """The metrics of an ``Evaluation``."""
    return {
        "val_reward": found.accuracy,
        "val_reward_se": found.accuracy_se,
        "val_format_reward": found.format_rate,
        "val_response_length": found.response_length,
        "val_truncated_share": found.truncated_share,
        "val_n": found.n_problems,
    }
