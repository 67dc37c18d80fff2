"""From responses to rewards, and from rewards to advantages."""

from __future__ import annotations

from math import comb

import torch

from rlkit.support.checks import number, shown

REWARD_KEYS = ("reward", "format_reward", "answer_reward")


def compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths):
    """Grade every response against its ground truth.

    Args:
        reward_fn: ``f(response, ground_truth) -> dict`` with "reward" and, if it has them, "format_reward"
            and "answer_reward"; bool, int and float values are all fine.
        rollout_responses, repeated_ground_truths: lists of N strings; row i of one belongs to row i of the
        other.

    Returns:
        (raw_rewards, metadata): a float32 tensor (N,), and the batch mean of each reward under its own name.

    Raises:
        ValueError: lengths that differ, a result without "reward", or a reward that is NaN or infinite.

    Source: the handout's section 4.2.3.
    """
    rows = grade_responses(reward_fn, rollout_responses, repeated_ground_truths)
    return rows["reward"], {name: values.mean().item() for name, values in rows.items()}


def grade_responses(reward_fn, rollout_responses, repeated_ground_truths) -> dict[str, torch.Tensor]:
    """The rewards row by row: {"reward": (N,), "format_reward": (N,), "answer_reward": (N,)}, float32.

    ``compute_rollout_rewards`` is this plus the means. Reward names that the function does not give are left
    out.
    """
    if len(rollout_responses) != len(repeated_ground_truths) or not len(rollout_responses):
        raise ValueError(
            f"rollout_responses, repeated_ground_truths: got {len(rollout_responses)} responses and "
            f"{len(repeated_ground_truths)} ground truths, expected the same number, at least one"
        )
    graded = [
        reward_fn(response, truth) for response, truth in zip(rollout_responses, repeated_ground_truths)
    ]
    if not all(isinstance(row, dict) and "reward" in row for row in graded):
        raise ValueError(
            "reward_fn: expected a dict with the key 'reward' for every response, got "
            f"{next(row for row in graded if not isinstance(row, dict) or 'reward' not in row)!r}"
        )
    names = [name for name in REWARD_KEYS if all(name in row for row in graded)]
    rows = {
        name: torch.tensor(
            [number(float(row[name]) if isinstance(row[name], bool) else row[name]) for row in graded]
        )
        for name in names
    }
    for name, values in rows.items():
        refused = [row[name] for row, value in zip(graded, values.isfinite().tolist()) if not value]
        if refused:
            raise ValueError(
                f"reward_fn: {name!r} of a response is {shown(refused[0])}, expected finite numbers"
            )
    return rows


def compute_group_normalized_rewards(
    raw_rewards, group_size, baseline="mean", advantage_eps=1e-6, advantage_normalizer="std"
):
    """Advantages: (reward - baseline) / normaliser, each group of ``group_size`` rows by itself.

    Args:
        raw_rewards: (N,) tensor or list, any of bool, int, float; row i belongs to group i // group_size.
        baseline: "mean" subtracts the group's mean reward, "none" nothing; or a function
            ``f(rewards (N / G, G) float64) -> (N / G, 1) or (N / G, G)``, what to subtract.
        advantage_eps: added to the normaliser (not to the 1 of "none").
        advantage_normalizer: "std" (the unbiased standard deviation, torch.std's default), "mean" (the
            group's mean reward) or "none"; or a function of the rewards, as for ``baseline``, what to divide
            by.

    Returns:
        (advantages, metadata): a new (N,) tensor (float64 for float64 rewards, else float32), and plain
        numbers: reward_mean, reward_std (over the batch, 0 for one row), reward_min, reward_max; the counts
        groups_all_right (every reward >= 1), groups_all_wrong (every reward <= 0), groups_mixed (the rest);
        zero_advantage_share; and pass_at_k, a list whose entry k - 1 is the unbiased estimate of the chance
        that at least one of k responses has a reward >= 1.

    The arithmetic is in float64, and a group of equal rewards gets exactly 0 from the "mean" baseline
    whatever the
    rewards are: 8 x 0.1 leaves no rounding dust that would be blown up by 1 / eps.

    Raises:
        ValueError: N not a multiple of group_size, NaN or infinite rewards, one response per group with
        "std", negative rewards with "mean" as normaliser (its sign would turn the ranking over), unknown
        names.

    Source: GRPO (DeepSeekMath, 2402.03300), Dr. GRPO (2503.20783), MaxRL (2602.02710).
    """
    try:
        raw = torch.as_tensor(raw_rewards)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"raw_rewards: got {shown(raw_rewards)}, expected a tensor or a list of N numbers"
        ) from error
    _check_groups(raw, group_size, baseline, advantage_normalizer)
    if not 0 <= number(advantage_eps) < float("inf"):
        raise ValueError(f"advantage_eps: got {shown(advantage_eps)}, expected a number >= 0")
    rewards = raw.double().reshape(-1, group_size)  # (n_groups, G)
    all_equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)  # (n_groups, 1)

    if callable(baseline):
        centred = rewards - _per_group(baseline, rewards, "baseline")
    elif baseline == "mean":
        centred = (rewards - rewards.mean(dim=1, keepdim=True)).masked_fill(all_equal, 0.0)
    else:
        centred = rewards

    if callable(advantage_normalizer):
        divisor = _per_group(advantage_normalizer, rewards, "advantage_normalizer") + advantage_eps
    elif advantage_normalizer == "std":
        divisor = rewards.std(dim=1, keepdim=True).masked_fill(all_equal, 0.0) + advantage_eps
    elif advantage_normalizer == "mean":
        divisor = rewards.mean(dim=1, keepdim=True) + advantage_eps
    else:
        divisor = 1.0

    advantages = torch.where(centred == 0, 0.0, centred / divisor)  # without an eps: 0 / 0 is 0
    advantages = advantages.to(torch.float64 if raw.dtype == torch.float64 else torch.float32)
    advantages = advantages.flatten()
    _check_finite(advantages, "baseline, advantage_normalizer: an advantage")
    return advantages, _group_statistics(rewards, advantages)


def _per_group(function, rewards, name):
    """What a reader's function of the (n_groups, G) rewards gives; one number for all is fine, too."""
    result = function(rewards)
    try:
        result = torch.as_tensor(result, dtype=rewards.dtype, device=rewards.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name}: the function gave {shown(result)}, expected a tensor (n_groups, 1) or (n_groups, G)"
        ) from error
    if tuple(result.shape) not in ((), (len(rewards), 1), tuple(rewards.shape)):
        raise ValueError(
            f"{name}: the function turns {tuple(rewards.shape)} rewards into shape {tuple(result.shape)}, "
            "expected results (n_groups, 1) or (n_groups, G)"
        )
    return result


def _group_statistics(rewards, advantages) -> dict:
    """The metadata of ``compute_group_normalized_rewards``; rewards is (n_groups, G)."""
    n_groups, group_size = rewards.shape
    right = rewards >= 1
    all_right = int(right.all(dim=1).sum())
    all_wrong = int((rewards <= 0).all(dim=1).sum())
    wrong_counts = (~right).sum(dim=1).tolist()
    return {
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std().item() if rewards.numel() > 1 else 0.0,
        "reward_min": rewards.min().item(),
        "reward_max": rewards.max().item(),
        "groups_all_right": all_right,
        "groups_all_wrong": all_wrong,
        "groups_mixed": n_groups - all_right - all_wrong,
        "zero_advantage_share": (advantages == 0).double().mean().item(),
        "pass_at_k": [
            1 - sum(comb(wrong, k) for wrong in wrong_counts) / (n_groups * comb(group_size, k))
            for k in range(1, group_size + 1)
        ],
    }


def _check_groups(raw, group_size, baseline, advantage_normalizer):
    if raw.ndim != 1 or not len(raw):
        raise ValueError(f"raw_rewards: got shape {tuple(raw.shape)}, expected (N,) with at least one reward")
    if (
        not isinstance(group_size, int)
        or isinstance(group_size, bool)
        or group_size < 1
        or len(raw) % group_size
    ):
        raise ValueError(
            f"group_size: got {group_size!r} for {len(raw)} rewards, expected a positive divisor of "
            "their number"
        )
    if not callable(baseline) and baseline not in ("mean", "none"):
        raise ValueError(f"baseline: got {baseline!r}, expected 'mean', 'none' or a function of the rewards")
    if not callable(advantage_normalizer) and advantage_normalizer not in ("std", "mean", "none"):
        raise ValueError(
            f"advantage_normalizer: got {advantage_normalizer!r}, expected 'std', 'mean', 'none' or a "
            "function of the rewards"
        )
    if advantage_normalizer == "std" and group_size == 1:
        raise ValueError(
            "group_size: got 1 with advantage_normalizer='std', expected at least 2 responses per "
            "group (one number has no standard deviation)"
        )
    _check_finite(raw, "raw_rewards: a reward")
    if advantage_normalizer == "mean" and bool((raw < 0).any()):
        raise ValueError(
            f"raw_rewards: got {raw.min().item()} with advantage_normalizer='mean', expected rewards "
            ">= 0 (a negative group mean would turn the best response into the worst)"
        )


def _check_finite(values, what):
    if not bool(torch.isfinite(values).all()):
        row = int((~torch.isfinite(values)).nonzero()[0])
        raise ValueError(f"{what} in row {row} is {values[row].item()}, expected finite numbers")
