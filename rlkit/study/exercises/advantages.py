"""Exercises on rewards, group advantages and pass@k."""

from __future__ import annotations

import math

import torch

from rlkit.advantages import compute_group_normalized_rewards, compute_rollout_rewards
from rlkit.study.exercises.core import exercise, tensor
from rlkit.support.stats import pass_at_k as library_pass_at_k


def _toy_reward(response, truth):
    """Format 1 for a response that ends with '!'; answer 1 if, besides, it starts with the truth."""
    good = response.endswith("!")
    return {
        "reward": float(good and response.startswith(truth)),
        "format_reward": float(good),
        "answer_reward": float(good and response.startswith(truth)),
    }


def _boolean_reward(response, truth):
    return {name: bool(value) for name, value in _toy_reward(response, truth).items()}


@exercise(
    title="Rewards of a batch",
    difficulty=1,
    minutes=5,
    problem="compute_rollout_rewards",
    notebook="03",
    reveals="rlkit.advantages:grade_responses",
    door="rlkit.advantages:compute_rollout_rewards",
    axes=("row",),
    solution=compute_rollout_rewards,
    observe=lambda attempt, *arguments: _rewards_observed(attempt(*arguments)),
    cases=lambda: [
        ("four responses", (_toy_reward, ["7!", "8!", "7", "9!"], ["7", "7", "7", "9"])),
        ("none right", (_toy_reward, ["1!", "2"], ["7", "8"])),
        ("rewards that are booleans", (_boolean_reward, ["7!", "8!", "7"], ["7", "7", "7"])),
    ],
    hints="Call reward_fn(response, ground_truth) row by row; the metadata holds the mean of each reward.",
)
def rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths):
    """(raw_rewards, metadata): float tensor (N,) of "reward", and {"reward": mean, "format_reward": mean}."""
    rows = [reward_fn(r, t) for r, t in zip(rollout_responses, repeated_ground_truths)]
    means = {name: sum(float(row[name]) for row in rows) / len(rows) for name in ("reward", "format_reward")}
    return {"raw_rewards": [float(row["reward"]) for row in rows], "floating": True, **means}


def _rewards_observed(result):
    rewards, metadata = result
    return {
        "raw_rewards": rewards,
        "floating": rewards.is_floating_point(),
        **{name: float(metadata[name]) for name in ("reward", "format_reward") if name in metadata},
    }


def _graded(fn, responses, truths, key="reward", dtype=torch.float32, total=torch.mean):
    rows = [fn(r, t) for r, t in zip(responses, truths)]
    column = {name: torch.tensor([float(row[name]) for row in rows]) for name in ("reward", "format_reward")}
    return column[key].to(dtype), {name: total(values).item() for name, values in column.items()}


rollout_rewards.mistake("format_reward is used as the reward", "format_as_reward")(
    lambda *a: _graded(*a, key="format_reward")
)
rollout_rewards.mistake("response and ground truth change places in the call", "swapped_arguments")(
    lambda fn, responses, truths: _graded(lambda r, t: fn(t, r), responses, truths)
)
rollout_rewards.mistake("the metadata holds sums, not means", "summed_metadata")(
    lambda *a: _graded(*a, total=torch.sum)
)
rollout_rewards.mistake("rewards are integers, and torch takes no mean of those", "integer_rewards")(
    lambda *a: _graded(*a, dtype=torch.long)
)
rollout_rewards.mistake("every response is graded against the first ground truth", "first_truth_only")(
    lambda fn, responses, truths: _graded(fn, responses, truths[:1] * len(truths))
)


def _groups(raw_rewards, group_size):
    values = raw_rewards.tolist()
    return [values[i : i + group_size] for i in range(0, len(values), group_size)]


def _advantage_cases(eps=True):
    cases = [
        ("one right of four", (tensor([1.0, 0, 0, 0]), 4)),
        ("two groups", (tensor([1.0, 1, 1, 0, 0, 0, 0, 1]), 4)),
        ("rewards that are not 0 or 1", (tensor([0.5, 2.0, 1.0, 0.25, 3.0, 0.0]), 3)),
        ("a group all wrong", (tensor([0.0, 0, 0, 1, 0, 0]), 3)),
        ("a group all right", (tensor([1.0, 1, 0, 1]), 2)),
    ]
    if not eps:
        return cases
    return [(label, (*arguments, 1e-6)) for label, arguments in cases] + [
        ("a large eps", (tensor([1.0, 0, 0, 1, 1, 0]), 3, 0.5))
    ]


@exercise(
    title="Group advantages, divided by the deviation",
    difficulty=2,
    minutes=10,
    problem="compute_group_normalized_rewards_grpo",
    notebook="03",
    axes=("row",),
    reveals=(
        "rlkit.advantages:group_mean",
        "rlkit.advantages:group_std",
        "rlkit.advantages:group_advantages",
    ),
    door="rlkit.advantages:compute_group_normalized_rewards",
    cases=_advantage_cases,
    solution=lambda raw, size, eps: compute_group_normalized_rewards(raw, size, "mean", eps, "std")[0],
    hints=(
        "reshape(-1, group_size) puts one group in each row; keepdim=True keeps the mean beside it.",
        "torch.std divides by G - 1, which is what we want; advantage_eps is added to it, outside the root.",
    ),
)
def group_advantages_std(raw_rewards, group_size, advantage_eps):
    """(reward - group mean) / (group std + advantage_eps), (N,); row i is in group i // group_size."""
    result = []
    for group in _groups(raw_rewards, group_size):
        mean = sum(group) / len(group)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        result += [(r - mean) / (deviation + advantage_eps) for r in group]
    return result


def _advantages(raw, size, eps, layout="rows", correction=1, centre=True, divide=None):
    groups = raw.reshape(size, -1).T if layout == "columns" else raw.reshape(-1, size)
    mean = groups.mean(1, keepdim=True)
    divisor = divide(groups, eps) if divide else groups.std(1, correction=correction, keepdim=True) + eps
    result = (groups - mean if centre else groups) / divisor
    return result.T.flatten() if layout == "columns" else result.flatten()


group_advantages_std.mistake(
    "the deviation divides by G; torch.std's default divides by G - 1", "population_std"
)(lambda raw, size, eps: _advantages(raw, size, eps, correction=0))
group_advantages_std.mistake(
    "mean and deviation are the whole batch's, not each group's", "batch_statistics"
)(lambda raw, size, eps: (raw - raw.mean()) / (raw.std() + eps))
group_advantages_std.mistake("the mean is the group's but the deviation the whole batch's", "batch_std")(
    lambda raw, size, eps: _advantages(raw, size, eps, divide=lambda g, e: raw.std() + e)
)
group_advantages_std.mistake("advantage_eps is missing, and a group of equal rewards gives 0/0", "no_eps")(
    lambda raw, size, eps: _advantages(raw, size, 0.0)
)
group_advantages_std.mistake("advantage_eps is added to the variance, under the root", "eps_under_root")(
    lambda raw, size, eps: _advantages(
        raw, size, eps, divide=lambda g, e: (g.var(1, keepdim=True) + e).sqrt()
    )
)
group_advantages_std.mistake(
    "the deviation is clamped to eps from below, not increased by it", "eps_clamped"
)(lambda raw, size, eps: _advantages(raw, size, eps, divide=lambda g, e: g.std(1, keepdim=True).clamp(min=e)))
group_advantages_std.mistake(
    "rows are dealt out in turn: group of row i taken as i modulo the number of groups", "interleaved_groups"
)(lambda raw, size, eps: _advantages(raw, size, eps, layout="columns"))
group_advantages_std.mistake("the group mean is not subtracted", "not_centred")(
    lambda raw, size, eps: _advantages(raw, size, eps, centre=False)
)
group_advantages_std.mistake("it is divided by the variance, not by its root", "divided_by_variance")(
    lambda raw, size, eps: _advantages(raw, size, eps, divide=lambda g, e: g.var(1, keepdim=True) + e)
)
group_advantages_std.mistake("the result still has the shape (groups, group size)", "not_flattened")(
    lambda raw, size, eps: _advantages(raw, size, eps).reshape(-1, size)
)
group_advantages_std.mistake("it works in place on the rewards it was given", "in_place")(
    lambda raw, size, eps: raw.copy_(_advantages(raw, size, eps))
)


@exercise(
    title="Dr. GRPO's advantages",
    difficulty=1,
    minutes=5,
    problem="compute_group_normalized_rewards_drgrpo",
    notebook="05",
    reveals=(
        "rlkit.advantages:group_mean",
        "rlkit.advantages:undivided",
        "rlkit.advantages:group_advantages",
    ),
    door="rlkit.advantages:compute_group_normalized_rewards",
    axes=("row",),
    cases=lambda: _advantage_cases(eps=False),
    solution=lambda raw, size: compute_group_normalized_rewards(raw, size, "mean", 1e-6, "none")[0],
    hints="Only the group's own mean is taken off; nothing is divided.",
)
def group_advantages_none(raw_rewards, group_size):
    """reward - group mean, (N,)."""
    return [r - sum(group) / len(group) for group in _groups(raw_rewards, group_size) for r in group]


group_advantages_none.mistake("the mean of the whole batch is subtracted", "batch_mean")(
    lambda raw, size: raw - raw.mean()
)
group_advantages_none.mistake("nothing is subtracted: this is RFT", "no_baseline")(
    lambda raw, size: raw.clone()
)
group_advantages_none.mistake(
    "the mean leaves the row itself out: unbiased, but G/(G-1) of what was asked", "leave_one_out"
)(lambda raw, size: _advantages(raw, size, 0, divide=lambda g, e: (size - 1) / size))
group_advantages_none.mistake("it is still divided by the deviation", "still_divided")(
    lambda raw, size: _advantages(raw, size, 1e-6)
)
group_advantages_none.mistake(
    "rows are dealt out in turn: group of row i taken as i modulo the number of groups", "interleaved"
)(lambda raw, size: _advantages(raw, size, 0, layout="columns", divide=lambda g, e: 1.0))


@exercise(
    title="MaxRL's advantages",
    difficulty=1,
    minutes=5,
    problem="compute_group_normalized_rewards_maxrl",
    notebook="05",
    reveals=("rlkit.advantages:group_mean", "rlkit.advantages:group_advantages"),
    door="rlkit.advantages:compute_group_normalized_rewards",
    axes=("row",),
    cases=_advantage_cases,
    solution=lambda raw, size, eps: compute_group_normalized_rewards(raw, size, "mean", eps, "mean")[0],
    hints="The same mean stands above and below the line; advantage_eps keeps a group without a right "
    "answer at 0.",
)
def group_advantages_mean(raw_rewards, group_size, advantage_eps):
    """(reward - group mean) / (group mean + advantage_eps), (N,)."""
    result = []
    for group in _groups(raw_rewards, group_size):
        mean = sum(group) / len(group)
        result += [(r - mean) / (mean + advantage_eps) for r in group]
    return result


group_advantages_mean.mistake(
    "advantage_eps is missing, and a group without a right answer gives 0/0", "maxrl_no_eps"
)(lambda raw, size, eps: _advantages(raw, size, eps, divide=lambda g, e: g.mean(1, keepdim=True)))
group_advantages_mean.mistake("it is divided by the whole batch's mean", "maxrl_batch_mean")(
    lambda raw, size, eps: _advantages(raw, size, eps, divide=lambda g, e: raw.mean() + e)
)
group_advantages_mean.mistake("it is divided by the deviation: this is GRPO", "maxrl_std")(
    lambda raw, size, eps: _advantages(raw, size, eps)
)
group_advantages_mean.mistake("the mean is subtracted after the division", "maxrl_order")(
    lambda raw, size, eps: (
        raw.reshape(-1, size) / (raw.reshape(-1, size).mean(1, keepdim=True) + eps)
        - raw.reshape(-1, size).mean(1, keepdim=True)
    ).flatten()
)
group_advantages_mean.mistake("the mean is not subtracted", "maxrl_not_centred")(
    lambda raw, size, eps: _advantages(
        raw, size, eps, centre=False, divide=lambda g, e: g.mean(1, keepdim=True) + e
    )
)


@exercise(
    title="Advantages of a train batch that holds half a group",
    difficulty=2,
    minutes=5,
    problem="grpo_train_step_off_policy",
    notebook="06",
    reveals=("rlkit.trainer:advantages_of", "rlkit.batch:RolloutBatch.select"),
    door="rlkit.trainer:train",
    axes=("row",),
    solution=lambda raw, size, rows: compute_group_normalized_rewards(raw, size)[0][rows],
    cases=lambda: [
        ("two rows of one group", (tensor([1.0, 0, 0, 0]), 4, [0, 1])),
        ("rows of two groups, shuffled", (tensor([1.0, 0, 0, 0, 1, 1, 0, 1]), 4, [5, 0, 6, 3])),
    ],
    hints="When were the rewards of the whole group known? Normalise then, pick rows afterwards.",
)
def offpolicy_advantages(raw_rewards, group_size, rows):
    """GRPO advantages (eps 1e-6) of the listed rows, from the rewards (N,) of the whole rollout batch."""
    whole = group_advantages_std.reference(raw_rewards, group_size, 1e-6)
    return [whole[row] for row in rows]


offpolicy_advantages.mistake("mean and deviation are recomputed inside the train batch", "slice_statistics")(
    lambda raw, size, rows: _advantages(raw[rows], len(rows), 1e-6)
)
offpolicy_advantages.mistake("mean and deviation are the whole rollout batch's", "rollout_statistics")(
    lambda raw, size, rows: ((raw - raw.mean()) / (raw.std() + 1e-6))[rows]
)
offpolicy_advantages.mistake("rows come back sorted, not in the order asked for", "rows_sorted")(
    lambda raw, size, rows: _advantages(raw, size, 1e-6)[sorted(rows)]
)


@exercise(
    title="pass@k from n samples",
    difficulty=2,
    minutes=10,
    problem="grpo_train_step_standard_on_policy",
    notebook="04",
    reveals="rlkit.support.stats:pass_at_k",
    axes=(),
    solution=library_pass_at_k,
    cases=lambda: [
        ("one right of four, k = 1", (4, 1, 1)),
        ("one right of four, k = 2", (4, 1, 2)),
        ("three right of eight, k = 4", (8, 3, 4)),
        ("none right", (8, 0, 3)),
        ("fewer wrong than k", (8, 6, 3)),
        ("k = n", (5, 2, 5)),
    ],
    hints=(
        "Draw k of the n samples without putting any back. How likely is it that all k are wrong?",
        "1 - C(n - c, k) / C(n, k); math.comb gives 0 when fewer than k are wrong.",
    ),
)
def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance of a right one among k of n samples (c are right), drawn without putting back."""
    all_wrong = 1.0
    for i in range(k):
        all_wrong *= max(n - c - i, 0) / (n - i)
    return 1.0 - all_wrong


pass_at_k.mistake("samples are put back: 1 - (1 - c/n)^k is biased", "with_replacement")(
    lambda n, c, k: 1 - (1 - c / n) ** k
)
pass_at_k.mistake("it asks whether any of the n samples is right, whatever k is", "any_of_n")(
    lambda n, c, k: float(c > 0)
)
pass_at_k.mistake("it is the share of right samples, pass@1", "share_right")(lambda n, c, k: c / n)
pass_at_k.mistake("this is the chance that all k are wrong", "all_wrong")(
    lambda n, c, k: math.comb(n - c, k) / math.comb(n, k)
)
pass_at_k.mistake("it asks for k right ones, not for one", "all_right")(
    lambda n, c, k: math.comb(c, k) / math.comb(n, k)
)
