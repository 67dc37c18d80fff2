"""Exercises on the loss: each method with its gradient, and the clip fraction."""

from __future__ import annotations

import math

import torch

from rlkit.losses import clip_statistics, compute_policy_gradient_loss
from rlkit.losses import loss_grpo as library_loss_grpo
from rlkit.study.exercises.core import exercise, normal, tensor


def loss_and_gradient(attempt, advantages, log_probs, *rest):
    """What is compared: the (B, T) loss and the gradient of its sum by log_probs, the loss masked."""
    leaf = log_probs.clone().requires_grad_()
    loss = attempt(advantages, leaf, *rest)
    if loss.shape != log_probs.shape:
        return {"loss": loss}
    gradient = None
    mask = rest[-1] if rest and isinstance(rest[-1], torch.Tensor) and rest[-1].dtype == torch.bool else None
    if loss.requires_grad:
        shown = loss if mask is None else loss.masked_fill(~mask, 0.0)
        (gradient,) = torch.autograd.grad(shown.sum(), leaf, allow_unused=True)
    gradient = torch.zeros_like(leaf) if gradient is None else gradient
    if mask is not None:
        loss = loss.masked_fill(~mask & loss.isfinite(), 0.0)  # a nan stays visible even where it is masked
    return {"loss": loss, "gradient": gradient}


def _by_token(advantages, log_probs, *others, term):
    """{"loss", "gradient"} from term(A, l, *others at the token) -> (loss, d loss / d l), in two loops."""
    result = {"loss": [], "gradient": []}
    for i, advantage in enumerate(advantages.flatten().tolist()):
        pairs = [
            term(advantage, l, *(other[i][t].item() for other in others))
            for t, l in enumerate(log_probs[i].tolist())
        ]
        result["loss"].append([pair[0] for pair in pairs])
        result["gradient"].append([pair[1] for pair in pairs])
    return result


def _on_policy_cases():
    return [
        ("two rows by hand", (tensor([2.0, -1.0]), tensor([[-1.0, -2.0, -0.5], [-3.0, -4.0, -1.0]]))),
        ("as many rows as tokens", (tensor([2.0, -1.0]), tensor([[-1.0, -2.0], [-3.0, -4.0]]))),
        ("advantages of shape (B, 1)", (tensor([[1.0], [0.0], [-0.5]]), normal(3, 2, seed=3) - 2)),
    ]


def _ratio_cases(*extra):
    """Rows with both signs of A, ratios on both sides of the clip range."""
    ratios = tensor([[1.5, 0.5, 1.1, 0.9], [1.5, 0.5, 1.1, 0.9]])
    old = tensor([[-1.0, -2.0, -0.5, -3.0], [-1.0, -2.0, -0.5, -3.0]])
    random_old = normal(3, 3, seed=4) - 2
    return [
        ("ratios 1.5, 0.5, 1.1, 0.9 and both signs", (tensor([1.0, -1.0]), old + ratios.log(), old, *extra)),
        (
            "as many rows as tokens",
            (tensor([0.5, -2.0, 1.0]), random_old + normal(3, 3, seed=5, scale=0.3), random_old, *extra),
        ),
        ("on-policy, ratio 1", (tensor([1.0, -0.5]), old.clone(), old.clone(), *extra)),
    ]


def _loss(method):
    def solution(advantages, log_probs, old=None, cliprange=None, mask=None):
        return compute_policy_gradient_loss(advantages, log_probs, method, old, cliprange, mask)[0]

    return solution


@exercise(
    title="The on-policy loss",
    difficulty=1,
    minutes=5,
    problem="compute_policy_gradient_loss_on_policy",
    notebook="03",
    reveals="rlkit.losses:loss_none",
    door="rlkit.losses:compute_policy_gradient_loss",
    observe=loss_and_gradient,
    cases=_on_policy_cases,
    solution=_loss("none"),
    hints=(
        "torch optimizers go downhill, the policy gradient goes uphill.",
        "Make the advantages a column with reshape(-1, 1): (B,) times (B, T) lines up with the wrong axis.",
    ),
)
def loss_none(advantages, log_probs):
    """-A log pi at every token: advantages (B,) or (B, 1), log_probs (B, T) with gradient -> (B, T)."""
    return _by_token(advantages, log_probs, term=lambda a, l: (-a * l, -a))


loss_none.mistake("the sign is missing: the optimizer would go downhill on the reward", "wrong_sign")(
    lambda a, l: a.reshape(-1, 1) * l
)
loss_none.mistake("(B,) is broadcast along the tokens, not along the rows", "broadcast_along_tokens")(
    lambda a, l: -a * l if a.ndim == 2 or len(a) == l.shape[1] else -a.reshape(-1, 1) * l
)
loss_none.mistake("the probability is used in place of its logarithm", "probability_loss")(
    lambda a, l: -a.reshape(-1, 1) * l.exp()
)
loss_none.mistake("log_probs are detached and no gradient reaches the policy", "detached_loss")(
    lambda a, l: -a.reshape(-1, 1) * l.detach()
)
loss_none.mistake("the row is already averaged; that is the next component's work", "averaged_loss")(
    lambda a, l: (-a.reshape(-1, 1) * l).mean(1, keepdim=True).expand_as(l)
)


def _w(l, old):
    return (l - old).exp()


@exercise(
    title="Token-level importance weights",
    difficulty=2,
    minutes=10,
    problem="compute_policy_gradient_loss_off_policy",
    notebook="06",
    reveals=("rlkit.losses:token_ratio", "rlkit.losses:loss_noclip"),
    door="rlkit.losses:compute_policy_gradient_loss",
    observe=loss_and_gradient,
    cases=_ratio_cases,
    solution=_loss("noclip"),
    hints=(
        "w = exp(log pi - log pi_0). What is its derivative by log pi?",
        "The loss is -A w: its gradient is already -A w grad log pi. There is no log pi left in it.",
    ),
)
def loss_noclip(advantages, log_probs, old_log_probs):
    """-A w at every token, w = pi / pi_0: advantages (B,), both log-probs (B, T) -> (B, T)."""
    return _by_token(
        advantages,
        log_probs,
        old_log_probs,
        term=lambda a, l, o: (-a * math.exp(l - o), -a * math.exp(l - o)),
    )


loss_noclip.mistake("the weight multiplies log pi: both factors carry gradient", "weight_times_log_prob")(
    lambda a, l, o: -a.reshape(-1, 1) * _w(l, o) * l
)
loss_noclip.mistake("the ratio is upside down", "ratio_inverted")(
    lambda a, l, o: -a.reshape(-1, 1) * _w(o, l)
)
loss_noclip.mistake("the log-ratio is used without the exponential", "log_ratio_only")(
    lambda a, l, o: -a.reshape(-1, 1) * (l - o)
)
loss_noclip.mistake("the ratio is detached: the value is right and the gradient is zero", "ratio_detached")(
    lambda a, l, o: -a.reshape(-1, 1) * _w(l, o).detach()
)
loss_noclip.mistake(
    "each token gets the whole sequence's weight, the product over its tokens", "sequence_ratio"
)(lambda a, l, o: (-a.reshape(-1, 1) * _w(l.sum(1, keepdim=True), o.sum(1, keepdim=True))).expand_as(l))
loss_noclip.mistake("(B,) is broadcast along the tokens, not along the rows", "noclip_broadcast")(
    lambda a, l, o: -a * _w(l, o) if len(a) == l.shape[1] else -a.reshape(-1, 1) * _w(l, o)
)


def _ppo_term(a, l, o, eps):
    w = math.exp(l - o)
    clipped = min(max(w, 1 - eps), 1 + eps)
    return -min(a * w, a * clipped), -a * w if a * w <= a * clipped else 0.0


@exercise(
    title="PPO's clipped loss",
    difficulty=3,
    minutes=15,
    problem="compute_policy_gradient_loss_off_policy",
    notebook="06",
    reveals=("rlkit.losses:token_ratio", "rlkit.losses:loss_grpo"),
    door="rlkit.losses:compute_policy_gradient_loss",
    observe=loss_and_gradient,
    cases=lambda: _ratio_cases(0.2),
    solution=_loss("grpo"),
    hints=(
        "Write the two candidates, A w and A clip(w, 1 - e, 1 + e), and take the smaller one. The sign "
        "comes last.",
        "By hand: A = 1, w = 1.5 gives -1.2 and no gradient; A = -1, w = 1.5 gives 1.5 and keeps its "
        "gradient.",
    ),
)
def loss_grpo(advantages, log_probs, old_log_probs, cliprange):
    """-min(A w, A clip(w, 1 - cliprange, 1 + cliprange)) at every token, (B, T)."""
    return _by_token(advantages, log_probs, old_log_probs, term=lambda a, l, o: _ppo_term(a, l, o, cliprange))


@loss_grpo.mistake("max stands in place of min")
def ppo_max(a, l, o, eps):
    a, w = a.reshape(-1, 1), _w(l, o)
    return -torch.maximum(a * w, a * w.clamp(1 - eps, 1 + eps))


@loss_grpo.mistake("the ratio is always clipped; the min that lets bad moves be undone is missing")
def ppo_clip_only(a, l, o, eps):
    return -a.reshape(-1, 1) * _w(l, o).clamp(1 - eps, 1 + eps)


@loss_grpo.mistake("the min is taken over the ratios, before A and its sign come in")
def ppo_min_of_ratios(a, l, o, eps):
    w = _w(l, o)
    return -a.reshape(-1, 1) * torch.minimum(w, w.clamp(1 - eps, 1 + eps))


@loss_grpo.mistake("there is no clipping at all")
def ppo_unclipped(a, l, o, eps):
    return -a.reshape(-1, 1) * _w(l, o)


@loss_grpo.mistake("A w is clipped, not w: the bounds depend on the advantage")
def ppo_clips_product(a, l, o, eps):
    a, w = a.reshape(-1, 1), _w(l, o)
    return -torch.minimum(a * w, (a * w).clamp(1 - eps, 1 + eps))


@loss_grpo.mistake("the sign is missing: the optimizer would go downhill on the reward")
def ppo_sign(a, l, o, eps):
    a, w = a.reshape(-1, 1), _w(l, o)
    return torch.minimum(a * w, a * w.clamp(1 - eps, 1 + eps))


@loss_grpo.mistake("the log-ratio is clipped to [-e, e], and the ratio's bounds become exp(-e) and exp(e)")
def ppo_log_clip(a, l, o, eps):
    a, w = a.reshape(-1, 1), _w(l, o)
    return -torch.minimum(a * w, a * (l - o).clamp(-eps, eps).exp())


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
    reveals=("rlkit.losses:sequence_ratio", "rlkit.losses:loss_gspo"),
    door="rlkit.losses:compute_policy_gradient_loss",
    observe=loss_and_gradient,
    cases=_gspo_cases,
    solution=_loss("gspo"),
    hints=(
        "The geometric mean is the exponential of the mean log-ratio, over response tokens only.",
        "Divide by mask.sum(1).clamp(min=1): an empty row then has s = exp(0) = 1. Expand the result to "
        "(B, T).",
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
    lambda a, l, o, e, m: _gspo(a, l, o, e, m, _masked_mean(_w(l, o), m))
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
    lambda a, l, o, e, m: _gspo(a, l, o, e, m, _w(l, o))
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
    reveals=("rlkit.losses:token_ratio", "rlkit.losses:loss_cispo"),
    door="rlkit.losses:compute_policy_gradient_loss",
    observe=loss_and_gradient,
    cases=lambda: _ratio_cases(0.2),
    solution=_loss("cispo"),
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

    return _by_token(advantages, log_probs, old_log_probs, term=term)


loss_cispo.mistake("the weight is not detached and carries gradient, too", "cispo_not_detached")(
    lambda a, l, o, e: -_w(l, o).clamp(max=1 + e) * a.reshape(-1, 1) * l
)
loss_cispo.mistake("small weights are clipped as well", "cispo_clips_low")(
    lambda a, l, o, e: -_w(l, o).clamp(1 - e, 1 + e).detach() * a.reshape(-1, 1) * l
)
loss_cispo.mistake("this is PPO: clipped tokens lose their gradient", "cispo_is_ppo")(
    lambda a, l, o, e: (
        -torch.minimum(a.reshape(-1, 1) * _w(l, o), a.reshape(-1, 1) * _w(l, o).clamp(1 - e, 1 + e))
    )
)
loss_cispo.mistake("log pi is missing, and a detached weight alone has no gradient", "cispo_no_log_prob")(
    lambda a, l, o, e: -_w(l, o).clamp(max=1 + e).detach() * a.reshape(-1, 1).expand_as(l)
)
loss_cispo.mistake("the weight is not clipped", "cispo_unclipped")(
    lambda a, l, o, e: -_w(l, o).detach() * a.reshape(-1, 1) * l
)
loss_cispo.mistake("the bound is cliprange itself, not 1 + cliprange", "cispo_bound")(
    lambda a, l, o, e: -_w(l, o).clamp(max=e).detach() * a.reshape(-1, 1) * l
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
    reveals="rlkit.losses:clip_statistics",
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
