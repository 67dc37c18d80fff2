"""A reward function applied to responses, its results checked."""

import inspect

import torch

from rlkit.support.checks import number, shown
from rlkit.support.shapes import PerPosition

REWARD_KEYS = ("reward", "format_reward", "answer_reward")


def truths_for(reward_fn, problems) -> list:
    """What the function is asked with: the problems, where its second parameter is called ``problem``, else
    their gold answers."""
    try:
        names = list(inspect.signature(reward_fn).parameters)
    except (TypeError, ValueError):  # a builtin
        names = []
    return list(problems) if names[1:2] == ["problem"] else [problem.answer for problem in problems]


def grade_responses(reward_fn, responses, ground_truths, dtype=torch.float32) -> dict[str, PerPosition]:
    """The rewards row by row, {name: (N,) of dtype}, for the names that the function gives.

    The numbers under its ``further_keys`` come as "reward_<name>".
    ``compute_rollout_rewards`` is this plus the means.
    """
    if len(responses) != len(ground_truths) or not len(responses):
        raise ValueError(
            f"rollout_responses, repeated_ground_truths: got {len(responses)} responses and "
            f"{len(ground_truths)} ground truths, expected the same number, at least one"
        )
    try:
        graded = [reward_fn(response, truth) for response, truth in zip(responses, ground_truths)]
    except SystemExit as error:  # it would end the job as if all were well
        raise RuntimeError(f"reward_fn: it called sys.exit({error.code!r})") from None
    for row in graded:
        if not isinstance(row, dict) or "reward" not in row:
            raise ValueError(
                f"reward_fn: expected a dict with the key 'reward' for every response, got {row!r}"
            )
    rows = {}
    for name in (*REWARD_KEYS, *further_keys(graded)):
        if all(name in row for row in graded):
            values = [row[name] for row in graded]
            given = name if name in REWARD_KEYS else f"reward_{name}"
            numbers = [float(v) if isinstance(v, bool) else number(v) for v in values]
            rows[given] = torch.tensor(numbers, dtype=dtype)
            for value, fine in zip(values, rows[given].isfinite().tolist()):
                if not fine:
                    raise ValueError(
                        f"reward_fn: {name!r} of a response is {shown(value)}, expected finite numbers"
                    )
    return rows


def further_keys(graded: list[dict]) -> list:
    """The keys of one's own under which every response has a number."""
    own = [key for key in graded[0] if key not in REWARD_KEYS]
    return [key for key in own if all(hasattr(row.get(key), "__float__") for row in graded)]
