"""The named estimators. An algorithm is a row of this table, not a branch of the trainer."""

from collections.abc import Callable
from dataclasses import dataclass

from rlkit.support.checks import hint


@dataclass(frozen=True)
class Algorithm:
    """What tells one policy-gradient estimator from another; the rest is shared.

    baseline, advantage_normalizer: a name in ``rlkit.advantages.BASELINES`` and ``NORMALIZERS``, or a
        function like those there, of the rewards (n_groups, G).
    loss_normalization: a name in ``rlkit.losses.LOSS_NORMALIZATIONS``, or a function like those there,
        a sum over rows: the losses of microbatches are added.
    importance_reweighting_method: a name in ``rlkit.losses.REWEIGHTINGS``, or a function like those there.
    cliprange: how far an importance ratio may leave 1, or (below, above), for the methods that clip.
    off_policy: True makes the train batch smaller than the rollout batch: several updates use one rollout.
    mask_truncated: responses cut at max_tokens count in their group's mean, but are not learned from.
    resamples: how often groups whose rewards are all equal may be replaced by other prompts'.
    kl_coef: factor of the penalty ``rlkit.losses.k3``, towards the model before training.

    Your own is one row: ``dataclasses.replace(ALGORITHMS["drgrpo"], name="mine", advantage_normalizer=f)``.
    """

    name: str
    baseline: str | Callable = "mean"
    advantage_normalizer: str | Callable = "std"
    loss_normalization: str | Callable = "sequence"
    importance_reweighting_method: str | Callable = "none"
    cliprange: float | tuple[float, float] | None = None
    off_policy: bool = False
    mask_truncated: bool = False
    resamples: int = 0
    kl_coef: float = 0.0
    summary: str = ""


_ROWS = [  # as the fields above, in their order
    ("grpo", "mean", "std", "sequence", "none", None, False),
    ("grpo_constant", "mean", "std", "constant", "none", None, False),
    ("drgrpo", "mean", "none", "constant", "none", None, False),
    ("rft", "none", "none", "constant", "none", None, False),
    ("maxrl", "mean", "mean", "constant", "none", None, False),
    ("offpolicy_naive", "mean", "std", "sequence", "none", None, True),
    ("offpolicy_noclip", "mean", "std", "sequence", "noclip", None, True),
    ("offpolicy_clip", "mean", "std", "sequence", "grpo", 0.2, True),
    ("offpolicy_gspo", "mean", "std", "sequence", "gspo", 3e-4, True),
    ("cispo", "mean", "std", "sequence", "cispo", 0.2, True),
    ("dapo", "mean", "std", "token", "grpo", (0.2, 0.28), True, True, 2),
]
_SUMMARIES = {
    "grpo": "group mean subtracted, divided by the group's deviation, mean over each response",
    "grpo_constant": "grpo with one constant divisor in place of each response's length",
    "drgrpo": "group mean subtracted and nothing divided: unbiased up to the factor (G-1)/G",
    "rft": "imitate the right responses, ignore the wrong ones",
    "maxrl": "group mean subtracted, then divided by it: a prompt solved with chance eta weighs 1/eta",
    "offpolicy_naive": "several updates per rollout batch, as if each were on-policy",
    "offpolicy_noclip": "token-level importance weights, not clipped",
    "offpolicy_clip": "token-level importance weights, clipped as in PPO",
    "offpolicy_gspo": "one weight per response, the geometric mean of its tokens', clipped",
    "cispo": "the weight is held at 1 + e and carries no gradient; every token keeps its score function",
    "dapo": "offpolicy_clip with more room above, a mean over tokens, cut and silent rows left out",
}
ALGORITHMS = {row[0]: Algorithm(*row, summary=_SUMMARIES[row[0]]) for row in _ROWS}


def get_algorithm(name: str | Algorithm) -> Algorithm:
    """The algorithm of this name; an ``Algorithm`` is given back as it is. ValueError for an unknown name."""
    if isinstance(name, Algorithm):
        return name
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    known = f"expected one of {', '.join(ALGORITHMS)} or an Algorithm"
    raise ValueError(f"algo: got {name!r}, {known}{hint(name, ALGORITHMS)}")
