"""Exercises on the supplement: packing for SFT, DPO's loss, two answer parsers."""

from __future__ import annotations

import math
import re

import torch

from rlkit.study.exercises.core import exercise
from rlkit.supplement import dpo, sft

EOS = 1


class _Letters:
    """A tokenizer whose documents are lists of ids already; only here to call the library's dataset."""

    eos_token_id = EOS

    def __init__(self, documents):
        self.documents = iter(documents)

    def __call__(self, texts, **_):
        return {"input_ids": [list(next(self.documents)) for _ in texts]}


def _library_packing(documents, seq_length):
    data = sft.PackedSFTDataset(_Letters(documents), [("", "")] * len(documents), seq_length)
    return {
        "input_ids": data.input_ids.reshape(-1, seq_length),
        "labels": data.labels.reshape(-1, seq_length),
    }


@exercise(
    title="Pack documents into chunks",
    difficulty=2,
    minutes=15,
    problem="supplement_sft",
    notebook="08",
    reveals="rlkit.supplement.sft:PackedSFTDataset",
    axes=("chunk", "position"),
    solution=_library_packing,
    cases=lambda: [
        ("two documents", ([[5, 6, 7], [8, 9]], 3)),
        ("a last partial chunk", ([[5, 6, 7, 8, 9, 10, 11]], 3)),
        ("a document longer than a chunk", ([[5, 6, 7, 8, 9], [10, 11, 12]], 2)),
        ("one token short of a chunk", ([[5, 6]], 3)),
    ],
    hints=(
        "One stream first: every document's tokens and an end-of-text token after each.",
        "A chunk needs seq_length tokens and one more for its last label: (len(stream) - 1) // seq_length "
        "chunks.",
    ),
)
def pack_documents(documents, seq_length):
    """{"input_ids", "labels"}, lists of chunks of seq_length ids, from documents (lists of ids).

    Documents are joined into one stream, each followed by the end-of-text id 1. Chunk i is
    stream[i L : (i + 1) L], and its labels are the same shifted by one. A last part of a chunk is dropped.
    """
    stream = [token for document in documents for token in (*document, EOS)]
    result, start = {"input_ids": [], "labels": []}, 0
    while start + seq_length + 1 <= len(stream):
        result["input_ids"].append(stream[start : start + seq_length])
        result["labels"].append(stream[start + 1 : start + seq_length + 1])
        start += seq_length
    return result


def _pack(stream, length, stride=None, keep_last=False):
    starts = range(0, len(stream) - (1 if keep_last else length), stride or length)
    return {
        "input_ids": [stream[i : i + length] for i in starts],
        "labels": [stream[i + 1 : i + length + 1] for i in starts],
    }


def _stream(documents, between=True, last=True):
    return [
        token
        for i, document in enumerate(documents)
        for token in (*document, *([EOS] if between and (last or i < len(documents) - 1) else []))
    ]


pack_documents.mistake("no end-of-text token stands between the documents", "pack_no_eos")(
    lambda d, n: _pack(_stream(d, between=False), n)
)
pack_documents.mistake("the end-of-text token is missing after the last document", "pack_no_last_eos")(
    lambda d, n: _pack(_stream(d, last=False), n)
)
pack_documents.mistake("the last partial chunk is kept", "pack_keeps_partial")(
    lambda d, n: _pack(_stream(d), n, keep_last=True)
)
pack_documents.mistake("labels are not shifted", "pack_not_shifted")(
    lambda d, n: {"input_ids": _pack(_stream(d), n)["input_ids"], "labels": _pack(_stream(d), n)["input_ids"]}
)
pack_documents.mistake("chunks overlap: each starts one token after the last", "pack_overlap")(
    lambda d, n: _pack(_stream(d), n, stride=1)
)
pack_documents.mistake(
    "chunks of seq_length + 1 are cut, and a token between two chunks is never predicted from",
    "pack_stride_one_more",
)(lambda d, n: _pack(_stream(d), n, stride=n + 1))
pack_documents.mistake("each document is cut by itself: nothing is packed", "pack_per_document")(
    lambda d, n: {
        key: [chunk for one in d for chunk in _pack([*one, EOS], n)[key]] for key in ("input_ids", "labels")
    }
)


@exercise(
    title="DPO's loss",
    difficulty=2,
    minutes=10,
    problem="supplement_dpo",
    notebook="08",
    reveals="rlkit.supplement.dpo:dpo_loss",
    axes=("pair",),
    solution=dpo.dpo_loss,
    cases=lambda: [
        (
            "two pairs",
            (
                torch.tensor([-5.0, -9.0]),
                torch.tensor([-6.0, -7.0]),
                torch.tensor([-5.5, -8.0]),
                torch.tensor([-5.5, -8.0]),
                0.5,
            ),
        ),
        (
            "policy = reference",
            (torch.tensor([-5.0]), torch.tensor([-9.0]), torch.tensor([-5.0]), torch.tensor([-9.0]), 0.1),
        ),
        (
            "a pair ranked badly wrong",
            (torch.tensor([-500.0]), torch.tensor([-5.0]), torch.tensor([-5.0]), torch.tensor([-5.0]), 1.0),
        ),
    ],
    hints=(
        "Each answer's implicit reward is beta (log pi - log pi_ref). By how much does the chosen one win?",
        "-logsigmoid(beta x margin); torch.nn.functional.logsigmoid does not underflow.",
    ),
)
def dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta):
    """-log sigmoid(beta [(log pi(yw) - log ref(yw)) - (log pi(yl) - log ref(yl))]), (N,) from (N,)."""
    losses = []
    for a, b, c, d in zip(*(t.tolist() for t in (policy_chosen, policy_rejected, ref_chosen, ref_rejected))):
        x = -beta * ((a - c) - (b - d))
        losses.append(x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)))
    return losses


def _logsigmoid(x):
    return torch.nn.functional.logsigmoid(x)


dpo_loss.mistake("the reference model is left out", "dpo_no_reference")(
    lambda a, b, c, d, beta: -_logsigmoid(beta * (a - b))
)
dpo_loss.mistake("chosen and rejected are swapped", "dpo_swapped")(
    lambda a, b, c, d, beta: -_logsigmoid(beta * ((b - d) - (a - c)))
)
dpo_loss.mistake("beta stands outside the sigmoid", "dpo_beta_outside")(
    lambda a, b, c, d, beta: -beta * _logsigmoid((a - c) - (b - d))
)
dpo_loss.mistake("log(sigmoid(x)) underflows to -inf; logsigmoid does not", "dpo_underflow")(
    lambda a, b, c, d, beta: -torch.sigmoid(beta * ((a - c) - (b - d))).log()
)
dpo_loss.mistake("the logarithm is missing", "dpo_no_log")(
    lambda a, b, c, d, beta: -torch.sigmoid(beta * ((a - c) - (b - d)))
)
dpo_loss.mistake("the rejected answer's reference enters with the wrong sign", "dpo_reference_sign")(
    lambda a, b, c, d, beta: -_logsigmoid(beta * ((a - c) - (b + d)))
)


@exercise(
    title="Parse a multiple-choice answer",
    difficulty=2,
    minutes=10,
    problem="supplement_sft",
    notebook="08",
    reveals="rlkit.supplement.sft:parse_mmlu_response",
    axes=(),
    may_return_none=True,
    solution=sft.parse_mmlu_response,
    cases=lambda: [
        ("a sentence", ("The correct answer is B.",)),
        ("in brackets", ("The answer is (C), of course.",)),
        ("a letter alone", ("D",)),
        ("nothing", ("I do not know.",)),
        ("an article", ("A dog has four legs, but I cannot tell.",)),
        ("two claims, the last counts", ("The answer is A. No: the answer is D.",)),
    ],
    hints="Look for 'answer is X' first, last match; then for a response that is nothing but a letter.",
)
def parse_mmlu(response: str) -> str | None:
    """The chosen letter A-D, or None: from the last 'answer is X' or '(X)', or from a letter alone."""
    words = (
        response.replace("(", " ")
        .replace(")", " ")
        .replace(".", " ")
        .replace(",", " ")
        .replace(":", " ")
        .split()
    )
    claims = [
        words[i + 2]
        for i in range(len(words) - 2)
        if words[i] == "answer" and words[i + 1] == "is" and words[i + 2] in ("A", "B", "C", "D")
    ]
    if claims:
        return claims[-1]
    return words[0] if len(words) == 1 and words[0] in ("A", "B", "C", "D") else None


parse_mmlu.mistake("any capital A-D counts: 'A dog' is read as an answer", "mmlu_any_letter")(
    lambda text: (re.findall(r"\b[A-D]\b", text) or [None])[-1]
)
parse_mmlu.mistake("the first claim is taken, not the last", "mmlu_first_claim")(
    lambda text: (re.findall(r"answer is \(?([A-D])\b", text) or [text if text in "ABCD" else None])[0]
)
parse_mmlu.mistake("a letter in brackets is not recognised", "mmlu_no_brackets")(
    lambda text: (re.findall(r"answer is ([A-D])\b", text) or [text if text in "ABCD" else None])[-1]
)
parse_mmlu.mistake("a letter alone is not recognised", "mmlu_sentence_only")(
    lambda text: (re.findall(r"answer is \(?([A-D])\b", text) or [None])[-1]
)
parse_mmlu.mistake("'nothing parses' is the empty string, not None", "mmlu_empty_string")(
    lambda text: (re.findall(r"answer is \(?([A-D])\b", text) or [text if text in "ABCD" else ""])[-1]
)


@exercise(
    title="Parse a GSM8K answer by its last number",
    difficulty=2,
    minutes=10,
    problem="supplement_sft",
    notebook="08",
    reveals="rlkit.supplement.sft:parse_gsm8k_response",
    axes=(),
    may_return_none=True,
    solution=sft.parse_gsm8k_response,
    cases=lambda: [
        ("a sentence", ("She sold 48 + 24 = 72 clips.",)),
        ("thousands", ("So he pays 1,200 in all.",)),
        ("a sign", ("It is -3 degrees.",)),
        ("a decimal", ("That makes $3.50 each.",)),
        ("none", ("No idea.",)),
        ("a full stop", ("The answer is 72.",)),
    ],
    hints="An optional sign, digits with commas, an optional point followed by digits. Take the last match.",
)
def parse_gsm8k(response: str) -> str | None:
    """The response's last number as text, without commas (and without a final full stop), or None."""
    numbers, current = [], ""
    for i, c in enumerate(response + " "):
        following = response[i + 1 : i + 2]
        if (
            c.isdigit()
            or (c in ".," and current and following.isdigit())
            or (c == "-" and not current and following.isdigit())
        ):
            current += c
        else:
            numbers += [current.replace(",", "")] if current else []
            current = ""
    return numbers[-1] if numbers else None


def _numbers(pattern, text, which=-1):
    found = re.findall(pattern, text)
    return found[which].replace(",", "") if found else None


parse_gsm8k.mistake("the first number is taken, not the last", "gsm8k_first")(
    lambda text: _numbers(r"-?\d[\d,]*(?:\.\d+)?", text, 0)
)
parse_gsm8k.mistake("a thousands comma splits the number", "gsm8k_comma")(
    lambda text: _numbers(r"-?\d+(?:\.\d+)?", text)
)
parse_gsm8k.mistake("the sign is lost", "gsm8k_sign")(lambda text: _numbers(r"\d[\d,]*(?:\.\d+)?", text))
parse_gsm8k.mistake("the full stop of the sentence is taken along", "gsm8k_full_stop")(
    lambda text: _numbers(r"-?\d[\d,.]*", text)
)
parse_gsm8k.mistake("decimals are cut off", "gsm8k_integer")(lambda text: _numbers(r"-?\d[\d,]*", text))
parse_gsm8k.mistake("without a number it raises instead of giving None", "gsm8k_raises")(
    lambda text: re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)[-1].replace(",", "")
)
