"""Exercises on what a train step adds: aggregation, microbatches, pruning, alignment."""

from __future__ import annotations

import math

import torch

from rlkit.losses import aggregate_loss_across_microbatch
from rlkit.study.exercises.core import exercise, normal, tensor


def _aggregation_cases(*extra):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    return [
        ("rows of different lengths", (tensor([[1.0, 3.0, 7.0], [5.0, 7.0, 7.0]]), mask, *extra)),
        ("an empty row", (tensor([[3.0, 1.0], [2.0, 7.0]]), torch.tensor([[0, 0], [1, 0]]).bool(), *extra)),
        (
            "nan and inf outside the mask",
            (tensor([[1.0, math.nan], [2.0, math.inf]]), torch.tensor([[1, 0], [1, 0]]).bool(), *extra),
        ),
    ]


def value_and_gradient(attempt, per_token_loss, mask, *rest):
    leaf = per_token_loss.clone().requires_grad_()
    loss = attempt(leaf, mask, *rest)
    if loss.numel() != 1:
        return {"loss": loss}
    gradient = None
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)
    return {"loss": loss.reshape(()), "gradient": torch.zeros_like(leaf) if gradient is None else gradient}


@exercise(
    title="Mean over tokens, then over sequences",
    difficulty=2,
    minutes=10,
    problem="aggregate_loss_across_microbatch_sequence",
    notebook="03",
    observe=value_and_gradient,
    reveals=("rlkit.losses:masked_sums", "rlkit.losses:sequence_mean"),
    door="rlkit.losses:aggregate_loss_across_microbatch",
    cases=_aggregation_cases,
    solution=aggregate_loss_across_microbatch,
    hints=(
        "masked_fill(~mask, 0.0) before the sum: a nan times 0 is still nan.",
        "Divide each row's sum by its own count, at least 1, and the sum of the rows by B, empty rows "
        "included.",
    ),
)
def aggregate_sequence(per_token_loss, mask):
    """Mean over each row's masked tokens, then over all B rows (an empty row adds 0 and counts): a scalar."""
    n_rows = len(per_token_loss)
    total, gradient = 0.0, []
    for losses, flags in zip(per_token_loss.tolist(), mask.tolist()):
        n = sum(flags)
        total += sum(loss for loss, flag in zip(losses, flags) if flag) / n if n else 0.0
        gradient.append([1 / n / n_rows if flag else 0.0 for flag in flags])
    return {"loss": total / n_rows, "gradient": gradient}


aggregate_sequence.mistake(
    "every token has one vote: long responses weigh more than short ones", "token_mean"
)(lambda x, m: x.masked_fill(~m, 0.0).sum() / m.sum())
aggregate_sequence.mistake("the padding is averaged over as well", "mean_over_width")(
    lambda x, m: x.masked_fill(~m, 0.0).mean(1).mean()
)
aggregate_sequence.mistake("an empty row is divided by 0", "empty_row_nan")(
    lambda x, m: (x.masked_fill(~m, 0.0).sum(1) / m.sum(1)).mean()
)
aggregate_sequence.mistake("nan times a mask of 0 is nan: select, do not multiply", "multiplied_mask")(
    lambda x, m: ((x * m).sum(1) / m.sum(1).clamp(min=1)).mean()
)
aggregate_sequence.mistake("empty rows are left out of the number of rows", "empty_row_dropped")(
    lambda x, m: (x.masked_fill(~m, 0.0).sum(1) / m.sum(1).clamp(min=1)).sum() / m.any(1).sum()
)
aggregate_sequence.mistake("the rows are summed, not averaged", "rows_summed")(
    lambda x, m: (x.masked_fill(~m, 0.0).sum(1) / m.sum(1).clamp(min=1)).sum()
)
aggregate_sequence.mistake("the mask is ignored", "mask_ignored")(lambda x, m: x.mean(1).mean())


@exercise(
    title="One constant for all of training",
    difficulty=1,
    minutes=5,
    problem="aggregate_loss_across_microbatch_constant",
    notebook="05",
    observe=value_and_gradient,
    reveals=("rlkit.losses:masked_sums", "rlkit.losses:constant_sum"),
    door="rlkit.losses:aggregate_loss_across_microbatch",
    cases=lambda: _aggregation_cases(16),
    solution=lambda x, m, z: aggregate_loss_across_microbatch(x, m, "constant", z),
    hints="A masked sum over one number. That number already covers the whole batch.",
)
def aggregate_constant(per_token_loss, mask, normalization_constant):
    """The sum of the masked losses over the constant, a scalar."""
    total = sum(
        loss
        for losses, flags in zip(per_token_loss.tolist(), mask.tolist())
        for loss, flag in zip(losses, flags)
        if flag
    )
    return {
        "loss": total / normalization_constant,
        "gradient": [
            [1 / normalization_constant if flag else 0.0 for flag in flags] for flags in mask.tolist()
        ],
    }


aggregate_constant.mistake("the sum is also divided by the number of rows", "constant_and_rows")(
    lambda x, m, z: x.masked_fill(~m, 0.0).sum() / z / len(x)
)
aggregate_constant.mistake("each row's mean is taken first: the length bias is back", "constant_of_means")(
    lambda x, m, z: (x.masked_fill(~m, 0.0).sum(1) / m.sum(1).clamp(min=1)).sum() / z
)
aggregate_constant.mistake("nan times a mask of 0 is nan: select, do not multiply", "constant_multiplied")(
    lambda x, m, z: (x * m).sum() / z
)
aggregate_constant.mistake("the mask is ignored", "constant_unmasked")(lambda x, m, z: x.sum() / z)
aggregate_constant.mistake(
    "it is divided by the number of tokens, not by the constant", "constant_is_tokens"
)(lambda x, m, z: x.masked_fill(~m, 0.0).sum() / m.sum())


def _split(rows, k):
    size = -(-len(rows) // k)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _library_microbatches(loss, mask, k, normalization, constant):
    parts = []
    for rows in torch.arange(len(loss)).split(-(-len(loss) // k)):
        value = aggregate_loss_across_microbatch(loss[rows], mask[rows], normalization, constant)
        parts.append(value * (len(rows) / len(loss)) if normalization == "sequence" else value)
    return parts


def _microbatch_cases():
    loss = tensor([[1.0, 3.0, 7.0], [5.0, 7.0, 7.0], [2.0, 2.0, 2.0], [4.0, 0.0, 9.0], [6.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    return [
        ("4 rows in 2, sequence", (loss[:4], mask[:4], 2, "sequence", None)),
        ("5 rows in 2 (3 and 2), sequence", (loss, mask, 2, "sequence", None)),
        ("4 rows in 2, constant 16", (loss[:4], mask[:4], 2, "constant", 16)),
        ("more microbatches than rows", (loss[:2], mask[:2], 4, "sequence", None)),
        ("one microbatch", (loss, mask, 1, "constant", 32)),
    ]


@exercise(
    title="Losses that microbatches may add up",
    difficulty=3,
    minutes=15,
    problem="grpo_train_step_standard_on_policy",
    notebook="03",
    reveals=("rlkit.batch:RolloutBatch.split", "rlkit.grpo:train_step:for rows, mine in"),
    door="rlkit.grpo:train_step",
    axes=("microbatch",),
    solution=_library_microbatches,
    cases=_microbatch_cases,
    hints=(
        "backward() adds gradients: the microbatch losses must add up to the loss of the whole batch.",
        "A mean over m of B rows has to be scaled by m / B; a sum over a constant needs nothing.",
    ),
)
def microbatch_losses(per_token_loss, mask, n_microbatches, loss_normalization, normalization_constant):
    """The list of scalars to call backward() on, one per microbatch of ceil(B / n) consecutive rows.

    Their sum is the whole batch's loss: "sequence" (mean per row, then over all B rows) or "constant" (masked
    sum over normalization_constant). Fewer microbatches are fine when rows run out; empty ones are not.
    """
    rows = []
    for losses, flags in zip(per_token_loss.tolist(), mask.tolist()):
        total, n = sum(loss for loss, flag in zip(losses, flags) if flag), sum(flags)
        divisor = normalization_constant if loss_normalization == "constant" else n * len(per_token_loss)
        rows.append(total / divisor)
    return [sum(part) for part in _split(rows, n_microbatches)]


def _parts(loss, mask, k, normalization, constant):
    return [
        (aggregate_loss_across_microbatch(x, m, normalization, constant), len(x), m.sum())
        for x, m in zip(_split(loss, k), _split(mask, k))
    ]


microbatch_losses.mistake("the microbatch means are not scaled down: k times the gradient", "not_scaled")(
    lambda x, m, k, norm, z: [value for value, _, _ in _parts(x, m, k, norm, z)]
)
microbatch_losses.mistake(
    "everything is divided by the number of microbatches, even losses already over the constant",
    "always_over_k",
)(lambda x, m, k, norm, z: [value / len(_split(x, k)) for value, _, _ in _parts(x, m, k, norm, z)])
microbatch_losses.mistake(
    "the means are divided by the number of microbatches, as if all had as many rows", "over_k"
)(
    lambda x, m, k, norm, z: [
        value / (len(_split(x, k)) if norm == "sequence" else 1) for value, _, _ in _parts(x, m, k, norm, z)
    ]
)
microbatch_losses.mistake(
    "the means are divided by n_microbatches: the parts differ in size, or are fewer than that",
    "over_requested_k",
)(
    lambda x, m, k, norm, z: [
        value / (k if norm == "sequence" else 1) for value, _, _ in _parts(x, m, k, norm, z)
    ]
)
microbatch_losses.mistake("each microbatch takes its own mean over tokens", "microbatch_token_mean")(
    lambda x, m, k, norm, z: [
        (a.masked_fill(~b, 0.0).sum() / b.sum()) * (len(a) / len(x))
        if norm == "sequence"
        else a.masked_fill(~b, 0.0).sum() / z
        for a, b in zip(_split(x, k), _split(m, k))
    ]
)
microbatch_losses.mistake("constant-normalised losses are scaled by m / B as well", "constant_scaled")(
    lambda x, m, k, norm, z: [value * n / len(x) for value, n, _ in _parts(x, m, k, norm, z)]
)


class _CountingScorer:
    """score_row(i): a row's loss, at the price of one pass through the model; remembers who was asked for."""

    def __init__(self, losses):
        self.losses, self.asked = losses, []

    def __call__(self, row):
        self.asked.append(int(row))
        return tensor(self.losses[int(row)])


def _pruning_observed(attempt, advantages, losses):
    scorer = _CountingScorer(losses)
    return {"loss": attempt(advantages, scorer), "rows scored": sorted(scorer.asked)}


def _library_pruned(advantages, score_row):
    kept = (advantages != 0).nonzero().flatten().tolist()
    return sum((score_row(i) for i in kept), tensor(0.0)) / len(advantages)


@exercise(
    title="Prune rows without a gradient",
    difficulty=2,
    minutes=10,
    problem="grpo_train_step_variants_on_policy",
    notebook="05",
    reveals=("rlkit.grpo:rows_that_teach", "rlkit.grpo:train_step:if normalize is sequence_mean"),
    door="rlkit.grpo:train_step",
    axes=("entry",),
    observe=_pruning_observed,
    solution=_library_pruned,
    cases=lambda: [
        ("two of four rows", (tensor([1.0, 0, 0, -1]), [2.0, 0.0, 0.0, 4.0])),
        ("nothing to prune", (tensor([1.0, -1.0]), [1.0, 3.0])),
        ("a tiny advantage is not zero", (tensor([1e-9, 0.0, -2.0]), [1.0, 0.0, 2.0])),
        ("every row pruned", (tensor([0.0, 0.0, 0.0]), [0.0, 0.0, 0.0])),
    ],
    hints=(
        "Which rows have no gradient? Those must not be scored, yet they are part of the batch.",
        "Sum the kept rows' losses and divide by len(advantages), not by the number of kept rows.",
    ),
)
def pruned_loss(advantages, score_row):
    """The batch's mean loss over rows, calling score_row(i) (a pass through the model) only where it matters.

    Rows of advantage 0 have loss 0 and must not be scored. The value is that of the unpruned batch.
    """
    losses = (
        score_row if isinstance(score_row, list) else [float(score_row(i)) for i in range(len(advantages))]
    )
    kept = [i for i, a in enumerate(advantages.tolist()) if a != 0]
    return {"loss": sum(losses[i] for i in kept) / len(losses), "rows scored": kept}


def _mean_of(rows, score_row, n):
    return sum((score_row(i) for i in rows), tensor(0.0)) / n


pruned_loss.mistake("the divisor shrinks with the rows: the pruned run has a larger step", "divisor_shrinks")(
    lambda a, score: _mean_of((a != 0).nonzero().flatten(), score, max(int((a != 0).sum()), 1))
)
pruned_loss.mistake("nothing is pruned", "prunes_nothing")(
    lambda a, score: _mean_of(range(len(a)), score, len(a))
)
pruned_loss.mistake("negative advantages are thrown away, too", "keeps_positive")(
    lambda a, score: _mean_of((a > 0).nonzero().flatten(), score, len(a))
)
pruned_loss.mistake(
    "the kept rows are averaged: too large a step, and nan if no row is kept", "mean_of_nothing"
)(
    lambda a, score: (
        torch.stack([score(i) for i in (a != 0).nonzero().flatten()]).mean()
        if (a != 0).any()
        else tensor(math.nan)
    )
)
pruned_loss.mistake("small advantages are taken for zero", "prunes_small")(
    lambda a, score: _mean_of((a.abs() > 1e-6).nonzero().flatten(), score, len(a))
)


@exercise(
    title="One permutation for everything",
    difficulty=1,
    minutes=5,
    problem="grpo_train_step_off_policy",
    notebook="06",
    reveals=("rlkit.batch:RolloutBatch.select", "rlkit.batch:RolloutBatch.apply"),
    door="rlkit.trainer:train",
    axes=("result", "row", "token"),
    solution=lambda rows, advantages, old, new: (advantages[rows], (new[rows] - old[rows]).exp()),
    cases=lambda: [
        (
            "rows 1 and 3 of 4",
            (
                [1, 3],
                tensor([0.0, 1.0, 0.0, -1.0]),
                tensor([[-1.0], [-2.0], [-3.0], [-4.0]]),
                tensor([[-1.0], [-2.0], [-3.0], [-4.5]]),
            ),
        ),
        (
            "shuffled",
            ([2, 0, 3, 1], tensor([1.0, -1.0, 0.5, -0.5]), normal(4, 2, seed=8), normal(4, 2, seed=9)),
        ),
    ],
    hints="Index every tensor with the same list of rows.",
)
def selected_rows(rows, advantages, old_log_probs, new_log_probs):
    """(advantages, ratios) of the listed rows, in their order; ratio = exp(new - old), (len(rows), T)."""
    ratios = [
        [math.exp(x - y) for x, y in zip(new_log_probs[i].tolist(), old_log_probs[i].tolist())] for i in rows
    ]
    return [[advantages[i].item() for i in rows], ratios]


selected_rows.mistake(
    "old log-probs are taken by position in the kept list, not by the original row", "old_by_position"
)(lambda rows, a, old, new: (a[rows], (new[rows] - old[: len(rows)]).exp()))
selected_rows.mistake("the rows are shuffled and the advantages are not", "advantages_by_position")(
    lambda rows, a, old, new: (a[: len(rows)], (new[rows] - old[rows]).exp())
)
selected_rows.mistake("the ratio is upside down", "selected_ratio_inverted")(
    lambda rows, a, old, new: (a[rows], (old[rows] - new[rows]).exp())
)
