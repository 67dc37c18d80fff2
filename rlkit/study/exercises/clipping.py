"""Exercises on GSPO, CISPO and the clip fraction."""

from __future__ import annotations

import math

import torch

from rlkit.losses import clip_statistics
from rlkit.losses import loss_grpo as library_loss_grpo
from rlkit.study.exercises.core import exercise, normal, tensor
from rlkit.study.exercises.losses import by_token, library_loss, loss_and_gradient, ratio, ratio_cases


def _gspo_cases():
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]], dtype=torch.bool)
    old = torch.zeros(2, 3, dtype=torch.float64) - 2
    ratio = tensor([[0.3, 0.1, 5.0], [0.3, 0.1, 5.0]])
    three = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    random_old = normal(3, 3, seed=6) - 2
    return [
        ("a wide range, both signs", (tensor([1.0, -1.0]), old + ratio, old, 10.0, mask)),
        ("the paper's range, both signs", (tensor([1.0, -1.0]), old + ratio, old, 3e-4, mask)),
        (
            "a row without response tokens",
            (tensor([1.0, 0.5, 1.0]), random_old + normal(3, 3, seed=7, scale=0.1), random_old, 0.2, three),
        ),
    ]


@exercise(
    title="GSPO: one weight per sequence",
    difficulty=3,
    minutes=20,
    problem="compute_policy_gradient_loss_off_policy_gspo",
    notebook="06",
    reveals=("rlkit.losses:sequence_ratio", "rlkit.losses:bounds", "rlkit.losses:loss_gspo"),
    door="rlkit.losses:compute_policy_gradient_loss",
    observe=loss_and_gradient,
    cases=_gspo_cases,
    solution=library_loss("gspo"),
    hints=(
        "The geometric mean is the exponential of the mean log-ratio, over response tokens only.",
        "Divide by mask.sum(1).clamp(min=1): an empty row then has s = exp(0) = 1. Expand the result to (B, "
        "T).",
    ),
)
def loss_gspo(advantages, log_probs, old_log_probs, cliprange, response_mask):
    """-min(A s, A clip(s)) at every token; s = exp(mean over response tokens of log pi - log pi_0)."""
    result = {"loss": [], "gradient": []}
    for i, a in enumerate(advantages.tolist()):
        flags = response_mask[i].tolist()
        n = sum(flags)
        logs = [l - o for l, o, flag in zip(log_probs[i].tolist(), old_log_probs[i].tolist(), flags) if flag]
        s = math.exp(sum(logs) / n) if n else 1.0
        clipped = min(max(s, 1 - cliprange), 1 + cliprange)
        loss, slope = -min(a * s, a * clipped), (-a * s if a * s <= a * clipped else 0.0)
        # the loss stands at n tokens, each of which moves s by s / n: n x slope / n
        result["loss"].append([loss if flag else 0.0 for flag in flags])
        result["gradient"].append([slope if flag else 0.0 for flag in flags])
    return result


def _gspo(a, l, o, eps, mask, s):
    a = a.reshape(-1, 1)
    return -torch.minimum(a * s, a * s.clamp(1 - eps, 1 + eps)).expand_as(l)


def _masked_mean(values, mask):
    return values.masked_fill(~mask, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


loss_gspo.mistake("the mean runs over every position, prompt and padding included", "gspo_unmasked")(
    lambda a, l, o, e, m: _gspo(a, l, o, e, m, (l - o).mean(1, keepdim=True).exp())
)
loss_gspo.mistake(
    "the masked sum is divided by the row's width, not by the number of response tokens", "gspo_over_width"
)(lambda a, l, o, e, m: _gspo(a, l, o, e, m, (l - o).masked_fill(~m, 0.0).mean(1, keepdim=True).exp()))
loss_gspo.mistake("it is the arithmetic mean of the ratios, not the geometric one", "gspo_arithmetic")(
    lambda a, l, o, e, m: _gspo(a, l, o, e, m, _masked_mean(ratio(l, o), m))
)
loss_gspo.mistake("the root 1/L is missing: the plain product of ratios", "gspo_product")(
    lambda a, l, o, e, m: _gspo(a, l, o, e, m, (l - o).masked_fill(~m, 0.0).sum(1, keepdim=True).exp())
)
loss_gspo.mistake("a row without response tokens is divided by 0", "gspo_empty_row")(
    lambda a, l, o, e, m: _gspo(
        a, l, o, e, m, ((l - o).masked_fill(~m, 0.0).sum(1, keepdim=True) / m.sum(1, keepdim=True)).exp()
    )
)
loss_gspo.mistake("the length is divided out twice", "gspo_length_twice")(
    lambda a, l, o, e, m: (
        _gspo(a, l, o, e, m, _masked_mean(l - o, m).exp()) / m.sum(1, keepdim=True).clamp(min=1)
    )
)
loss_gspo.mistake("each token keeps its own ratio: this is PPO", "gspo_token_ratio")(
    lambda a, l, o, e, m: _gspo(a, l, o, e, m, ratio(l, o))
)
loss_gspo.mistake("the min is missing: the ratio is always clipped", "gspo_clip_only")(
    lambda a, l, o, e, m: -a.reshape(-1, 1) * _masked_mean(l - o, m).exp().clamp(1 - e, 1 + e).expand_as(l)
)
loss_gspo.mistake("the result is one number per row and not spread over its tokens", "gspo_not_expanded")(
    lambda a, l, o, e, m: _gspo(a, l, o, e, m, _masked_mean(l - o, m).exp())[:, :1]
)


@exercise(
    title="CISPO: clip the weight, keep the gradient",
    difficulty=3,
    minutes=15,
    problem="compute_policy_gradient_loss_off_policy",
    notebook="06",
    reveals=("rlkit.losses:token_ratio", "rlkit.losses:bounds", "rlkit.losses:loss_cispo"),
    door="rlkit.losses:compute_policy_gradient_loss",
    observe=loss_and_gradient,
    cases=lambda: ratio_cases(0.2),
    solution=library_loss("cispo"),
    hints=(
        "The weight is a constant here: .detach() it. What carries the gradient, then?",
        "-min(w, 1 + e).detach() * A * log_probs; below 1 nothing is clipped.",
    ),
)
def loss_cispo(advantages, log_probs, old_log_probs, cliprange):
    """-stop_gradient(min(w, 1 + cliprange)) A log pi at every token, (B, T)."""

    def term(a, l, o):
        held = min(math.exp(l - o), 1 + cliprange)
        return -held * a * l, -held * a

    return by_token(advantages, log_probs, old_log_probs, term=term)


loss_cispo.mistake("the weight is not detached and carries gradient, too", "cispo_not_detached")(
    lambda a, l, o, e: -ratio(l, o).clamp(max=1 + e) * a.reshape(-1, 1) * l
)
loss_cispo.mistake("small weights are clipped as well", "cispo_clips_low")(
    lambda a, l, o, e: -ratio(l, o).clamp(1 - e, 1 + e).detach() * a.reshape(-1, 1) * l
)
loss_cispo.mistake("this is PPO: clipped tokens lose their gradient", "cispo_is_ppo")(
    lambda a, l, o, e: (
        -torch.minimum(a.reshape(-1, 1) * ratio(l, o), a.reshape(-1, 1) * ratio(l, o).clamp(1 - e, 1 + e))
    )
)
loss_cispo.mistake("log pi is missing, and a detached weight alone has no gradient", "cispo_no_log_prob")(
    lambda a, l, o, e: -ratio(l, o).clamp(max=1 + e).detach() * a.reshape(-1, 1).expand_as(l)
)
loss_cispo.mistake("the weight is not clipped", "cispo_unclipped")(
    lambda a, l, o, e: -ratio(l, o).detach() * a.reshape(-1, 1) * l
)
loss_cispo.mistake("the bound is cliprange itself, not 1 + cliprange", "cispo_bound")(
    lambda a, l, o, e: -ratio(l, o).clamp(max=e).detach() * a.reshape(-1, 1) * l
)


def _clip_fraction_cases():
    ratio = tensor([[1.5, 0.5, 1.0, 9.0], [1.5, 0.5, 1.1, 1.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    uneven = torch.tensor([[1, 1, 0, 0, 0, 0], [1] * 6], dtype=torch.bool)
    return [
        ("both signs, padding with a wild ratio", (tensor([1.0, -1.0]), ratio, 0.2, mask)),
        (
            "rows of different lengths",
            (tensor([1.0, 1.0]), tensor([[1.5, 1, 9, 9, 9, 9], [1.0] * 6]), 0.2, uneven),
        ),
        ("an advantage of zero", (tensor([0.0, 1.0]), ratio, 0.2, mask)),
        ("no response token at all", (tensor([1.0, 1.0]), ratio, 0.2, torch.zeros_like(mask))),
    ]


@exercise(
    title="The clip fraction",
    difficulty=2,
    minutes=10,
    problem="compute_policy_gradient_loss_off_policy",
    notebook="06",
    reveals=("rlkit.losses:bounds", "rlkit.losses:clip_statistics"),
    door="rlkit.losses:compute_policy_gradient_loss",
    axes=(),
    cases=_clip_fraction_cases,
    solution=lambda a, w, e, m: clip_statistics(library_loss_grpo, a.reshape(-1, 1), w, e, m)[
        "clip_fraction"
    ],
    hints=(
        "Clipping binds where the gradient is lost. For A > 0 that is one side, for A < 0 the other.",
        "Count clipped response tokens of the whole batch, then divide once by the number of response "
        "tokens.",
    ),
)
def clip_fraction(advantages, ratio, cliprange, response_mask):
    """The share of response tokens where PPO's clip binds: no gradient flows. 0 if there are none."""
    clipped, total = 0, 0
    for a, ratios, flags in zip(advantages.tolist(), ratio.tolist(), response_mask.tolist()):
        for w, flag in zip(ratios, flags):
            total += flag
            clipped += flag and ((a > 0 and w > 1 + cliprange) or (a < 0 and w < 1 - cliprange))
    return clipped / total if total else 0.0


def _binds(a, w, e):
    a = a.reshape(-1, 1)
    return ((a > 0) & (w > 1 + e)) | ((a < 0) & (w < 1 - e))


clip_fraction.mistake("every ratio outside the range counts, whatever the sign of A", "fraction_both_sides")(
    lambda a, w, e, m: (((w - 1).abs() > e) & m).sum() / m.sum().clamp(min=1)
)
clip_fraction.mistake("prompt and padding are counted", "fraction_with_padding")(
    lambda a, w, e, m: _binds(a, w, e).double().mean()
)
clip_fraction.mistake(
    "it is the mean of the rows' fractions: short rows weigh too much", "fraction_mean_of_rows"
)(lambda a, w, e, m: ((_binds(a, w, e) & m).sum(1) / m.sum(1).clamp(min=1)).mean())
clip_fraction.mistake("clipped response tokens are divided by all positions", "fraction_over_width")(
    lambda a, w, e, m: (_binds(a, w, e) & m).double().mean()
)
clip_fraction.mistake("a batch without response tokens gives 0/0", "fraction_nan")(
    lambda a, w, e, m: (_binds(a, w, e) & m).sum() / m.sum()
)
clip_fraction.mistake("only the upper side is counted", "fraction_upper_only")(
    lambda a, w, e, m: ((a.reshape(-1, 1) > 0) & (w > 1 + e) & m).sum() / m.sum().clamp(min=1)
)
