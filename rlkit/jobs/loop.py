"""What the training loop asks around the algorithm: order, schedule, and rows to log."""

import math
import os
from contextlib import nullcontext

import numpy as np
import torch

from rlkit.batch import RolloutBatch
from rlkit.jobs.planning import prompt_lengths
from rlkit.samplers import SamplingParams
from rlkit.support.running import stream
from rlkit.tasks.grading import extract_answer, last_boxed
from rlkit.tasks.rewards import grade_responses, truths_for

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


def learning_rate(config, step: int) -> float:
    """lr x step / warm-up in the warm-up; then constant, or from lr down to 0 one step after the last:
    linear 1 - p, cosine (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2016), p the share of the way."""
    if step < config.lr_warmup_steps:
        return config.lr * step / config.lr_warmup_steps
    p = (step - config.lr_warmup_steps) / (config.n_steps + 1 - config.lr_warmup_steps)
    shapes = {"constant": 1.0, "linear": 1 - p, "cosine": (1 + math.cos(math.pi * p)) / 2}
    return config.lr * shapes[config.lr_schedule]


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
    names += [
        name for name in found.rows if name.startswith("reward_") and np.isfinite(found.rows[name]).all()
    ]
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


def other_prompts(problems: list, chosen: list, step: int, seed: int) -> list:
    """The problems that are not this step's, in an order of the step's own."""
    own = {id(problem) for problem in chosen}
    order = np.random.default_rng(stream(seed, step, "resample")).permutation(len(problems))
    return [problems[i] for i in order if id(problems[i]) not in own]


def rollouts(
    sampler, problems, others, prompt, reward_fn, config, step: int
) -> tuple[list, list, dict, dict]:
    """(problems, groups, rewards {name: (B,)}, metrics) of a step.

    Dynamic sampling: in each of ``config.resamples`` rounds the groups whose rewards are all equal, and so
    teach nothing, give way to those of as many ``others``; what the last round gave stays.
    Source: DAPO (2503.14476), section 3.2, which goes on until the batch is full.
    """
    kept, todo, size, n_asked = [], problems, config.group_size, 0
    for i in range(config.resamples + 1):
        seed = stream(config.seed, step, f"rollout {i}" if i else "rollout")
        params = SamplingParams(config.max_tokens, config.temperature, stop=tuple(prompt.stop), seed=seed)
        groups = sample_groups(sampler, [prompt.fill(problem.question) for problem in todo], params, size)
        golds = [truth for truth in truths_for(reward_fn, todo) for _ in range(size)]
        graded = grade_responses(reward_fn, [c.text for group in groups for c in group], golds)
        rewards = {name: values.view(-1, size) for name, values in graded.items()}
        n_asked += len(todo)
        found = [(p, g, {k: v[j] for k, v in rewards.items()}) for j, (p, g) in enumerate(zip(todo, groups))]
        silent = (rewards["reward"] == rewards["reward"][:, :1]).all(dim=1).tolist()
        n_new = sum(silent) if i < config.resamples and sum(silent) <= len(others) else 0
        kept += [row for row, teaches_nothing in zip(found, silent) if not (n_new and teaches_nothing)]
        todo, others = others[:n_new], others[n_new:]
        if not todo:
            break
    problems, groups, parts = (list(column) for column in zip(*kept))
    common = [name for name in parts[0] if all(name in part for part in parts)]
    rewards = {name: torch.cat([part[name] for part in parts]) for name in common}
    return problems, groups, rewards, {"prompts_asked": n_asked} if config.resamples else {}


def truncated_rows(groups) -> torch.Tensor:
    """(B,) bool, the responses that were cut at max_tokens."""
    return torch.tensor([c.finish_reason == "length" for group in groups for c in group])


def rollout_metrics(groups, rewards: dict, prompt) -> dict:
    """The metrics of a rollout batch as it was sampled. rewards: {name: (B,)}."""
    completions = [completion for group in groups for completion in group]
    answer_of = extract_answer if prompt.reward == "r1_zero" else last_boxed
    answers = [{(answer_of(c.text) or "").strip() for c in group} for group in groups]
    lengths = [len(c.token_ids) for c in completions]
    return {
        **{name: values.mean().item() for name, values in rewards.items()},
        "groups_identical": sum(len(group) > 1 and len({c.text for c in group}) == 1 for group in groups),
        "distinct_answers": float(np.mean([len(group) for group in answers])),
        "response_length": float(np.mean(lengths)),
        **lengths_by_result("response_length", lengths, rewards["reward"]),
        "truncated_share": float(np.mean([c.finish_reason == "length" for c in completions])),
    }


def lengths_by_result(name: str, lengths, rewards) -> dict:
    """name_right, name_wrong: mean length where the reward is >= 1, and elsewhere; absent where none is."""
    right, lengths = np.asarray(rewards) >= 1, np.asarray(lengths)
    parts = {f"{name}_right": lengths[right], f"{name}_wrong": lengths[~right]}
    return {key: float(part.mean()) for key, part in parts.items() if len(part)}


def validation_metrics(found) -> dict:
    """The metrics of an ``Evaluation``."""
    return {
        "val_reward": found.accuracy,
        "val_reward_se": found.accuracy_se,
        "val_format_reward": found.format_rate,
        "val_response_length": found.response_length,
        **lengths_by_result("val_length", found.rows.length, found.rows.reward),
        "val_truncated_share": found.truncated_share,
        "val_n": found.n_problems,
    }
