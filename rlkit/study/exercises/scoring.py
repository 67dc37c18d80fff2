"""Exercises on log-probabilities and entropy, with a toy model."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from rlkit.log_probs import get_response_log_probs
from rlkit.study.exercises.core import exercise, normal, tensor


class ToyModel(torch.nn.Module):
    """A language model that only looks at the last token: logits (B, T, V) are rows of a table."""

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table)

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.table[input_ids])


def _log_prob_cases():
    ids = torch.tensor([[0, 2, 1], [3, 3, 0]])
    labels = torch.tensor([[2, 1, 3], [3, 0, 2]])
    table = normal(4, 5, seed=1).float()
    return [
        ("random logits", (ToyModel(table), ids, labels)),
        ("huge logits", (ToyModel(table * 300), ids, labels)),
        ("logits shifted by 1000", (ToyModel(table + 1000), ids, labels)),
        ("a bfloat16 model", (ToyModel(table.bfloat16()), ids, labels)),
    ]


@exercise(
    title="Log-probabilities of the labels",
    difficulty=2,
    minutes=10,
    problem="get_response_log_probs",
    notebook="03",
    reveals=(
        "rlkit.log_probs:log_distribution",
        "rlkit.log_probs:label_log_probs",
        "rlkit.log_probs:score_chunk",
    ),
    door="rlkit.log_probs:get_response_log_probs",
    axes=("row", "position"),
    solution=lambda model, ids, labels: get_response_log_probs(model, ids, labels)["log_probs"],
    cases=_log_prob_cases,
    observe=lambda attempt, *arguments: _values_and_dtype(attempt(*arguments)),
    hints=(
        "model(input_ids).logits is (batch, position, vocabulary); labels are already shifted.",
        "log_softmax over the last dimension in float32, then gather with labels[..., None].",
    ),
)
def response_log_probs(model, input_ids, labels):
    """log pi(label_t | tokens before it), (batch, position), float32 for every dtype of the model."""
    rows = []
    for ids, wanted in zip(input_ids, labels.tolist()):
        logits = model(ids[None]).logits[0].double().tolist()
        rows.append(
            [
                x[label] - max(x) - math.log(sum(math.exp(v - max(x)) for v in x))
                for x, label in zip(logits, wanted)
            ]
        )
    return {"values": rows, "dtype": "float32"}


def _values_and_dtype(result):
    result = result["log_probs"] if isinstance(result, dict) else result
    return {"values": result, "dtype": str(result.dtype).removeprefix("torch.")}


def _gathered(scores, labels):
    return scores.gather(-1, labels[..., None]).squeeze(-1)


response_log_probs.mistake("the input token is looked up, not the label", "gathers_inputs")(
    lambda model, ids, labels: _gathered(model(ids).logits.float().log_softmax(-1), ids)
)
response_log_probs.mistake("labels are shifted a second time", "shifted_twice")(
    lambda model, ids, labels: _gathered(model(ids).logits.float().log_softmax(-1)[:, :-1], labels[:, 1:])
)
response_log_probs.mistake("logits are returned without the log-softmax", "raw_logits")(
    lambda model, ids, labels: _gathered(model(ids).logits.float(), labels)
)
response_log_probs.mistake("these are probabilities, the logarithm is missing", "probabilities")(
    lambda model, ids, labels: _gathered(model(ids).logits.float().softmax(-1), labels)
)
response_log_probs.mistake("log(softmax) underflows to -inf; log_softmax does not", "log_of_softmax")(
    lambda model, ids, labels: _gathered(model(ids).logits.float().softmax(-1).log(), labels)
)
response_log_probs.mistake("exp overflows: take the largest logit off first", "naive_logsumexp")(
    lambda model, ids, labels: (
        _gathered(model(ids).logits.float(), labels) - model(ids).logits.float().exp().sum(-1).log()
    )
)
response_log_probs.mistake("the softmax is taken in the model's own bfloat16", "stays_bfloat16")(
    lambda model, ids, labels: _gathered(model(ids).logits.log_softmax(-1), labels)
)
response_log_probs.mistake(
    "the softmax runs over positions, not over the vocabulary", "softmax_over_positions"
)(lambda model, ids, labels: _gathered(model(ids).logits.float().log_softmax(1), labels))


@exercise(
    title="Log-probability at the sampler's temperature",
    difficulty=1,
    minutes=5,
    problem="get_response_log_probs",
    notebook="03",
    reveals=("rlkit.log_probs:log_distribution", "rlkit.log_probs:label_log_probs"),
    door="rlkit.log_probs:get_response_log_probs",
    axes=("token",),
    solution=lambda logits, token, temperature: get_response_log_probs(
        ToyModel(logits[None]),
        torch.zeros(1, 1, dtype=torch.long),
        torch.tensor([[token]]),
        temperature=temperature,
    )["log_probs"].item(),
    cases=lambda: [
        ("temperature 1", (tensor([2.0, 0.0]), 0, 1.0)),
        ("temperature 1/2", (tensor([2.0, 0.0]), 0, 0.5)),
        ("temperature 2", (tensor([1.0, -1.0, 0.5]), 2, 2.0)),
    ],
    hints="Temperature divides the logits, before anything is normalised.",
)
def log_prob_at_temperature(logits, token: int, temperature: float):
    """The log-probability of ``token`` when logits (V,) are sampled at this temperature; a number."""
    scaled = [x / temperature for x in logits.tolist()]
    return scaled[token] - math.log(sum(math.exp(x) for x in scaled))


log_prob_at_temperature.mistake(
    "the raw logits are scored, and the on-policy ratio is not 1", "raw_temperature"
)(lambda logits, token, temperature: logits.log_softmax(0)[token])
log_prob_at_temperature.mistake(
    "the log-probability is divided by T, which does not sum to one any more", "divides_log_probs"
)(lambda logits, token, temperature: logits.log_softmax(0)[token] / temperature)
log_prob_at_temperature.mistake("logits are multiplied by T", "multiplies_by_temperature")(
    lambda logits, token, temperature: (logits * temperature).log_softmax(0)[token]
)


@exercise(
    title="Entropy of next-token distributions",
    difficulty=2,
    minutes=10,
    problem="get_response_log_probs",
    notebook="03",
    reveals=("rlkit.log_probs:token_entropy", "rlkit.log_probs:log_distribution"),
    door="rlkit.log_probs:get_response_log_probs",
    axes=("position",),
    solution=lambda logits: get_response_log_probs(
        ToyModel(logits), torch.arange(len(logits))[None], torch.zeros(1, len(logits), dtype=torch.long), True
    )["token_entropy"][0],
    cases=lambda: [
        ("random logits", (normal(3, 6, seed=2),)),
        ("uniform", (torch.zeros(2, 4, dtype=torch.float64),)),
        ("a filtered vocabulary", (tensor([[0.0, 0.0, -math.inf], [1.0, -math.inf, -math.inf]]),)),
        ("huge logits", (tensor([[1000.0, 0.0, 0.0], [1000.0, 1000.0, 0.0]]),)),
    ],
    hints=(
        "H = -sum p log p = logsumexp(x) - sum p x.",
        "Logits of -inf have p = 0 and p log p = 0, but 0 * -inf is nan: select before you multiply.",
    ),
)
def token_entropy(logits):
    """Entropy in nats of softmax(logits), for every row of logits (positions, V) -> (positions,)."""
    result = []
    for x in logits.tolist():
        top = max(x)
        total = sum(math.exp(v - top) for v in x)
        chances = [math.exp(v - top) / total for v in x]
        result.append(-sum(c * math.log(c) for c in chances if c > 0))
    return result


token_entropy.mistake("0 x -inf is nan for tokens that cannot be drawn", "entropy_nan")(
    lambda x: -(x.log_softmax(-1).exp() * x.log_softmax(-1)).sum(-1)
)
token_entropy.mistake("exp overflows: take the largest logit off first", "entropy_overflow")(
    lambda x: x.exp().sum(-1).log() - (x.softmax(-1) * x.nan_to_num(neginf=0.0)).sum(-1)
)
token_entropy.mistake("the logarithm has base 2: these are bits", "entropy_bits")(
    lambda x: -torch.xlogy(x.softmax(-1), x.softmax(-1)).sum(-1) / math.log(2)
)
token_entropy.mistake("the sign is missing", "entropy_negative")(
    lambda x: torch.xlogy(x.softmax(-1), x.softmax(-1)).sum(-1)
)
token_entropy.mistake("it is a mean over the vocabulary, not a sum", "entropy_mean")(
    lambda x: -torch.xlogy(x.softmax(-1), x.softmax(-1)).mean(-1)
)


def _entropy_metric_cases():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    return [
        ("rows of different lengths", (tensor([[0.5, 1.0, 2.0], [3.0, 9.0, 9.0]]), mask)),
        (
            "an empty response",
            (
                tensor([[0.5, 1.0], [4.0, 4.0], [2.0, 5.0]]),
                torch.tensor([[1, 1], [0, 0], [1, 0]], dtype=torch.bool),
            ),
        ),
        (
            "nan in the padding",
            (tensor([[0.5, math.nan], [1.5, 2.5]]), torch.tensor([[1, 0], [1, 1]]).bool()),
        ),
    ]


@exercise(
    title="The token entropy you log",
    difficulty=1,
    minutes=5,
    problem="grpo_train_step_standard_on_policy",
    notebook="03",
    reveals="rlkit.support.metrics:batch_statistics",
    door="rlkit.grpo:train_step",
    axes=(),
    cases=_entropy_metric_cases,
    solution=lambda entropy, mask: entropy.masked_fill(~mask, 0.0).sum() / mask.sum(),
    hints="Every response token of the batch has one vote: one sum, one count.",
)
def mean_token_entropy(token_entropy, response_mask):
    """The mean entropy per response token of the batch, from (B, T) entropies and a bool mask."""
    total, count = 0.0, 0
    for entropies, flags in zip(token_entropy.tolist(), response_mask.tolist()):
        for entropy, flag in zip(entropies, flags):
            if flag:
                total, count = total + entropy, count + 1
    return total / count


mean_token_entropy.mistake("prompt and padding are counted", "entropy_all_positions")(lambda e, m: e.mean())
mean_token_entropy.mistake("each row has one vote, however long (a mean of means)", "entropy_mean_of_means")(
    lambda e, m: torch.stack([row[flags].mean() for row, flags in zip(e, m) if flags.any()]).mean()
)
mean_token_entropy.mistake("masked positions count as zeros", "entropy_zeros_counted")(
    lambda e, m: e.masked_fill(~m, 0.0).mean()
)
mean_token_entropy.mistake("nan times a mask of 0 is nan: select, do not multiply", "entropy_nan_times_mask")(
    lambda e, m: (e * m).sum() / m.sum()
)
