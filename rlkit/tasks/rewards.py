"""A reward function applied to responses, its results checked."""

import torch

from rlkit.support.checks import number, shown
from rlkit.support.shapes import PerPosition

REWARD_KEYS = ("reward", "format_reward", "answer_reward")


def grade_responses(reward_fn, responses, ground_truths) -> dict[str, PerPosition]:
    """The rewards row by row, {name: (N,) float32}, for the names that the function gives.

    ``compute_rollout_rewards`` is this plus the means.
    """
    if len(responses) != len(ground_truths) or not len(responses):
        raise ValueError(
            f"rollout_responses, repeated_ground_truths: got {len(responses)} responses and "
            f"{len(ground_truths)} ground truths, expected the same number, at least one"
        )
    graded = [reward_fn(response, truth) for response, truth in zip(responses, ground_truths)]
    for row in graded:
        if not isinstance(row, dict) or "reward" not in row:
            raise ValueError(
                f"reward_fn: expected a dict with the key 'reward' for every response, got {row!r}"
            )
    rows = {}
    for name in REWARD_KEYS:
        if all(name in row for row in graded):
            values = [row[name] for row in graded]
            rows[name] = torch.tensor([float(v) if isinstance(v, bool) else number(v) for v in values])
            for value, fine in zip(values, rows[name].isfinite().tolist()):
                if not fine:
                    raise ValueError(
                        f"reward_fn: {name!r} of a response is {shown(value)}, expected finite numbers"
                    )
    return rows
