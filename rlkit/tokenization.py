"""From text to the three tensors that every later step reads: input ids, labels and the response mask."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def tokenize_prompt_and_output(
    prompt_strs, output_strs, tokenizer, *, output_token_ids=None, prompt_token_ids=None
) -> dict[str, Int[Tensor, "batch time"] | Bool[Tensor, "batch time"]]:
    """Tokenise prompts and outputs apart, join each pair, pad on the right, shift by one.

    Args:
        prompt_strs, output_strs: lists of B strings. They are encoded separately and without special tokens,
            so the boundary between them is a token boundary. Either may hold empty strings.
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
    """The ids that were given, or the strings' without special tokens."""
    if token_ids is not None:
        if strings is not None and len(strings) != len(token_ids):
            raise ValueError(
                f"{what}_token_ids: got {len(token_ids)} rows for {len(strings)} strings, expected one list "
                "of ids per string"
            )
        return [list(ids) for ids in token_ids]
    if isinstance(strings, str) or strings is None:
        raise ValueError(f"{what}_strs: got {type(strings).__name__}, expected a list of strings")
    return tokenizer(list(strings), add_special_tokens=False, verbose=False)["input_ids"] if strings else []
