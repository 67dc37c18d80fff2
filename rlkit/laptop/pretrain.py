"""Rebuild a testbed's base model: tokenizer, pretraining, figures (``python -m rlkit.laptop.pretrain``).

A four-layer Olmo2 of about a million parameters reads a few million tokens of ``corpus.documents``;
``laptop_long``'s starts from the weights and the tokenizer of ``laptop``'s and reads its own task's. The
matrices learn by Muon (https://kellerjordan.github.io/posts/muon/), everything else by AdamW. One seed fixes
every number on one machine; another CPU or thread count rounds differently and gives a slightly different
model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import time
from collections import defaultdict
from datetime import date
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from rlkit.laptop import model_path
from rlkit.laptop.corpus import documents
from rlkit.support.models import load_model
from rlkit.support.progress import progress

RECIPE: dict = dict(
    task="laptop",
    start=None,  # the task whose base model it goes on from; None is a new tokenizer and random weights
    version=2,
    seed=0,
    threads=2,
    vocab_size=640,
    tokenizer_docs=6000,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=352,  # heads of 32
    steps=1800,
    rows=5,
    row_tokens=448,
    muon_lr=0.02,
    muon_weight_decay=0.01,
    adam_lr=3e-3,
    warmup=60,
    final_lr=0.05,
    max_grad_norm=1.0,
)
RECIPES = {
    "laptop": RECIPE,
    "laptop_long": RECIPE
    | dict(task="laptop_long", start="laptop", version=1, steps=800, rows=5, row_tokens=704, muon_lr=0.015)
    | dict(adam_lr=2e-3),
}
PAD, EOS = "<|pad|>", "<|endoftext|>"
# a word with its space, one digit with its space, a run of other signs with its space, or a single white
# space
PRETOKEN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits; pad is 0, end of text 1, and encoding adds neither."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, EOS],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def batches(tokenizer, seed: int, rows: int, row_tokens: int, task: str):
    """Endless (rows, row_tokens) int64 batches. A row starts with a document; its last one is cut off."""
    stream, eos, batch = documents(seed, task), tokenizer.eos_token_id, []
    while True:
        docs = tokenizer(list(islice(stream, 512)), add_special_tokens=False)["input_ids"]
        row = []
        for ids in docs:
            row += ids + [eos]
            if len(row) >= row_tokens:
                batch.append(row[:row_tokens])
                row = []
                if len(batch) == rows:
                    yield torch.tensor(batch)
                    batch = []


class Muon(torch.optim.Optimizer):
    """Momentum; the update is the nearest orthogonal matrix. For the 2-D weights of the layers."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                m = (
                    self.state[p]
                    .setdefault("momentum", torch.zeros_like(p))
                    .lerp_(p.grad, 1 - group["momentum"])
                )
                by_shape[p.shape].append((p, p.grad.lerp(m, group["momentum"])))
            for shape, pairs in by_shape.items():
                updates = orthogonalize(torch.stack([update for _, update in pairs]))
                for (p, _), update in zip(pairs, updates):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * max(1, shape[0] / shape[1]) ** 0.5)


def orthogonalize(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz in float32 on a stack of matrices (n, rows, cols): singular values come to lie near 1."""
    wide = g.shape[-2] <= g.shape[-1]
    x = g if wide else g.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if wide else x.mT


def pretrain(recipe: dict) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, dict]:
    """Train tokenizer and model; returns them and a record (corpus statistics, losses, seconds)."""
    r = argparse.Namespace(**recipe)
    torch.set_num_threads(r.threads)
    torch.manual_seed(r.seed)
    started, cpu_started = time.perf_counter(), time.process_time()

    texts = list(islice(documents(r.seed, r.task), r.tokenizer_docs))
    if r.start:
        model, tokenizer = load_model(r.start, device="cpu")
    else:
        tokenizer = train_tokenizer(texts, r.vocab_size)
        model = new_model(tokenizer, r)
    n_tokens = sum(len(ids) for ids in tokenizer(texts)["input_ids"])

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in name)]
    optimizers = [
        Muon(matrices, lr=r.muon_lr, weight_decay=r.muon_weight_decay),
        torch.optim.AdamW(others, lr=r.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / r.warmup, 1 - (1 - r.final_lr) * step / r.steps)
        )
        for optimizer in optimizers
    ]

    held_out = list(islice(batches(tokenizer, r.seed + 1, r.rows, r.row_tokens, r.task), 10))
    losses, bar = [], progress(total=r.steps, desc="pretraining")
    for step, ids in enumerate(islice(batches(tokenizer, r.seed, r.rows, r.row_tokens, r.task), r.steps), 1):
        loss = next_token_loss(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), r.max_grad_norm)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        bar.update()
        if step % 100 == 0 or step == r.steps:
            with torch.no_grad():
                held_out_loss = sum(next_token_loss(model, batch).item() for batch in held_out) / len(
                    held_out
                )
            losses.append({"step": step, "train": round(loss.item(), 4), "held_out": round(held_out_loss, 4)})
            bar.set_postfix(held_out_loss=f"{held_out_loss:.3f}")
    bar.close()
    return (
        model.eval(),
        tokenizer,
        {
            "tokens": r.steps * r.rows * r.row_tokens,
            "losses": losses,
            "corpus": {"tokens_per_document": round(n_tokens / len(texts), 1), "vocab_size": len(tokenizer)},
            "parameters": sum(p.numel() for p in model.parameters()),
            "wall_seconds": round(time.perf_counter() - started),
            "cpu_seconds": round(time.process_time() - cpu_started),
        },
    )


def new_model(tokenizer, r) -> Olmo2ForCausalLM:
    """Random weights of the recipe's sizes."""
    ends: dict = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=len(tokenizer),
            hidden_size=r.hidden_size,
            num_hidden_layers=r.num_hidden_layers,
            num_attention_heads=r.num_attention_heads,
            num_key_value_heads=r.num_attention_heads,
            intermediate_size=r.intermediate_size,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            **ends,
            bos_token_id=None,
            dtype="float32",
        )
    )


def next_token_loss(model, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats) of each token given those before it; ids (rows, tokens)."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def save(out: Path, model, tokenizer, provenance: dict) -> None:
    """Weights (float32 safetensors), config, tokenizer, generation_config and provenance.json."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    provenance["sha256"] = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    (out / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")


def base_figures(model, tokenizer, task: str = "laptop", n: int = 512, seed: int = 0) -> dict:
    """What the model does at ``n`` validation problems, for each prompt, at T = 1."""
    from rlkit.jobs.config import Config
    from rlkit.laptop.problems import generate_problems
    from rlkit.samplers import make_sampler
    from rlkit.tasks.evaluation import evaluate
    from rlkit.tasks.prompts import load_prompt, prompt_names

    problems, sampler = (
        generate_problems(n, "validation", task=task),
        make_sampler("transformers", model, tokenizer),
    )
    figures, max_tokens = {}, Config.from_parameters({"preset": task}).max_tokens
    for name in sorted({*prompt_names()} - {"chat"}):  # this model has no chat template
        result = evaluate(sampler, problems, load_prompt(name), max_tokens=max_tokens, seed=seed)
        rate = result.format_rate
        figures[name] = {
            "n": n,
            "accuracy": result.accuracy,
            "accuracy_se": result.accuracy_se,
            "format_rate": rate,
            "format_rate_se": (rate * (1 - rate) / n) ** 0.5,
            "response_length": result.response_length,
            "by_steps": result.by_steps.accuracy.round(4).to_dict(),
        }
    return figures


def machine() -> dict:
    """Where this ran: processor, system, versions, and the commit of the recipe if there is one."""
    import transformers

    commit = (
        subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
        or None
    )
    return {
        "machine": f"{os.cpu_count()} x {platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "date": str(date.today()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=RECIPES, default="laptop")
    parser.add_argument("--out", type=Path, help="folder to write (default: the package's own)")
    for name in ("steps", "seed", "threads"):
        parser.add_argument(f"--{name}", type=int, help="default: the recipe's")
    parser.add_argument("--no-figures", action="store_true", help="skip measuring the base model's accuracy")
    args = parser.parse_args()
    own = {name: getattr(args, name) for name in ("steps", "seed", "threads")}
    recipe = RECIPES[args.task] | {name: value for name, value in own.items() if value is not None}
    out = args.out or model_path(args.task)
    model, tokenizer, record = pretrain(recipe)
    provenance = {"recipe": recipe, **record, **machine()}
    if not args.no_figures:
        provenance["base"] = base_figures(model, tokenizer, args.task)
    save(out, model, tokenizer, provenance)
    print(
        f"{out}: {record['parameters'] / 1e6:.2f} M parameters, held-out loss "
        f"{record['losses'][-1]['held_out']}, {record['wall_seconds']} s ({record['cpu_seconds']} CPU s)"
    )


if __name__ == "__main__":
    main()
