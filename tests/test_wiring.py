"""From Config to the weights: whole runs with odd values in every field, and the same steps in plain torch.

A scripted sampler writes the responses, so that every group, reward and cut response is known beforehand.
What the run logged, asked of the sampler and did to the weights is then computed once more here, from the
script alone: full forward passes over padded rows, the formulae written out, torch's own AdamW. Nothing of
rlkit takes part in that.
"""

import json
import random
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from rlkit import (
    ALGORITHMS,
    Completion,
    Config,
    SamplingParams,
    TransformersSampler,
    load_problems,
    load_prompt,
    r1_zero_reward_fn,
    train,
)
from rlkit.laptop import model_path
from rlkit.samplers.shared_scoring import can_share_prefix

# every field that reaches a number, at a value nobody would have by default
ODD = dict(
    lr=3e-3,
    adam_beta1=0.7,
    adam_beta2=0.85,
    weight_decay=0.3,
    max_grad_norm=3e-5,  # AdamW forgets a gradient's length but for its eps of 1e-8: this one is short enough
    advantage_eps=0.37,
    temperature=0.7,
    max_tokens=37,
    group_size=4,
    rollout_batch_size=12,
    train_batch_size=12,
    gradient_accumulation_steps=3,
    seed=5,
    n_train=10,
    n_val=3,
    n_val_final=5,
    n_steps=4,
    eval_every=2,
    eval_at_start=True,
    rollouts_every=1,
    checkpoint_every=0,
    device="cpu",
)
TIMES = {"time_sample", "time_train", "time_eval", "time_sync", "time_cpu", "tokens_per_second"}


# ---- the script


# what each of a step's three groups of four responses is like
MIXED = ("right", "wrong", "cut", "free")
MOSTLY = ("right", "right", "wrong", "cut")
ALL = ("right", "right", "right", "right")
NOTHING = ("free", "free", "cut", "free")
TWINS = ("same", "cut", "wrong", "same")
SAME = ("same", "same", "same", "same")
PLAY = [(MIXED, SAME, MOSTLY), (ALL, MOSTLY, TWINS), (SAME, ALL, NOTHING), (MOSTLY, MIXED, MIXED)]
VALIDATION = ("right", "wrong", "free", "cut", "right")

REWARDS = ("reward", "format_reward", "answer_reward")
# those of a prompt's own reward function, and of ours
OWN = {"right": (1, 1, 1), "wrong": (0, 1, 0), "same": (0, 1, 0), "free": (0, 0, 0), "cut": (0, 0, 0)}
HALVES = {
    "right": (1, 1, 1),
    "wrong": (0.25, 1, 0),
    "same": (0.5, 1, 0),
    "free": (0, 0, 0),
    "cut": (0, 0.5, 0),
}


@dataclass
class Line:
    """One response: what kind it is, the answer that can be read from it, and what the sampler gave."""

    kind: str
    answer: str
    completion: Completion


@dataclass
class Call:
    """One ``generate``: what was asked, with which weights, and the lines that came back for each prompt."""

    prompts: list
    params: SamplingParams
    n: int
    weights: dict
    lines: list = field(default_factory=list)
    threads: int = field(default_factory=torch.get_num_threads)
    autocast: bool = field(default_factory=lambda: torch.is_autocast_enabled("cpu"))


class Scripted:
    """A sampler that writes what the script says. It starts with no weights and keeps what it is given.

    Its log-probs are those of its own weights and the temperature asked for, shifted a little by noise, so
    that ratios, gaps and truncated weights are not trivial.
    """

    def __init__(self, folder, gold_of, quiet=False, entropies=False):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        for p in self.model.parameters():
            p.data.zero_()
        self.gold_of, self.calls, self.passes = gold_of, [], []
        self.steps, self.stop_at, self.trained, self.quiet = 0, None, None, quiet
        self.entropies = entropies

    def sync_weights(self, model, step=None):
        self.model.load_state_dict(model.state_dict())
        if self.trained is None:
            self.trained = model
            can_share_prefix(model)  # the look at the model that comes before the first scoring
            model.get_input_embeddings().register_forward_hook(self.watch)

    def watch(self, module, args, output):
        """Notes (rows, autocast?) of a forward pass; one over a few tokens is only a look at the model."""
        n_rows, n_tokens = args[0].shape
        if n_tokens > 8:
            self.passes.append((n_rows, torch.is_autocast_enabled("cpu")))

    def generate(self, prompts, params, n=1):
        call = Call(list(prompts), params, n, copy_of(self.model))
        if n == 1:
            kinds = [(kind,) for kind in VALIDATION[: len(prompts)]]
        else:
            kinds, self.steps = PLAY[self.steps], self.steps + 1
            if self.steps == self.stop_at:
                raise KeyboardInterrupt
        rng = random.Random(params.seed)
        for prompt, group in zip(prompts, kinds, strict=True):
            call.lines.append([self.write(prompt, kind, params, rng) for kind in group])
        self.calls.append(call)
        with torch.no_grad():
            for line in [] if self.quiet else sum(call.lines, []):
                exact = score(self.model, [line.completion], params.temperature)[0][0].tolist()
                line.completion.log_probs = [log_p + rng.uniform(-0.2, 0.2) for log_p in exact]
                if self.entropies:
                    line.completion.entropies = [rng.uniform(1, 5) for _ in exact]
        return [[line.completion for line in group] for group in call.lines]

    def write(self, prompt, kind, params, rng):
        gold = self.gold_of[prompt]
        filler = "".join(rng.choices("abcdefgh", k=rng.randint(1, 8)))
        answer = gold if kind == "right" else "-7" if kind == "same" else str(rng.randint(100, 999))
        if kind == "free":
            text, answer = filler * 2, ""
        elif kind == "cut":
            text, answer = "".join(rng.choices("xyz ", k=params.max_tokens)), ""
        elif params.stop:
            text = f"{'' if kind == 'same' else filler}</think> <answer>{answer}</answer>"
        else:
            text = f"{'' if kind == 'same' else filler} \\boxed{{{answer}}}"
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if kind != "cut" and not text.endswith(params.stop or "\n"):
            ids = ids + [self.tokenizer.eos_token_id]
        if kind == "free" and self.quiet:
            text, ids = "", []
        reason = "length" if kind == "cut" else "stop"
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        return Line(kind, answer, Completion(text, ids, reason, [], prompt_ids))

    def close(self):
        raise AssertionError("a sampler that was given is not the trainer's to close")


def copy_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# ---- the same in plain torch


def seeded(seed, step, purpose):
    """The seeds of a run: recorded runs can be made again only as long as they stay these."""
    return int(np.random.SeedSequence([seed, step, crc32(purpose.encode())]).generate_state(1)[0] >> 1)


def score(model, completions, temperature):
    """([log-probs], [entropies]) of each response's tokens: one forward pass over padded rows."""
    rows = [torch.tensor(c.prompt_token_ids + c.token_ids) for c in completions]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    seen = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    every = (model(input_ids=ids, attention_mask=seen).logits.float() / temperature).log_softmax(-1)
    log_probs, entropies = [], []
    for row, c in enumerate(completions):
        start, end = len(c.prompt_token_ids) - 1, len(c.prompt_token_ids) + len(c.token_ids) - 1
        at = every[row, start:end]
        log_probs.append(at[torch.arange(end - start), torch.tensor(c.token_ids, dtype=torch.long)])
        entropies.append(-(at.exp() * at).sum(-1).detach())
    return log_probs, entropies


class Plain:
    """A model and its AdamW; ``step`` does one rollout batch's updates and says what a run would log."""

    def __init__(self, folder, case, values):
        self.case, self.values, self.orders = case, values, []
        dtype = getattr(torch, values.get("dtype", "float32"))
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        if rank := values.get("lora_rank"):
            alpha, names = values["lora_alpha"], values["lora_target_modules"].split(",")
            torch.manual_seed(seeded(values["seed"], 0, "lora"))
            self.model = get_peft_model(
                self.model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)
            ).eval()
        self.reference = AutoModelForCausalLM.from_pretrained(folder).eval() if case.kl else None
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        betas = (values["adam_beta1"], values["adam_beta2"])
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=values["lr"], betas=betas, weight_decay=values["weight_decay"]
        )

    def difference(self, weights):
        """The largest |difference| between these weights and ours."""
        return max((p - weights[name]).abs().max().item() for name, p in self.weights().items())

    def weights(self):
        """The model's parameters; with a LoRA those of the base model, plus alpha / r times B A."""
        found = dict(self.model.named_parameters())
        if rank := self.values.get("lora_rank"):
            names = {name.removesuffix(".base_layer.weight") for name in found if ".base_layer." in name}
            for name in names:
                a, b = (found.pop(f"{name}.lora_{which}.default.weight") for which in "AB")
                frozen = found.pop(f"{name}.base_layer.weight")
                found[f"{name}.weight"] = frozen + self.values["lora_alpha"] / rank * b @ a
        return {name.removeprefix("base_model.model."): p.detach() for name, p in found.items()}

    def rate(self, step):
        """The learning rate of a rollout batch, by transformers' own schedule."""
        if "lr_schedule" not in self.values:
            return self.values["lr"]
        one = torch.optim.SGD([torch.zeros(1)], lr=self.values["lr"])
        length = (self.values["lr_warmup_steps"], self.values["n_steps"] + 1)
        schedule = get_scheduler(self.values["lr_schedule"], one, *length)
        return schedule.lr_lambdas[0](step) * self.values["lr"]

    def advantages(self, rewards):
        centred = rewards - rewards.mean(1, keepdim=True) if self.case.centre else rewards
        eps = self.values["advantage_eps"]
        if self.case.divide == "std":
            return centred / (rewards.std(1, keepdim=True) + eps)
        if self.case.divide == "mean":
            return centred / (rewards.mean(1, keepdim=True) + eps)
        return centred / (self.case.divide(rewards) + eps) if self.case.divide else centred

    def token_losses(self, advantage, new, old):
        """(losses, ratios, clipped low, clipped high) of one response."""
        e, ratio = self.case.cliprange, (new - old).exp()
        below, above = e if isinstance(e, tuple) else (e, e)
        if self.case.method == "gspo":
            ratio = (new - old).mean().exp()[None]
        low = (ratio < 1 - below) & (advantage < 0) if e else torch.zeros_like(ratio, dtype=bool)
        high = (ratio > 1 + above) & (advantage > 0) if e else torch.zeros_like(ratio, dtype=bool)
        if self.case.method == "none":
            losses = -advantage * new
        elif self.case.method == "noclip":
            losses = -advantage * ratio
        elif self.case.method == "cispo":
            low, high = torch.zeros_like(low), (ratio > 1 + e) & (advantage != 0)
            losses = -advantage * ratio.detach().clamp(max=1 + e) * new
        else:
            unclipped, clipped = advantage * ratio, advantage * ratio.clamp(1 - below, 1 + above)
            losses = -torch.where(clipped < unclipped, clipped, unclipped)
        return losses.expand(len(new)), ratio.detach(), low, high

    def step(self, step, lines, rewards):
        """lines: the rollout batch, group after group. rewards: (rows, 3)."""
        values, case, completions = self.values, self.case, [line.completion for line in lines]
        size, t = values["group_size"], values["temperature"]
        n, lengths = len(lines), [len(c.token_ids) for c in completions]
        by_group = rewards[:, 0].reshape(-1, size)
        advantages = self.advantages(by_group).flatten()
        groups = [lines[i : i + size] for i in range(0, n, size)]
        row = {
            "step": step,
            "reward": rewards[:, 0].mean(),
            "format_reward": rewards[:, 1].mean(),
            "answer_reward": rewards[:, 2].mean(),
            "pass_at_k": (by_group >= 1).any(1).double().mean(),
            "groups_all_right": (by_group >= 1).all(1).sum(),
            "groups_all_wrong": (by_group <= 0).all(1).sum(),
            "groups_mixed": (by_group.amax(1) > by_group.amin(1)).sum(),
            "distinct_answers": np.mean([len({line.answer for line in group}) for group in groups]),
            "groups_identical": sum(len({line.completion.text for line in group}) == 1 for group in groups),
            "response_length": np.mean(lengths),
            **by_result("response_length", lengths, rewards),
            "truncated_share": np.mean([line.kind == "cut" for line in lines]),
            "lr": self.rate(step),
            "optimizer_steps": n // values["train_batch_size"],
        }
        sampled = None if case.quiet else [torch.tensor(c.log_probs) for c in completions]
        with torch.no_grad():
            before = score(self.model, completions, t)[0]
        gaps = None if case.quiet else [b - s for b, s in zip(before, sampled)]
        # only rows that teach are scored: gaps, ratios and, unless the sampler knows better, entropy are
        # theirs
        kept = [i for i in range(n) if not (case.masked and lines[i].kind == "cut")]
        teach = [i for i in kept if (advantages[i] != 0 or case.kl) and lengths[i]]
        row["rows_used"] = len(teach)
        if case.kl:
            with torch.no_grad():
                reference = score(self.reference, completions, t)[0]
        for group in self.optimizer.param_groups:
            group["lr"] = row["lr"]
        cap = values.get("tis_cap")
        weights = [gap.exp().clamp(max=cap) for gap in gaps] if cap else [torch.ones_like(b) for b in before]
        if cap and teach:
            row["tis_share"] = (torch.cat([gaps[i] for i in teach]).exp() > cap).double().mean()
        old = before if cap or case.method != "none" else sampled

        order = list(range(n))
        if values["train_batch_size"] < n:
            order = np.random.default_rng(seeded(values["seed"], step, "shuffle")).permutation(n).tolist()
        self.orders.append(tuple(order))
        size = values["train_batch_size"]
        batches = [order[i : i + size] for i in range(0, n, size)]
        if gaps:  # known of all rows where old log-probs were scored, else of the first train batch
            watched = [gaps[i].abs() for i in (order if old is before else batches[0]) if i in teach]
            if watched:
                watched = torch.cat(watched)
                row |= {"logprob_gap_mean": watched.mean(), "logprob_gap_max": watched.max()}

        losses, norms, entropies, ratios, low, high, kls = [], [], [], [], [], [], []
        for batch in [[i for i in some if i in kept] for some in batches]:
            constant = sum(lengths[i] for i in batch) if case.tokens else case.constant
            new, entropy = score(self.model, [completions[i] for i in batch], t)
            loss = 0.0
            for log_p, i in zip(new, batch):
                per_token, *seen = self.token_losses(advantages[i].item(), log_p, old[i] if old else log_p)
                per_token = per_token * weights[i]
                if case.kl:
                    kls.append(reference[i].sub(log_p).exp() - 1 + log_p - reference[i])
                    per_token = per_token + case.kl * kls[-1]
                mean = per_token.sum() / max(1, len(per_token))
                loss += per_token.sum() / constant if constant else mean / size
                for found, value in zip((ratios, low, high), seen):
                    if found is not ratios or i in teach:
                        found.append(value)
            self.optimizer.zero_grad()
            loss.backward()
            norm = sum(p.grad.double().pow(2).sum() for p in self.trained).sqrt().item()
            for p in self.trained:
                p.grad *= min(1.0, values["max_grad_norm"] / (norm + 1e-6))
            self.optimizer.step()
            losses.append(loss.item()), norms.append(norm)
            entropies += [found for i, found in zip(batch, entropy) if i in teach]
        low, high = torch.cat(low).double().mean(), torch.cat(high).double().mean()
        row |= {"loss": np.mean(losses), "grad_norm": np.mean(norms)}
        if case.kl:
            row["kl"] = torch.cat([kls_of.detach() for kls_of in kls]).mean()
        if case.entropies:
            entropies = [torch.tensor(c.entropies) for c in completions]
        if entropies:
            row["token_entropy"] = torch.cat(entropies).mean()
        row |= {"clip_fraction_low": low, "clip_fraction_high": high, "clip_fraction": low + high}
        if old and ratios:
            row |= {"ratio_min": torch.cat(ratios).min(), "ratio_max": torch.cat(ratios).max()}
        return {name: float(value) for name, value in row.items()}, advantages.tolist()


# ---- the runs


@dataclass
class Case:
    """An algorithm, what it means in the formulae above, and the fields it changes."""

    algorithm: object
    centre: bool = True
    divide: object = "std"
    constant: float | None = None
    method: str = "none"
    cliprange: float | tuple = 0.0
    tokens: bool = False  # one mean over the train batch's tokens
    masked: bool = False  # cut responses are not learned from
    kl: float = 0.0
    halves: bool = False
    quiet: bool = False  # a sampler that gives no log-probs, and some responses without a single token
    entropies: bool = False  # a sampler that knows the entropy of what it drew from
    changes: dict = field(default_factory=dict)


def spread(rewards):
    return rewards.amax(1, keepdim=True) - rewards.amin(1, keepdim=True) + 0.5


SEVERAL = dict(train_batch_size=4, gradient_accumulation_steps=2)
LORA = dict(lora_rank=3, lora_alpha=7.0, lora_target_modules="q_proj,down_proj", lr=2e-2)
CASES = {
    "grpo": Case("grpo"),
    "grpo, entropies by the sampler": Case("grpo", entropies=True),
    "grpo, half rewards, tis": Case("grpo", halves=True, changes=dict(tis_cap=1.05)),
    "grpo_constant, other times": Case(
        "grpo_constant", constant=12 * 37, changes=dict(eval_every=3, eval_at_start=False, rollouts_every=3)
    ),
    "drgrpo": Case("drgrpo", divide=None, constant=91.0, changes=dict(normalization_constant=91.0)),
    "rft": Case("rft", centre=False, divide=None, constant=91.0, changes=dict(normalization_constant=91.0)),
    "maxrl": Case("maxrl", divide="mean", constant=4 * 37, halves=True, changes=SEVERAL),
    "offpolicy_naive": Case("offpolicy_naive", changes=SEVERAL),
    "offpolicy_naive, entropies by the sampler": Case("offpolicy_naive", entropies=True, changes=SEVERAL),
    "offpolicy_noclip": Case("offpolicy_noclip", method="noclip", halves=True, changes=SEVERAL),
    "offpolicy_clip": Case(
        "offpolicy_clip", method="grpo", cliprange=0.03, changes=SEVERAL | dict(cliprange=0.03, tis_cap=1.05)
    ),
    "offpolicy_gspo": Case(
        "offpolicy_gspo", method="gspo", cliprange=0.001, halves=True, changes=SEVERAL | dict(cliprange=0.001)
    ),
    "cispo": Case(
        "cispo", method="cispo", cliprange=0.03, changes=SEVERAL | dict(cliprange=0.03, tis_cap=1.1)
    ),
    "dapo": Case(
        "dapo",
        method="grpo",
        cliprange=(0.01, 0.03),
        tokens=True,
        masked=True,
        changes=SEVERAL
        | dict(cliprange=0.01, cliprange_high=0.03, resamples=0, lr_warmup_steps=2)
        | dict(lr_schedule="linear"),
    ),
    "grpo, a KL penalty": Case(
        "grpo", kl=0.4, changes=dict(kl_coef=0.4, lr_schedule="cosine") | dict(lr_warmup_steps=1)
    ),
    "offpolicy_clip, a KL penalty": Case(
        "offpolicy_clip",
        method="grpo",
        cliprange=0.02,
        kl=0.2,
        masked=True,
        changes=SEVERAL | dict(kl_coef=0.2, cliprange=0.02, mask_truncated=True, tis_cap=1.05),
    ),
    "grpo, a LoRA": Case("grpo", changes=LORA),
    "offpolicy_clip, a LoRA, layers recomputed": Case(
        "offpolicy_clip",
        method="grpo",
        cliprange=0.01,
        changes=SEVERAL | LORA | dict(cliprange=0.01, tis_cap=1.05, gradient_checkpointing=True),
    ),
    "grpo, a quiet sampler": Case("grpo", quiet=True),
    "offpolicy_clip, a quiet sampler": Case(
        "offpolicy_clip", method="grpo", cliprange=0.02, quiet=True, changes=SEVERAL | dict(cliprange=0.02)
    ),
    "an own normalizer": Case(
        replace(ALGORITHMS["offpolicy_clip"], name="mine", advantage_normalizer=spread, cliprange=0.02),
        divide=spread,
        method="grpo",
        cliprange=0.02,
        halves=True,
        changes=SEVERAL,
    ),
}


@dataclass
class World:
    """A base model, problems and prompts in a folder, and what they mean."""

    dataset: str
    model: str
    problems: dict  # split -> [(question, gold)]
    prompts: dict  # name -> (path, template, stop strings)

    def gold_of(self, template):
        return {
            template.replace("{question}", q): gold for rows in self.problems.values() for q, gold in rows
        }


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    rng = random.Random(0)
    problems = {}
    for split, n in (("train", 13), ("test", 7)):
        rows = [(rng.randint(1, 9), rng.randint(1, 9), i) for i in range(n)]
        problems[split] = [(f"{split[:2]}{i}: {a}+{b}?", str(a + b)) for a, b, i in rows]
        lines = [json.dumps({"question": q, "answer": f"so #### {gold}"}) for q, gold in problems[split]]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    prompts = {}
    for name, template in (("tags", "{question} In <answer>. <think>"), ("box", "Q: {question}\nA:")):
        (folder / name).write_text(template)
        prompts[name] = (str(folder / name), template, ("</answer>",) if name == "tags" else ())
    return World(str(folder), str(save_tiny_model(folder / "model")), problems, prompts)


def halves(response, gold):
    """A reward with halves, so that a group may be neither right nor wrong."""
    return dict(zip(REWARDS, HALVES[kind_of(response, gold)]))


def kind_of(response, gold):
    if "-7" in response:
        return "same"
    if "answer>" in response or "boxed" in response:
        return "right" if f">{gold}<" in response or f"{{{gold}}}" in response else "wrong"
    return "cut" if len(response) > 20 else "free"


def problems_of(values, problems, step):
    """Every epoch in an order of its own, whole batches only."""
    n = values["rollout_batch_size"] // values["group_size"]
    epoch, place = divmod(step - 1, values["n_train"] // n)
    order = np.random.default_rng(seeded(values["seed"], epoch, "epoch")).permutation(values["n_train"])
    return [problems[i] for i in order[place * n : (place + 1) * n]]


def check_run(run, calls, case, values, world, prompt, tolerance=1e-5, weights_tolerance=1e-6):
    """All that the run asked, wrote and learned, against the script and plain torch; returns the metrics."""
    _, template, stop = world.prompts[prompt]
    plain, calls = Plain(world.model, case, values), iter(calls)
    logged = {int(row["step"]): row.dropna().to_dict() for _, row in run.metrics.iterrows()}
    rollouts, n_steps, size = run.rollouts, values["n_steps"], values["group_size"]

    def asked(purpose, step, problems, n):
        """The call that comes next, found to be this one: its responses in one list."""
        call = next(calls)
        assert call.prompts == [template.replace("{question}", q) for q, _ in problems] and call.n == n
        seed = seeded(values["seed"], step, purpose)
        assert call.params == SamplingParams(
            values["max_tokens"], values["temperature"], stop=stop, seed=seed
        )
        assert plain.difference(call.weights) < weights_tolerance
        return sum(call.lines, [])

    def written(split, step, lines, golds, rewards):
        rows = rollouts[(rollouts.step == step) & (rollouts.split == split)]
        assert rows.response.tolist() == [line.completion.text for line in lines]
        assert rows.gold.tolist() == golds
        assert rows.length.tolist() == [len(line.completion.token_ids) for line in lines]
        assert rows.finish_reason.tolist() == ["length" if line.kind == "cut" else "stop" for line in lines]
        assert rows[list(REWARDS)].values.tolist() == rewards.tolist()
        return rows

    steps_with_rollouts = set()
    for step in range(n_steps + 1):
        expected = {"step": step}
        if step > 0:
            problems = problems_of(values, world.problems["train"], step)
            lines = asked("rollout", step, problems, size)
            rewards = torch.tensor([(HALVES if case.halves else OWN)[line.kind] for line in lines]).double()
            metrics, advantages = plain.step(step, lines, rewards)
            expected |= metrics
            if step in (1, n_steps) or step % values["rollouts_every"] == 0:
                rows = written("train", step, lines, [p[1] for p in problems for _ in range(size)], rewards)
                assert rows.advantage.tolist() == pytest.approx(advantages, abs=1e-6)
                assert rows.group.tolist() == [i for i in range(len(problems)) for _ in range(size)]
                steps_with_rollouts.add(step)
        if step == n_steps or step % values["eval_every"] == 0 and (step > 0 or values["eval_at_start"]):
            n = values["n_val_final"] if step == n_steps else values["n_val"]
            problems = world.problems["test"][:n]
            lines = asked("evaluation", step, problems, 1)
            rewards = np.array([OWN[line.kind] for line in lines], dtype=float)
            expected |= {
                "val_reward": rewards[:, 0].mean(),
                "val_reward_se": rewards[:, 0].std(ddof=1) / n**0.5,
                "val_format_reward": rewards[:, 1].mean(),
                "val_response_length": np.mean([len(line.completion.token_ids) for line in lines]),
                **by_result("val_length", [len(line.completion.token_ids) for line in lines], rewards),
                "val_truncated_share": np.mean([line.kind == "cut" for line in lines]),
                "val_n": n,
            }
            written("validation", step, lines, [gold for _, gold in problems], rewards)
        found = {name: value for name, value in logged.pop(step, {}).items() if name not in TIMES}
        assert found == pytest.approx(expected if len(expected) > 1 else {}, rel=5 * tolerance, abs=tolerance)
    assert next(calls, None) is None and not logged
    assert set(rollouts[rollouts.split == "train"].step) == steps_with_rollouts
    assert values["train_batch_size"] == values["rollout_batch_size"] or len(set(plain.orders)) == n_steps
    assert plain.difference(weights_of(run)) < weights_tolerance
    return run.metrics.set_index("step")


def by_result(name, lengths, rewards):
    results = {"right": [], "wrong": []}
    for length, reward in zip(lengths, rewards[:, 0]):
        results["right" if reward >= 1 else "wrong"].append(length)
    return {f"{name}_{key}": sum(found) / len(found) for key, found in results.items() if found}


def weights_of(run):
    model = AutoModelForCausalLM.from_pretrained(run.model_path, dtype="auto")
    return {name: p.detach() for name, p in model.named_parameters()}


def start(world, case, values, prompt, run_dir, sampler, **more):
    reward_fn = halves if case.halves else None
    config = Config(
        **values,
        model=world.model,
        dataset=world.dataset,
        prompt=world.prompts[prompt][0],
        run_dir=str(run_dir),
        **more,
    )
    return train(config, algorithm=case.algorithm, sampler=sampler, reward_fn=reward_fn)


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_the_same_steps_in_plain_torch(world, tmp_path, name):
    case = CASES[name]
    values, prompt = ODD | case.changes, "box" if case.halves else "tags"
    sampler = Scripted(world.model, world.gold_of(world.prompts[prompt][1]), case.quiet, case.entropies)
    run = start(world, case, values, prompt, tmp_path / "run", sampler)
    metrics = check_run(run, sampler.calls, case, values, world, prompt)

    # the values bind: at the defaults each of these would be none or all
    first = metrics.loc[1]
    assert first.grad_norm > 2 * values["max_grad_norm"] and 0 < first.truncated_share < 1
    assert name == "rft" or case.kl or 0 < first.rows_used < 12 and metrics.rows_used[3] == 0
    assert "tis_cap" not in values or 0.1 < first.tis_share < 0.9
    assert not case.cliprange or 0 < metrics.clip_fraction_high.mean() < 0.5
    assert case.method not in ("grpo", "gspo") or 0 < metrics.clip_fraction_low.mean() < 0.5
    rows = values["train_batch_size"] // values["gradient_accumulation_steps"]
    scored = sum(n for n, _ in sampler.passes[1::2])  # a microbatch is two passes: prompts, then responses
    times = 2 if case.method != "none" or "tis_cap" in values else 1  # old log-probs are of the same rows
    plainly = case.quiet or "gradient_checkpointing" in values  # one pass then, with the prompts
    assert plainly or scored == times * metrics.rows_used.sum()
    assert max(sampler.passes) == (rows, False) and sampler.trained.config._attn_implementation == "sdpa"
    assert {(call.threads, call.autocast) for call in sampler.calls} == {(1, False)}


def test_a_run_that_stopped_and_went_on_is_the_same_steps_too(world, tmp_path):
    """Stopped in step 3: weights, AdamW's moments, logs and the order of everything go on from step 2."""
    name = "offpolicy_clip"
    case, values = CASES[name], ODD | CASES[name].changes | dict(checkpoint_every=1)
    sampler = Scripted(world.model, world.gold_of(world.prompts["tags"][1]))
    stopping = Scripted(world.model, sampler.gold_of)
    stopping.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        start(world, case, values, "tags", tmp_path / "run", stopping)
    sampler.calls, sampler.steps = stopping.calls, 2
    run = start(world, case, values, "tags", tmp_path / "run", sampler, resume=True)
    check_run(run, sampler.calls, case, values, world, "tags")


def test_a_run_has_the_threads_it_was_given(world, tmp_path):
    sampler = Scripted(world.model, world.gold_of(world.prompts["tags"][1]))
    sampler.stop_at = 1  # two busy threads per test process are slow: the evaluation before it is enough
    with pytest.raises(KeyboardInterrupt):
        start(world, CASES["grpo"], ODD | dict(threads=2), "tags", tmp_path / "run", sampler)
    assert [call.threads for call in sampler.calls] == [2]


def test_a_sampler_that_gives_too_little_is_refused(world, tmp_path):
    class Forgetful(Scripted):
        def generate(self, prompts, params, n=1):
            return super().generate(prompts, params, n)[: 3 if n == 1 else 2]

    gold_of = world.gold_of(world.prompts["tags"][1])
    message = "sampler: gave groups of .4, 4. responses, expected 4 for each of 3 prompts"
    with pytest.raises(ValueError, match=message):
        start(world, CASES["grpo"], ODD, "tags", tmp_path / "few", Forgetful(world.model, gold_of))
    with pytest.raises(ValueError, match="tis_cap: the sampler gives no log-probs"):
        values, sampler = ODD | dict(tis_cap=2.0), Scripted(world.model, gold_of, quiet=True)
        start(world, CASES["grpo"], values, "tags", tmp_path / "quiet", sampler)


@pytest.mark.parametrize("change", [dict(autocast=True), dict(dtype="bfloat16")], ids=str)
def test_half_precision_is_where_it_was_asked_for(world, tmp_path, change):
    """Two computations in bfloat16 agree in two digits only, so the numbers are close and the types exact."""
    case, more = CASES["offpolicy_noclip"], dict(attn_implementation="eager", lr=1e-4)
    values = ODD | case.changes | change | more
    sampler = Scripted(world.model, world.gold_of(world.prompts["box"][1]))
    run = start(world, case, values, "box", tmp_path / "run", sampler)
    trained, autocast = sampler.trained, "autocast" in change
    dtype = torch.float32 if autocast else torch.bfloat16
    assert {p.dtype for p in trained.parameters()} == {p.dtype for p in weights_of(run).values()} == {dtype}
    assert trained.config._attn_implementation == "eager"
    assert {with_autocast for _, with_autocast in sampler.passes} == {autocast}
    assert {(call.threads, call.autocast) for call in sampler.calls} == {(1, autocast)}
    check_run(run, sampler.calls, case, values, world, "box", tolerance=0.05, weights_tolerance=0.02)


def test_the_transformers_sampler_gives_what_it_is_asked_for(tmp_path, monkeypatch):
    """The same once more with the sampler that a run makes for itself, on the model that ships with rlkit."""
    problems = {split: load_problems("laptop", name, n) for split, name, n in SPLITS}
    problems = {split: [(p.question, p.answer) for p in rows] for split, rows in problems.items()}
    prompt = load_prompt("r1_zero")
    world = World(
        "laptop", str(model_path()), problems, {"r1_zero": ("r1_zero", prompt.template, ("</answer>",))}
    )
    calls, gold_of, real = [], world.gold_of(prompt.template), TransformersSampler.generate

    def generate(self, prompts, params, n=1):
        call = Call(list(prompts), params, n, copy_of(self.model))
        groups = real(self, prompts, params, n)
        call.lines = [[read(c, gold_of[p]) for c in group] for p, group in zip(prompts, groups, strict=True)]
        calls.append(call)
        completions = sum(groups, [])
        assert max(len(c.token_ids) for c in completions) == params.max_tokens
        with torch.no_grad():
            exact = score(self.model, completions, params.temperature)
        for log_probs, entropies, c in zip(*exact, completions, strict=True):
            assert c.log_probs == pytest.approx(log_probs.tolist(), abs=1e-4)
            assert c.entropies == pytest.approx(entropies.tolist(), abs=1e-4)
        return groups

    monkeypatch.setattr(TransformersSampler, "generate", generate)
    values = ODD | dict(max_tokens=45, n_steps=3, lr=1e-3)
    case = Case("grpo", entropies=True)
    run = start(world, case, values, "r1_zero", tmp_path / "run", None)
    metrics = check_run(run, calls, case, values, world, "r1_zero", tolerance=1e-4)
    assert 0 < metrics.truncated_share.mean() < 1 and metrics.rows_used.sum() > 0


SPLITS = [("train", "train", ODD["n_train"]), ("test", "validation", ODD["n_val_final"])]


def read(completion, gold):
    """The line behind a response that nobody wrote beforehand."""
    text, ids = completion.text, completion.token_ids
    reward, well_formed, _ = r1_zero_reward_fn(text, gold).values()
    answer = text.rpartition("<answer>")[2].removesuffix("</answer>") if well_formed else ""
    ended = ids[-1] == 1 or text.endswith("</answer>")
    kind = "right" if reward else "wrong" if well_formed else "free" if ended else "cut"
    return Line(kind, answer.strip(), completion)
