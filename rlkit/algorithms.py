"""The named estimators. An algorithm is a row of this table, not a branch of the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Algorithm:
    """What tells one policy-gradient estimator from another; the rest is shared.

    baseline, advantage_normalizer: see ``compute_group_normalized_rewards``; a name or a function of the
    rewards.
    loss_normalization: "sequence" or "constant", see ``aggregate_loss_across_microbatch``.
    importance_reweighting_method, cliprange: see ``compute_policy_gradient_loss``; a name or a function.
    off_policy: True makes the train batch smaller than the rollout batch, so that several updates use one
        rollout.

    Your own is one row: ``dataclasses.replace(ALGORITHMS["drgrpo"], name="mine",
    advantage_normalizer=my_function)``.
    """

    name: str
    baseline: str | Callable = "mean"
    advantage_normalizer: str | Callable = "std"
    loss_normalization: str = "sequence"
    importance_reweighting_method: str | Callable = "none"
    cliprange: float | None = None
    off_policy: bool = False
    summary: str = ""


def _table(*rows: Algorithm) -> dict[str, Algorithm]:
    return {row.name: row for row in rows}


ALGORITHMS: dict[str, Algorithm] = _table(
    Algorithm(
        "grpo", summary="group mean subtracted, divided by the group's deviation, mean over each response"
    ),
    Algorithm(
        "grpo_constant",
        loss_normalization="constant",
        summary="grpo with one constant divisor in place of each response's length",
    ),
    Algorithm(
        "drgrpo",
        advantage_normalizer="none",
        loss_normalization="constant",
        summary="group mean subtracted and nothing divided: unbiased up to (G-1)/G",
    ),
    Algorithm(
        "rft",
        baseline="none",
        advantage_normalizer="none",
        loss_normalization="constant",
        summary="imitate the right responses, ignore the wrong ones",
    ),
    Algorithm(
        "maxrl",
        advantage_normalizer="mean",
        loss_normalization="constant",
        summary="group mean subtracted and divided by: hard prompts weigh 1/eta",
    ),
    Algorithm(
        "offpolicy_naive",
        off_policy=True,
        summary="several updates per rollout batch, as if each were on-policy",
    ),
    Algorithm(
        "offpolicy_noclip",
        importance_reweighting_method="noclip",
        off_policy=True,
        summary="token-level importance weights, not clipped",
    ),
    Algorithm(
        "offpolicy_clip",
        importance_reweighting_method="grpo",
        cliprange=0.2,
        off_policy=True,
        summary="token-level importance weights, clipped as in PPO",
    ),
    Algorithm(
        "offpolicy_gspo",
        importance_reweighting_method="gspo",
        cliprange=3e-4,
        off_policy=True,
        summary="one weight per response, the geometric mean of its tokens', clipped",
    ),
    Algorithm(
        "cispo",
        importance_reweighting_method="cispo",
        cliprange=0.2,
        off_policy=True,
        summary="the weight is held at 1 + e and carries no gradient; every token keeps its score function",
    ),
)


def get_algorithm(name: str | Algorithm) -> Algorithm:
    """The algorithm of this name; an ``Algorithm`` is given back as it is. ValueError for an unknown name."""
    if isinstance(name, Algorithm):
        return name
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    close = get_close_matches(str(name), ALGORITHMS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"algo: got {name!r}, expected one of {', '.join(ALGORITHMS)} or an Algorithm{hint}")
