"""What the training loop asks around the algorithm: order, schedule, and rows to log."""

import os
from contextlib import nullcontext

import numpy as np
import torch

from rlkit.batch import RolloutBatch
from rlkit.jobs.planning import prompt_lengths
from rlkit.samplers import SamplingParams
from rlkit.support.running import stream
from rlkit.tasks.grading import extract_answer, last_boxed

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
    n = config.n_val_final if step == config.n_steps else config.n_val
    if not n or not config.n_val or (step == 0 and not config.eval_at_start):
        return False
    return step in (0, config.n_steps) or bool(config.eval_every and step % config.eval_every == 0)


def checkpoint_due(config, step: int) -> bool:
    """The last step, and every ``checkpoint_every``-th."""
    every = config.checkpoint_every
    return step > 0 and (step == config.n_steps or bool(every and step % every == 0))


def rollouts_due(config, step: int) -> bool:
    """The first and the last step, and every ``rollouts_every``-th."""
    return bool(config.rollouts_every) and (step in (1, config.n_steps) or step % config.rollouts_every == 0)


def sampler_options(config, tokenizer, problems, prompt) -> dict:
    """What ``make_sampler`` is told beyond the model: for vLLM, how weights travel, in which type to compute,
    and the length to make room for, without which it reserves memory for the longest sequence the model could
    hold."""
    if config.sampler != "vllm":
        return {}
    longest = prompt_lengths(tokenizer, problems, prompt)["longest"] + config.max_tokens
    dtype = config.autocast_dtype if config.autocast else None
    options = {"weight_sync": config.weight_sync, "dtype": dtype, "max_model_len": longest}
    if config.n_gpus > 1 and torch.cuda.is_available():  # the ranks have the first ones
        options["gpu"] = int(os.environ["LOCAL_WORLD_SIZE"])
    return options


def autocast_dtype(config):
    """The type of mixed precision, or None."""
    return getattr(torch, config.autocast_dtype) if config.autocast else None


def autocast(config, model):
    """The precision that rollouts are computed in: the same as the train step's."""
    device_type, dtype = next(model.parameters()).device.type, autocast_dtype(config)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def training_rows(step: int, batch: RolloutBatch, groups, texts, problems, rewards) -> list[dict]:
    """A rollout batch for rollouts.jsonl. rewards: {name: (B,)}."""
    rows, completions = [], [completion for group in groups for completion in group]
    for i, (g, c) in enumerate(zip(batch.groups.tolist(), completions)):
        row = {"step": step, "split": "train", "group": g, "prompt": texts[g], "response": c.text}
        row |= {"gold": problems[g].answer} | {name: values[i].item() for name, values in rewards.items()}
        row |= {"advantage": batch.advantages[i].item(), "length": len(c.token_ids)}
        rows.append(row | {"finish_reason": c.finish_reason})
    return rows


def validation_rows(found, step: int) -> list[dict]:
    """The first responses of an evaluation, for rollouts.jsonl."""
    names = "prompt response gold reward format_reward answer_reward length finish_reason".split()
    first = {"step": step, "split": "validation"}
    rows = found.rows.head(VAL_ROLLOUTS).to_dict("records")
    return [first | {"group": int(row["problem"])} | {name: row[name] for name in names} for row in rows]


def sample_groups(sampler, texts: list[str], params: SamplingParams, group_size: int) -> list[list]:
    """group_size completions of each prompt; what the sampler gives is checked group by group."""
    groups = sampler.generate(texts, params, group_size)
    sizes = [len(group) for group in groups]
    if sizes != [group_size] * len(texts):
        raise ValueError(
            f"sampler: gave groups of {sizes} responses, expected {group_size} for each of "
            f"{len(texts)} prompts"
        )
    return groups


def rollout_metrics(groups, rewards: dict, prompt) -> dict:
    """The metrics of a rollout batch as it was sampled. rewards: {name: (B,)}."""
    completions = [completion for group in groups for completion in group]
    answer_of = extract_answer if prompt.reward == "r1_zero" else last_boxed
    answers = [{(answer_of(c.text) or "").strip() for c in group} for group in groups]
    return {
        **{name: values.mean().item() for name, values in rewards.items()},
        "groups_identical": sum(len(group) > 1 and len({c.text for c in group}) == 1 for group in groups),
        "distinct_answers": float(np.mean([len(group) for group in answers])),
        "response_length": float(np.mean([len(c.token_ids) for c in completions])),
        "truncated_share": float(np.mean([c.finish_reason == "length" for c in completions])),
    }


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
