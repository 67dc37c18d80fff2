"""Supplement: instruction tuning. Packed documents, the training loop, and parsers for two benchmarks."""

import math
import re

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from rlkit.support.files import read_jsonl
from rlkit.support.progress import progress
from rlkit.tokenization import encode_prompts

# The Alpaca template (Taori et al., 2023, Stanford Alpaca).
ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str) -> str:
    """The Alpaca template up to where the response starts; braces in the instruction stay as they are."""
    return ALPACA_PROMPT.replace("{instruction}", instruction)


def load_instructions(path) -> list[tuple[str, str]]:
    """(prompt, response) pairs from a jsonl or jsonl.gz file with the keys "prompt" and "response"."""
    pairs = []
    for number, row in enumerate(read_jsonl(path), 1):
        if "prompt" not in row or "response" not in row:
            expected = "expected 'prompt' and 'response'"
            raise ValueError(f"path: line {number} of {path} has keys {sorted(row)}, {expected}")
        pairs.append((row["prompt"], row["response"]))
    return pairs


class PackedSFTDataset(Dataset):
    """Documents joined into one stream of tokens and cut into chunks of equal length.

    Every document is the Alpaca prompt, the response and the end-of-text token (with the beginning-of-text
    token in front, where the tokenizer itself puts one there). Chunk i holds stream tokens
    i*L ... i*L + L - 1 as "input_ids" and the same shifted by one as "labels", both (L,) int64. What is left
    over at the end (less than L tokens with a next token each) is dropped. No position is padding, and a
    chunk may start in the middle of a document: that is the price of packing.

    Args:
        tokenizer: a Hugging Face tokenizer with an end-of-text token.
        documents: (instruction, response) pairs.
        seq_length: L >= 1, tokens per chunk.
        shuffle: shuffle the documents (not the chunks) before joining, with ``seed``.

    Source: the handout's supplement.
    """

    def __init__(self, tokenizer, documents, seq_length: int, shuffle: bool = False, seed: int = 0):
        if tokenizer.eos_token_id is None:
            raise ValueError("tokenizer: it has no eos_token, expected one to end each document with")
        if seq_length < 1:
            raise ValueError(f"seq_length: got {seq_length}, expected at least 1")
        documents = list(documents)
        if shuffle:
            order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed))
            documents = [documents[i] for i in order]
        texts = [alpaca_prompt(instruction) + response for instruction, response in documents]
        stream = [i for ids in encode_prompts(texts, tokenizer) for i in (*ids, tokenizer.eos_token_id)]
        n_chunks = max(len(stream) - 1, 0) // seq_length
        tokens = torch.tensor(stream[: n_chunks * seq_length + 1], dtype=torch.long)
        self.input_ids = tokens[:-1].reshape(n_chunks, seq_length)
        self.labels = tokens[1:].reshape(n_chunks, seq_length)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.input_ids[i], "labels": self.labels[i]}


def iterate_batches(dataset, batch_size: int, shuffle: bool = False, seed: int = 0) -> DataLoader:
    """One pass over the dataset in batches, the last one possibly smaller; seeded."""
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, generator=generator)


def sft_loss(model, input_ids, labels) -> torch.Tensor:
    """Mean cross-entropy per token, in nats, float32. input_ids and labels: (B, L) int64."""
    logits = model(input_ids).logits  # (B, L, vocabulary)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def sft_train(
    model,
    dataset,
    *,
    lr: float = 2e-5,
    n_epochs: int = 1,
    batch_size: int = 32,
    microbatch_size: int = 0,
    warmup_share: float = 0.03,
    max_grad_norm: float = 1.0,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Fit the model to a packed dataset with AdamW, linear warm-up and cosine decay.

    ``microbatch_size`` rows at a time pass through the model (0: the whole batch); the gradient is that of
    the whole batch whatever its value. Returns one dict per optimizer step: step, loss (nats per token),
    grad_norm (before clipping) and lr.
    """
    if len(dataset) == 0:
        raise ValueError("dataset: it holds no full chunk, expected at least one (a shorter seq_length?)")
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    n_steps = n_epochs * -(-len(dataset) // batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(n_steps, warmup_share))
    model.train()
    log = []
    with progress(total=n_steps, desc="SFT") as bar:
        for epoch in range(n_epochs):
            for batch in iterate_batches(dataset, batch_size, shuffle=True, seed=seed + epoch):
                rows, loss = len(batch["input_ids"]), 0.0
                size = microbatch_size or rows
                for start in range(0, rows, size):
                    part = {k: v[start : start + size].to(device) for k, v in batch.items()}
                    part_loss = sft_loss(model, **part) * (len(part["input_ids"]) / rows)
                    part_loss.backward()
                    loss += part_loss.item()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item()
                row = {"step": len(log) + 1, "loss": loss, "grad_norm": norm}
                log.append(row | {"lr": schedule.get_last_lr()[0]})
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
                bar.update(1)
    return log


def warmup_then_cosine(n_steps: int, warmup_share: float):
    """The learning rate's factor at step i: a straight line up to 1, then half a cosine down towards 0."""
    warmup = max(1, round(n_steps * warmup_share))

    def factor(step):
        done = min((step - warmup) / max(1, n_steps - warmup), 1.0)
        return (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * done))

    return factor


_LETTER_SAID = re.compile(
    r"(?:answer|option|choice)\s*(?:is|would be|:|=)?\s*\**\s*\(?([A-D])\b(?!')"
    r"|\\boxed\{\s*(?:\\text\{)?\s*([A-D])\b",
    re.IGNORECASE,
)
_LETTER_ALONE = re.compile(r"^\W*([A-D])(?:\W*$|[.):]\s)")


def parse_mmlu_response(response: str) -> str | None:
    """The letter A-D that a response chooses, or None.

    A letter that is said to be the answer wins ("the correct answer is (B)"; the last such claim counts),
    then a response that is a letter or starts with one ("B", "C. Paris"). A letter that merely occurs ("A dog
    ...") does not.
    """
    said = [m for m in _LETTER_SAID.finditer(response) if (m[1] or m[2]).isupper()]
    if said:
        return said[-1][1] or said[-1][2]
    alone = _LETTER_ALONE.match(response.strip())
    return alone[1] if alone else None


_NUMBER = re.compile(r"(?<![\w.])[-\u2212]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])[-\u2212]?\.\d+")


def parse_gsm8k_response(response: str) -> str | None:
    """The last number of a response, without commas or currency signs, or None when it holds none."""
    numbers = _NUMBER.findall(response)
    return numbers[-1].replace(",", "").replace("$", "").replace("\u2212", "-") if numbers else None
