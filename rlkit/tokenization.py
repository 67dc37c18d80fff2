"""From text to the three tensors that every later step reads: input ids, labels and the response mask."""

import re
from collections.abc import Collection

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def tokenize_prompt_and_output(
    prompt_strs, output_strs, tokenizer, *, output_token_ids=None, prompt_token_ids=None
) -> dict[str, Int[Tensor, "batch time"] | Bool[Tensor, "batch time"]]:
    """Tokenise prompts and outputs apart, join each pair, pad on the right, shift by one.

    Args:
        prompt_strs, output_strs: lists of B strings. They are encoded separately and without special tokens
            (but for the one that the tokenizer itself opens a text with, if any: see ``encode_prompts``), so
            the boundary between them is a token boundary. Either may hold empty strings.
        tokenizer: a Hugging Face tokenizer. The filler is its pad id, else its eos id, else 0; with a causal
            model and right padding the filler stands after every scored position and changes nothing.
        output_token_ids, prompt_token_ids: lists of B lists of ids (a sampler's own). What is given is used
            as it is and the strings beside it are not read, so nothing is re-tokenised; they may then be
            None.

    Returns:
        dict of three (B, longest - 1) tensors, ``longest`` counting prompt and output together: input_ids
        (int64) every token but the last, labels (int64) every token but the first, and response_mask (bool)
        True where the label is an output token. With an empty prompt the first output token has nothing
        before it, so it is not a label and cannot be scored.

    Raises ValueError for an empty batch, or lists whose lengths differ.
    Source: the handout's section 4.2.1.
    """
    prompts = encode(prompt_strs, prompt_token_ids, tokenizer, "prompt")
    outputs = encode(output_strs, output_token_ids, tokenizer, "output")
    if len(prompts) != len(outputs) or not prompts:
        raise ValueError(
            f"prompt_strs, output_strs: got {len(prompts)} prompts and {len(outputs)} outputs, expected the "
            "same number, at least one"
        )
    return join_and_shift(prompts, outputs, filler_id(tokenizer))


def join_and_shift(prompts: list[list[int]], outputs: list[list[int]], filler: int) -> dict[str, Tensor]:
    """The tensors of ``tokenize_prompt_and_output`` from ids."""
    longest = max(1, *(len(p) + len(o) for p, o in zip(prompts, outputs)))
    tokens = torch.full((len(prompts), longest), filler)
    is_output = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs)):
        end = len(prompt) + len(output)
        tokens[row, :end] = torch.tensor([*prompt, *output])
        is_output[row, len(prompt) : end] = True
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "response_mask": is_output[:, 1:]}


def filler_id(tokenizer) -> int:
    """A valid id to pad with: the pad id, else the end-of-text id, else 0."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token_id for token_id in ids if token_id is not None)


def encode(strings, token_ids, tokenizer, what: str) -> list[list[int]]:
    """The ids that were given, or those of the strings, prompts by ``encode_prompts``."""
    if token_ids is not None:
        if strings is not None and len(strings) != len(token_ids):
            raise ValueError(
                f"{what}_token_ids: got {len(token_ids)} rows for {len(strings)} strings, expected one list "
                "of ids per string"
            )
        return [list(ids) for ids in token_ids]
    if isinstance(strings, str) or strings is None:
        raise ValueError(f"{what}_strs: got {type(strings).__name__}, expected a list of strings")
    return encode_prompts(strings, tokenizer) if what == "prompt" else encode_texts(strings, tokenizer)


def encode_texts(texts, tokenizer, **options) -> list[list[int]]:
    """The texts' ids, without special tokens."""
    return (
        tokenizer(list(texts), add_special_tokens=False, verbose=False, **options)["input_ids"]
        if texts
        else []
    )


def opening_ids(tokenizer) -> list[int]:
    """[the beginning-of-text id] if the tokenizer itself puts one before a text (Llama 3, Gemma), else []."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def encode_prompts(texts, tokenizer) -> list[list[int]]:
    """The ids that a model is conditioned on: the opening id once, if the tokenizer has one, then the text.

    In a text that ``Prompt.fill`` made, the template's control tokens ("<|im_start|>") are control tokens,
    and what looks like one in the question is ordinary text.
    """
    opening, encoded = opening_ids(tokenizer), encode_texts(texts, tokenizer)
    known = getattr(tokenizer, "added_tokens_decoder", {})
    control = {token.content: i for i, token in known.items() if token.special}
    for i, text in enumerate(texts):
        if any(token in getattr(text, "question", "") for token in control):
            encoded[i] = encode_around(text.parts, text.question, control, tokenizer)
    return [ids if ids[: len(opening)] == opening else opening + ids for ids in encoded]


def encode_around(parts: list[str], question: str, control: dict[str, int], tokenizer) -> list[int]:
    """The ids of ``question.join(parts)`` with the ``control`` tokens of ``parts`` only."""
    at_control = re.compile("(" + "|".join(map(re.escape, sorted(control, key=len, reverse=True))) + ")")
    ids, text = [], ""
    for i, part in enumerate(parts):
        text += question if i else ""
        plain, *rest = at_control.split(part)  # text, token, text, token, text, ...
        text += plain
        for token, plain in zip(rest[::2], rest[1::2]):
            ids += [*encode_texts([text], tokenizer, split_special_tokens=True)[0], control[token]]
            text = plain
    return ids + encode_texts([text], tokenizer, split_special_tokens=True)[0]


# ---- and back


def hidden_ids(tokenizer, ends=(), stop=()) -> set[int]:
    """Ids that are no part of a response's text: those that end it (``ends``), pad, begin and end of text.

    Every other special token is kept as text, and so is one that holds a ``stop`` string.
    """
    named = (getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "bos", "eos"))
    ids = {i for i in (*ends, *named) if i is not None}
    return {i for i in ids if not any(s in decode(tokenizer, [i]) for s in stop)} if stop else ids


def decode(tokenizer, ids: list[int], hidden: Collection[int] = ()) -> str:
    """The text of a response, special tokens included but for the ``hidden`` ones."""
    ids = [i for i in ids if i not in hidden]
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def cut_at_stop(tokenizer, ids: list[int], stop, hidden) -> tuple[str, int | None]:
    """(text of ``ids`` through the stop string that ends first, number of ids through the one that completed
    it).

    (whole text, None) where no stop string occurs.
    """
    text = decode(tokenizer, ids, hidden)
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        return text, None
    low, high = 1, len(ids)  # fewest ids whose text has a stop string
    while low < high:
        middle = (low + high) // 2
        met = any(s in decode(tokenizer, ids[:middle], hidden) for s in stop)
        low, high = (low, middle) if met else (middle + 1, high)
    return text[: min(ends)], low
