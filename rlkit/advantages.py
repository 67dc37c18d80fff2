"""From responses to rewards, and from rewards to advantages: (reward - baseline) / normaliser."""

import torch
from jaxtyping import Int
from torch import Tensor

from rlkit.support.arguments import as_tensor, check_finite, check_number, named_function
from rlkit.support.metrics import group_statistics
from rlkit.support.shapes import PerGroup, PerPosition, Rewards
from rlkit.tasks.rewards import grade_responses

# ---- baselines: what is subtracted from a reward


def group_mean(rewards: Rewards) -> PerGroup:
    """sum_j r_j / G, held between the smallest and the largest: equal rewards give exactly that reward.

    GRPO (DeepSeekMath, 2402.03300) and all that came after it.
    """
    mean = rewards.mean(dim=1, keepdim=True)
    return mean.clamp(rewards.amin(dim=1, keepdim=True), rewards.amax(dim=1, keepdim=True))


def no_baseline(rewards: Rewards) -> PerGroup:
    """0: REINFORCE; with 0/1 rewards RFT, which imitates the right responses."""
    return torch.zeros_like(rewards[:, :1])


# ---- normalisers: what the difference is divided by


def group_std(rewards: Rewards) -> PerGroup:
    """sqrt(sum_j (r_j - mean)^2 / (G - 1)), unbiased as torch.std. GRPO (2402.03300)."""
    deviations = rewards - group_mean(rewards)
    return (deviations.square().sum(dim=1, keepdim=True) / (rewards.shape[1] - 1)).sqrt()


def undivided(rewards: Rewards) -> PerGroup:
    """1: Dr. GRPO (2503.20783) divides by nothing, and needs no eps."""
    return torch.ones_like(rewards[:, :1])


BASELINES = {"mean": group_mean, "none": no_baseline}
NORMALIZERS = {"std": group_std, "mean": group_mean, "none": undivided}  # "mean": MaxRL (2602.02710)


def group_advantages(rewards: Rewards, baseline, normalizer, eps: float) -> Rewards:
    """A = (r - baseline(r)) / (normalizer(r) + eps); a difference of 0 stays 0 whatever divides it."""
    differences = rewards - per_group("baseline", baseline(rewards.clone()), rewards)
    divisors = per_group("advantage_normalizer", normalizer(rewards.clone()), rewards)
    divisors = divisors + (0.0 if normalizer is undivided else eps)
    return torch.where(differences == 0, 0.0, differences / divisors)


# ---- the handout's two functions


def compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths) -> tuple[PerPosition, dict]:
    """Grade every response against its ground truth.

    Args:
        reward_fn: ``f(response, ground_truth) -> dict`` with "reward" and, if it has them, "format_reward"
            and "answer_reward"; bool, int and float values are all fine.
        rollout_responses, repeated_ground_truths: lists of N strings, row by row.

    Returns:
        (raw_rewards, metadata): a float32 tensor (N,), and the batch mean of each reward under its own name.

    Raises ValueError for lengths that differ, a result without "reward", a reward that is NaN or infinite.
    Source: the handout's section 4.2.3.
    """
    rows = grade_responses(reward_fn, rollout_responses, repeated_ground_truths)
    return rows["reward"], {name: values.mean().item() for name, values in rows.items()}


def compute_group_normalized_rewards(
    raw_rewards, group_size, baseline="mean", advantage_eps=1e-6, advantage_normalizer="std"
) -> tuple[PerPosition, dict]:
    """Advantages: (reward - baseline) / normaliser, each group of ``group_size`` rows by itself, in float64.

    Args:
        raw_rewards: (N,) tensor or list, any of bool, int, float; row i belongs to group i // group_size.
        baseline: "mean" or "none", see ``BASELINES``; or a function like those there.
        advantage_eps: added to the normaliser (not to the 1 of "none").
        advantage_normalizer: "std", "mean" or "none", see ``NORMALIZERS``; or a function like those there.

    Returns:
        (advantages, metadata): a new (N,) tensor (float64 for float64 rewards, else float32), and the plain
        numbers of ``group_statistics``.

    Raises:
        ValueError: N not a multiple of group_size, NaN or infinite rewards, one response per group with
        "std", negative rewards with "mean" as normaliser (a negative divisor would reverse the ranking),
        unknown names.

    Source: GRPO (DeepSeekMath, 2402.03300), Dr. GRPO (2503.20783), MaxRL (2602.02710).
    """
    raw = as_tensor("raw_rewards", raw_rewards, "a tensor or a list of N numbers")
    baseline = named_function("baseline", baseline, BASELINES)
    normalizer = named_function("advantage_normalizer", advantage_normalizer, NORMALIZERS)
    check_number("advantage_eps", advantage_eps, lambda eps: eps >= 0, "a number >= 0")
    check_groups(raw, group_size, normalizer)
    rewards = raw.double().reshape(-1, group_size)
    advantages = group_advantages(rewards, baseline, normalizer, advantage_eps)
    check_finite("baseline, advantage_normalizer: an advantage", advantages.flatten())
    dtype = torch.float64 if raw.dtype == torch.float64 else torch.float32
    return advantages.flatten().to(dtype), group_statistics(rewards, advantages)


def rows_by_group(groups: Int[Tensor, " batch"]) -> Int[Tensor, "groups G"]:
    """The rows of each group, wherever they stand in the batch. ValueError for groups of different sizes."""
    sizes = groups.unique(return_counts=True)[1]
    if int(sizes.min()) != int(sizes.max()):
        raise ValueError(
            f"groups: got {int(sizes.min())} to {int(sizes.max())} responses per prompt, expected the same "
            "number for each"
        )
    return groups.argsort(stable=True).view(len(sizes), -1)


def check_groups(raw: Tensor, group_size, normalizer) -> None:
    """Refuse rewards that are not whole groups, or that the normaliser cannot divide by."""
    if raw.ndim != 1 or not len(raw):
        raise ValueError(f"raw_rewards: got shape {tuple(raw.shape)}, expected (N,) with at least one reward")
    whole = isinstance(group_size, int) and not isinstance(group_size, bool) and group_size >= 1
    if not whole or len(raw) % group_size:
        raise ValueError(
            f"group_size: got {group_size!r} for {len(raw)} rewards, expected a positive divisor of "
            "their number"
        )
    if normalizer is group_std and group_size == 1:
        raise ValueError(
            "group_size: got 1 with advantage_normalizer='std', expected at least 2 responses per group "
            "(one number has no standard deviation)"
        )
    check_finite("raw_rewards: a reward", raw)
    if normalizer is group_mean and bool((raw < 0).any()):
        raise ValueError(
            f"raw_rewards: got {raw.min().item()} with advantage_normalizer='mean', expected rewards >= 0 "
            "(a negative group mean would turn the best response into the worst)"
        )


def per_group(name: str, result, rewards: Rewards) -> Tensor:
    """What a baseline or normaliser gave: (n_groups, 1), (n_groups, G), or one number for all."""
    expected = "(n_groups, 1) or (n_groups, G)"
    result = as_tensor(f"{name}: the function", result, f"a tensor {expected}", dtype=rewards.dtype)
    if tuple(result.shape) not in ((), (len(rewards), 1), tuple(rewards.shape)):
        raise ValueError(
            f"{name}: the function turns {tuple(rewards.shape)} rewards into shape {tuple(result.shape)}, "
            f"expected results {expected}"
        )
    return result
