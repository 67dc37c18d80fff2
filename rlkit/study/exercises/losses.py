"""Exercises on the loss: on-policy, importance weights, PPO's clip, each with its gradient."""

from __future__ import annotations

import math

import torch

from rlkit.losses import compute_policy_gradient_loss
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


def by_token(advantages, log_probs, *others, term):
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


def ratio_cases(*extra):
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


def library_loss(method):
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
    solution=library_loss("none"),
    hints=(
        "torch optimizers go downhill, the policy gradient goes uphill.",
        "Make the advantages a column with reshape(-1, 1): (B,) times (B, T) lines up with the wrong axis.",
    ),
)
def loss_none(advantages, log_probs):
    """-A log pi at every token: advantages (B,) or (B, 1), log_probs (B, T) with gradient -> (B, T)."""
    return by_token(advantages, log_probs, term=lambda a, l: (-a * l, -a))


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


def ratio(l, old):
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
    cases=ratio_cases,
    solution=library_loss("noclip"),
    hints=(
        "w = exp(log pi - log pi_0). What is its derivative by log pi?",
        "The loss is -A w: its gradient is already -A w grad log pi. There is no log pi left in it.",
    ),
)
def loss_noclip(advantages, log_probs, old_log_probs):
    """-A w at every token, w = pi / pi_0: advantages (B,), both log-probs (B, T) -> (B, T)."""
    return by_token(
        advantages,
        log_probs,
        old_log_probs,
        term=lambda a, l, o: (-a * math.exp(l - o), -a * math.exp(l - o)),
    )


loss_noclip.mistake("the weight multiplies log pi: both factors carry gradient", "weight_times_log_prob")(
    lambda a, l, o: -a.reshape(-1, 1) * ratio(l, o) * l
)
loss_noclip.mistake("the ratio is upside down", "ratio_inverted")(
    lambda a, l, o: -a.reshape(-1, 1) * ratio(o, l)
)
loss_noclip.mistake("the log-ratio is used without the exponential", "log_ratio_only")(
    lambda a, l, o: -a.reshape(-1, 1) * (l - o)
)
loss_noclip.mistake("the ratio is detached: the value is right and the gradient is zero", "ratio_detached")(
    lambda a, l, o: -a.reshape(-1, 1) * ratio(l, o).detach()
)
loss_noclip.mistake(
    "each token gets the whole sequence's weight, the product over its tokens", "sequence_ratio"
)(lambda a, l, o: (-a.reshape(-1, 1) * ratio(l.sum(1, keepdim=True), o.sum(1, keepdim=True))).expand_as(l))
loss_noclip.mistake("(B,) is broadcast along the tokens, not along the rows", "noclip_broadcast")(
    lambda a, l, o: -a * ratio(l, o) if len(a) == l.shape[1] else -a.reshape(-1, 1) * ratio(l, o)
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
    reveals=("rlkit.losses:token_ratio", "rlkit.losses:bounds", "rlkit.losses:loss_grpo"),
    door="rlkit.losses:compute_policy_gradient_loss",
    observe=loss_and_gradient,
    cases=lambda: ratio_cases(0.2),
    solution=library_loss("grpo"),
    hints=(
        "Write the two candidates, A w and A clip(w, 1 - e, 1 + e), and take the smaller one. The sign comes "
        "last.",
        "By hand: A = 1, w = 1.5 gives -1.2 and no gradient; A = -1, w = 1.5 gives 1.5 and keeps its "
        "gradient.",
    ),
)
def loss_grpo(advantages, log_probs, old_log_probs, cliprange):
    """-min(A w, A clip(w, 1 - cliprange, 1 + cliprange)) at every token, (B, T)."""
    return by_token(advantages, log_probs, old_log_probs, term=lambda a, l, o: _ppo_term(a, l, o, cliprange))


@loss_grpo.mistake("max stands in place of min")
def ppo_max(a, l, o, eps):
    a, w = a.reshape(-1, 1), ratio(l, o)
    return -torch.maximum(a * w, a * w.clamp(1 - eps, 1 + eps))


@loss_grpo.mistake("the ratio is always clipped; the min that lets bad moves be undone is missing")
def ppo_clip_only(a, l, o, eps):
    return -a.reshape(-1, 1) * ratio(l, o).clamp(1 - eps, 1 + eps)


@loss_grpo.mistake("the min is taken over the ratios, before A and its sign come in")
def ppo_min_of_ratios(a, l, o, eps):
    w = ratio(l, o)
    return -a.reshape(-1, 1) * torch.minimum(w, w.clamp(1 - eps, 1 + eps))


@loss_grpo.mistake("there is no clipping at all")
def ppo_unclipped(a, l, o, eps):
    return -a.reshape(-1, 1) * ratio(l, o)


@loss_grpo.mistake("A w is clipped, not w: the bounds depend on the advantage")
def ppo_clips_product(a, l, o, eps):
    a, w = a.reshape(-1, 1), ratio(l, o)
    return -torch.minimum(a * w, (a * w).clamp(1 - eps, 1 + eps))


@loss_grpo.mistake("the sign is missing: the optimizer would go downhill on the reward")
def ppo_sign(a, l, o, eps):
    a, w = a.reshape(-1, 1), ratio(l, o)
    return torch.minimum(a * w, a * w.clamp(1 - eps, 1 + eps))


@loss_grpo.mistake("the log-ratio is clipped to [-e, e], and the ratio's bounds become exp(-e) and exp(e)")
def ppo_log_clip(a, l, o, eps):
    a, w = a.reshape(-1, 1), ratio(l, o)
    return -torch.minimum(a * w, a * (l - o).clamp(-eps, eps).exp())
