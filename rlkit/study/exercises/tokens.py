"""The exercise on tokenising, with a toy tokenizer."""

from __future__ import annotations

import torch

from rlkit.study.exercises.core import exercise
from rlkit.tokenization import tokenize_prompt_and_output as library_tokenize


class ToyTokenizer:
    """Ten words and two special tokens, with the habits of real tokenizers that trip people up.

    It puts <bos> in front unless ``add_special_tokens=False``, and it merges "a test" into one token, so that
    tokenising a prompt and an output together is not the same as joining their tokens.
    """

    words = ("<pad>", "<eos>", "<bos>", "Hello", "world", "This", "is", "a", "test", "another", "a test")

    def __init__(self, pad_token_id=0):
        self.pad_token_id, self.eos_token_id = pad_token_id, 1

    def encode(self, text, add_special_tokens=True, **_):
        pieces, ids = text.split(), [2] if add_special_tokens else []
        while pieces:
            take = 2 if " ".join(pieces[:2]) in self.words[10:] else 1
            ids.append(self.words.index(" ".join(pieces[:take])))
            pieces = pieces[take:]
        return ids

    def __call__(self, text, add_special_tokens=True, **_):
        if isinstance(text, str):
            return {"input_ids": self.encode(text, add_special_tokens)}
        return {"input_ids": [self.encode(one, add_special_tokens) for one in text]}


def _tokenize_cases():
    prompts, outputs = ["This is a", "Hello"], [" another world", " world test another <eos>"]
    return [
        ("two rows of different lengths", (prompts, outputs, ToyTokenizer())),
        ("no pad token", (prompts, outputs, ToyTokenizer(pad_token_id=None))),
        ("pad is end-of-text", (["Hello", "This is"], [" world <eos>", " a"], ToyTokenizer(pad_token_id=1))),
        ("an empty output", (["This is", "Hello"], ["", " world"], ToyTokenizer())),
        ("an empty prompt", (["", "Hello This is"], [" world test", " a"], ToyTokenizer())),
        (
            "words that merge across the boundary",
            (["This is a", "Hello"], [" test world", " a test"], ToyTokenizer()),
        ),
    ]


def _tokenize_observed(attempt, prompts, outputs, tokenizer):
    """The three tensors, filler ids (any valid id will do) shown as -1."""
    result = {
        name: attempt_value.tolist() for name, attempt_value in attempt(prompts, outputs, tokenizer).items()
    }
    for row, (prompt, output) in enumerate(zip(prompts, outputs)):
        n_tokens = len(tokenizer.encode(prompt, False)) + len(tokenizer.encode(output, False))
        for name, end in (("input_ids", n_tokens), ("labels", n_tokens - 1)):
            if name in result and row < len(result[name]):
                ids = result[name][row]
                ids[end:] = [-1 if i in range(len(tokenizer.words)) else i for i in ids[end:]]
    return result


@exercise(
    title="Tokenise prompts and outputs",
    difficulty=2,
    minutes=15,
    problem="tokenize_prompt_and_output",
    notebook="03",
    reveals="rlkit.tokenization:join_and_shift",
    door="rlkit.tokenization:tokenize_prompt_and_output",
    axes=("row", "position"),
    solution=lambda prompts, outputs, tokenizer: library_tokenize(prompts, outputs, tokenizer),
    cases=_tokenize_cases,
    observe=_tokenize_observed,
    hints=(
        "Build whole rows first: ids = prompt + output, and beside them flags: False for the prompt, True "
        "for the output. Pad both. Shift last.",
        "input_ids = ids[:, :-1], labels = ids[:, 1:], and the mask belongs to the labels: flags[:, 1:].",
    ),
)
def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):
    """{"input_ids", "labels", "response_mask"}, tensors (batch, longest - 1), from two lists of strings.

    Prompt and output are tokenised apart, without special tokens, and joined; padding goes to the right (any
    valid id; the tokenizer may have no pad token). response_mask (bool) is True where the *label* is an
    output token.
    """
    rows = [
        (tokenizer.encode(p, False), tokenizer.encode(o, False)) for p, o in zip(prompt_strs, output_strs)
    ]
    longest = max(len(p) + len(o) for p, o in rows)
    result = {"input_ids": [], "labels": [], "response_mask": []}
    for prompt, output in rows:
        ids = prompt + output + [-1] * (longest - len(prompt) - len(output))
        result["input_ids"].append(ids[:-1])
        result["labels"].append(ids[1:])
        result["response_mask"].append(
            [len(prompt) <= t + 1 < len(prompt) + len(output) for t in range(longest - 1)]
        )
    return result


def _tokenized(prompts, outputs, tokenizer, mask, special=False, joined=False, left=False, pad=None):
    """A tokenisation with one mistake; mask(n_prompt, n_row, labels, pad) is a row's (T,) bool mask."""
    if pad is None:
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    pairs = [(tokenizer.encode(p, special), tokenizer.encode(o, special)) for p, o in zip(prompts, outputs)]
    if joined:
        whole = [tokenizer.encode(p + o, special) for p, o in zip(prompts, outputs)]
        pairs = [(ids[: len(p)], ids[len(p) :]) for (p, _), ids in zip(pairs, whole)]
    longest = max(len(p) + len(o) for p, o in pairs)
    ids, masks = [], []
    for prompt, output in pairs:
        filler = [pad] * (longest - len(prompt) - len(output))
        ids.append(torch.tensor(filler + prompt + output if left else prompt + output + filler))
        masks.append(mask(len(prompt), len(prompt) + len(output), ids[-1][1:], pad))
    ids, masks = torch.stack(ids), torch.stack(masks)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "response_mask": masks}


def _right_mask(n_prompt, n_row, labels, pad):
    t = torch.arange(1, len(labels) + 1)
    return (t >= n_prompt) & (t < n_row)


@tokenize_prompt_and_output.mistake("the mask is built before the shift, so it marks inputs and not labels")
def mask_before_shift(prompts, outputs, tokenizer):
    def mask(n_prompt, n_row, labels, pad):
        t = torch.arange(len(labels))
        return (t >= n_prompt) & (t < n_row)

    return _tokenized(prompts, outputs, tokenizer, mask)


@tokenize_prompt_and_output.mistake("the mask is `labels != pad`: the prompt's tokens are trained on, too")
def mask_is_label_not_pad(prompts, outputs, tokenizer):
    return _tokenized(prompts, outputs, tokenizer, lambda n_prompt, n_row, labels, pad: labels != pad)


@tokenize_prompt_and_output.mistake(
    "the mask is `labels != pad` with end-of-text as pad: the prompt is trained on, and the response's own "
    "end is not"
)
def mask_is_label_not_eos(prompts, outputs, tokenizer):
    return _tokenized(
        prompts,
        outputs,
        tokenizer,
        lambda n_prompt, n_row, labels, pad: labels != pad,
        pad=tokenizer.eos_token_id,
    )


@tokenize_prompt_and_output.mistake("the mask is `labels != 0`: the prompt's tokens are trained on, too")
def mask_is_label_not_0(prompts, outputs, tokenizer):
    return _tokenized(prompts, outputs, tokenizer, lambda n_prompt, n_row, labels, pad: labels != pad, pad=0)


@tokenize_prompt_and_output.mistake(
    "padding is told by its id: if pad is end-of-text, the response loses its own end"
)
def mask_drops_pad_id(prompts, outputs, tokenizer):
    return _tokenized(
        prompts,
        outputs,
        tokenizer,
        lambda n_prompt, n_row, labels, pad: _right_mask(n_prompt, 99, labels, pad) & (labels != pad),
    )


@tokenize_prompt_and_output.mistake(
    "padding is told by the end-of-text id, and every response loses its own end"
)
def mask_drops_eos_id(prompts, outputs, tokenizer):
    return _tokenized(
        prompts,
        outputs,
        tokenizer,
        pad=tokenizer.eos_token_id,
        mask=lambda n_prompt, _, labels, pad: _right_mask(n_prompt, 99, labels, pad) & (labels != pad),
    )


@tokenize_prompt_and_output.mistake(
    "labels are padded with -100, which is not a token id; the mask says which labels count"
)
def labels_of_minus_100(prompts, outputs, tokenizer):
    result = _tokenized(prompts, outputs, tokenizer, _right_mask)
    for row, (prompt, output) in enumerate(zip(prompts, outputs)):
        result["labels"][
            row, len(tokenizer.encode(prompt, False)) + len(tokenizer.encode(output, False)) - 1 :
        ] = -100
    return result


@tokenize_prompt_and_output.mistake("the mask starts one label early and takes the prompt's last token")
def mask_one_early(prompts, outputs, tokenizer):
    return _tokenized(prompts, outputs, tokenizer, lambda n_prompt, *rest: _right_mask(n_prompt - 1, *rest))


@tokenize_prompt_and_output.mistake("the mask runs on through the padding")
def mask_covers_padding(prompts, outputs, tokenizer):
    return _tokenized(
        prompts, outputs, tokenizer, lambda n_prompt, n_row, *rest: _right_mask(n_prompt, 99, *rest)
    )


@tokenize_prompt_and_output.mistake(
    "an empty prompt gives the index len(prompt) - 1 = -1, which counts from the right"
)
def mask_index_wraps(prompts, outputs, tokenizer):
    def mask(n_prompt, n_row, labels, pad):
        flags = torch.zeros(len(labels), dtype=torch.bool)
        flags[n_prompt - 1 : n_row - 1] = True
        return flags

    return _tokenized(prompts, outputs, tokenizer, mask)


@tokenize_prompt_and_output.mistake(
    "special tokens are left on: a <bos> in front of the prompt and another one inside"
)
def special_tokens_on(prompts, outputs, tokenizer):
    return _tokenized(prompts, outputs, tokenizer, _right_mask, special=True)


@tokenize_prompt_and_output.mistake(
    "prompt and output are tokenised as one text, and words merge across the boundary"
)
def tokenised_together(prompts, outputs, tokenizer):
    return _tokenized(prompts, outputs, tokenizer, _right_mask, joined=True)


@tokenize_prompt_and_output.mistake(
    "prompt and output are tokenised as one text, which also gets a <bos> in front"
)
def tokenised_together_with_bos(prompts, outputs, tokenizer):
    return _tokenized(prompts, outputs, tokenizer, _right_mask, special=True, joined=True)


@tokenize_prompt_and_output.mistake("padding is on the left")
def padded_left(prompts, outputs, tokenizer):
    def mask(n_prompt, n_row, labels, pad):
        t = torch.arange(1, len(labels) + 1)
        return t >= len(labels) + 1 - (n_row - n_prompt)

    return _tokenized(prompts, outputs, tokenizer, mask, left=True)


@tokenize_prompt_and_output.mistake("the pad id is None and nothing stands in for it")
def pad_is_none(prompts, outputs, tokenizer):
    torch.full((1,), tokenizer.pad_token_id)
    return _tokenized(prompts, outputs, tokenizer, _right_mask)


@tokenize_prompt_and_output.mistake("the mask holds integers: indexing with it would pick rows 0 and 1")
def mask_of_integers(prompts, outputs, tokenizer):
    result = _tokenized(prompts, outputs, tokenizer, _right_mask)
    return result | {"response_mask": result["response_mask"].long()}
