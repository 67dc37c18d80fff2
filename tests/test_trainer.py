"""The loop: order and alignment by construction, metrics by hand, on a tiny random model."""

import math
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import SIZES, chat_tokenizer, save_tiny_model, share_of_lower_case
from transformers import LlamaConfig, LlamaForCausalLM

from rlkit import trainer
from rlkit.algorithms import ALGORITHMS
from rlkit.batch import RolloutBatch
from rlkit.jobs.config import Config
from rlkit.jobs.loop import prompts_of_step, train_batches
from rlkit.jobs.metrics import TIMES
from rlkit.jobs.runs import load_run
from rlkit.jobs.watch import Watch
from rlkit.samplers import TransformersSampler, make_sampler
from rlkit.support.models import load_model
from rlkit.support.running import stream
from rlkit.tasks.problems import load_problems
from rlkit.trainer import train


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def short_prompt(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompt") / "short.prompt"
    path.write_text("Q: {question}\nA:")
    return str(path)


@pytest.fixture
def tiny(base, short_prompt, tmp_path):
    def make(**values):
        defaults = dict(
            model=base,
            prompt=short_prompt,
            n_train=16,
            n_val=4,
            n_val_final=6,
            n_steps=2,
            eval_every=1,
            rollout_batch_size=12,
            group_size=4,
            gradient_accumulation_steps=3,
            max_tokens=8,
            lr=1e-2,
            rollouts_every=1,
            checkpoint_every=0,
            run_dir=str(tmp_path / f"run{len(list(tmp_path.iterdir()))}"),
        )
        return Config(**defaults | values)

    return make


# ---- order


def test_every_problem_once_an_epoch_and_never_twice_in_a_batch():
    problems = list(range(10))
    batches = [prompts_of_step(problems, 3, step, seed=1) for step in range(1, 7)]  # 3 batches an epoch
    first, second = sum(batches[:3], []), sum(batches[3:], [])
    assert len(set(first)) == len(set(second)) == 9 and first != second
    assert batches == [prompts_of_step(problems, 3, step, seed=1) for step in range(1, 7)]
    assert prompts_of_step(problems, 3, 1, seed=2) != batches[0]


def test_seeds_differ_by_step_and_purpose_and_stay():
    seeds = {
        stream(seed, step, what) for seed in range(3) for step in range(50) for what in ("rollout", "shuffle")
    }
    assert len(seeds) == 300 and all(0 <= s < 2**31 for s in seeds)
    assert stream(0, 1, "rollout") == stream(0, 1, "rollout")


def test_train_batches_cover_the_rollouts_once():
    assert train_batches(6, 6, seed=0) == [[0, 1, 2, 3, 4, 5]]
    shuffled = train_batches(12, 4, seed=0)
    assert [len(b) for b in shuffled] == [4, 4, 4] and sorted(sum(shuffled, [])) == list(range(12))
    assert sum(shuffled, []) != list(range(12)) and shuffled == train_batches(12, 4, seed=0)


def test_each_row_gets_the_advantage_of_its_group_wherever_it_stands():
    """Rewards 1, 0, 0 of one group and 0.5, 0.25, 0 of the other, not side by side."""
    ids = torch.ones(6, 2, dtype=torch.long)
    batch = RolloutBatch(ids, ids, ids.bool(), groups=torch.tensor([1, 0, 0, 1, 1, 0]))
    rewards = torch.tensor([0.5, 0.0, 1.0, 0.0, 0.25, 0.0])
    row = trainer.advantages_of(batch, rewards, ALGORITHMS["drgrpo"], 1e-6)
    torch.testing.assert_close(batch.advantages, torch.tensor([0.25, -1 / 3, 2 / 3, -0.25, 0, -1 / 3]))
    counts = {"groups_all_right": 0, "groups_all_wrong": 0, "groups_mixed": 2}
    assert row == counts | {"pass_at_k": 0.5}


# ---- what a run writes


def test_metrics_agree_with_the_rollouts_written_beside_them(tiny, base):
    ends, given = {1, *range(50, 80)}, []  # a random model seldom draws <eos> alone

    class Recording(TransformersSampler):
        def generate(self, prompts, params, n=1):
            groups = super().generate(prompts, params, n)
            given.extend([sum(groups, [])] if n == 4 else [])
            return groups

    run = train(
        tiny(), sampler=Recording(*load_model(base), eos_token_ids=list(ends)), reward_fn=share_of_lower_case
    )
    metrics, rollouts = run.metrics.set_index("step"), run.rollouts
    assert metrics.index.tolist() == [0, 1, 2] and run.finished
    for step in (1, 2):
        rows = rollouts[(rollouts.step == step) & (rollouts.split == "train")]
        assert len(rows) == 12 and rows.groupby("group").size().tolist() == [4, 4, 4]
        row = metrics.loc[step]
        assert row.reward == pytest.approx(rows.reward.mean(), abs=1e-6)
        assert row.format_reward == pytest.approx(rows.format_reward.mean(), abs=1e-6)
        assert row.response_length == pytest.approx(rows.length.mean())
        cut = [completion.token_ids[-1] not in ends for completion in given[step - 1]]
        assert row.truncated_share == pytest.approx(np.mean(cut)) and 0 < np.mean(cut) < 1
        assert rows.finish_reason.tolist() == ["length" if c else "stop" for c in cut]
        for _, group in rows.groupby("group"):  # reward 1 is reached by no random text
            expected = (group.reward - group.reward.mean()) / (group.reward.std() + 1e-6)
            assert np.allclose(group.advantage, expected, atol=1e-4)
        assert row.rows_used == (rows.advantage != 0).sum() and row.optimizer_steps == 1
        assert row.groups_all_right + row.groups_all_wrong + row.groups_mixed == 3
    assert metrics.val_n.tolist() == [4, 4, 6] and math.isnan(metrics.reward[0])
    assert (rollouts.split == "validation").sum() == 4 + 4 + 6
    assert all(math.isfinite(v) for v in metrics.loc[1].drop(labels="tis_share", errors="ignore"))
    model, _ = load_model(run.path)  # the final weights, moved by two steps
    before, _ = load_model(run.config["model"])
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters()))


def test_lengths_of_right_and_wrong_responses_are_logged_apart(tiny):
    """Reward 1 for a response with an even number of characters: the same texts split by hand."""
    run = train(tiny(), reward_fn=even)
    metrics, rollouts = run.metrics.set_index("step"), run.rollouts
    assert {"response_length_right", "response_length_wrong"} <= set(metrics.columns)
    for (step, split), both in rollouts.groupby(["step", "split"]):
        name = "response_length" if split == "train" else "val_length"
        for key, rows in (("right", both[both.reward == 1]), ("wrong", both[both.reward == 0])):
            logged, found = metrics.loc[step].get(f"{name}_{key}", math.nan), list(rows.length)
            expected = sum(found) / len(found) if found else math.nan
            assert logged == pytest.approx(expected, nan_ok=True)


def even(response, truth):
    return {"reward": float(len(response) % 2 == 0), "format_reward": 1.0, "answer_reward": 0.0}


def test_the_seed_decides_everything_but_times(tiny):
    drop = [*TIMES]
    a, b, c = (train(tiny(seed=seed), reward_fn=share_of_lower_case).metrics for seed in (0, 0, 1))
    assert a.drop(columns=drop, errors="ignore").equals(b.drop(columns=drop, errors="ignore"))
    assert not a.reward.equals(c.reward)


def test_a_run_leaves_threads_and_random_states_alone(tiny):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    before = torch.get_num_threads()
    train(tiny(n_steps=1, threads=2), reward_fn=share_of_lower_case)
    assert torch.get_num_threads() == before and torch.equal(torch.rand(1), expected)


# ---- on-policy and off-policy


def test_on_policy_ratio_is_1_and_the_gap_stays_flat_at_lr_0(tiny):
    metrics = train(tiny(n_steps=3, lr=0.0, n_val=0), reward_fn=share_of_lower_case).metrics
    assert metrics.step.tolist() == [1, 2, 3]
    assert metrics.ratio_min.tolist() == pytest.approx([1] * 3, abs=1e-4)
    assert metrics.ratio_max.tolist() == pytest.approx([1] * 3, abs=1e-4)
    assert (
        metrics.logprob_gap_max.max() < 1e-4 and (metrics.logprob_gap_mean <= metrics.logprob_gap_max).all()
    )


def test_on_policy_clipping_starts_at_ratio_1_and_equals_the_plain_gradient(tiny):
    clipped = replace(ALGORITHMS["grpo"], name="clipped", importance_reweighting_method="grpo", cliprange=0.2)
    one = train(tiny(n_steps=1), algorithm=clipped, reward_fn=share_of_lower_case).metrics.iloc[-1]
    plain = train(tiny(n_steps=1), reward_fn=share_of_lower_case).metrics.iloc[-1]
    assert one.clip_fraction == 0 and one.ratio_max == pytest.approx(1, abs=1e-5)
    assert one.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    "algo", ["offpolicy_naive", "offpolicy_noclip", "offpolicy_clip", "offpolicy_gspo", "cispo"]
)
def test_off_policy_takes_several_aligned_steps(tiny, algo, monkeypatch):
    calls, real = [], trainer.train_step

    def spy(*args, **kwargs):
        calls.append((args, kwargs, real(*args, **kwargs)))
        return calls[-1][2]

    monkeypatch.setattr(trainer, "train_step", spy)
    run = train(
        tiny(algo=algo, n_steps=1, train_batch_size=3, gradient_accumulation_steps=1, n_val=0),
        reward_fn=share_of_lower_case,
    )
    row = run.metrics.iloc[-1]
    assert len(calls) == 4 and row.optimizer_steps == 4
    advantages = [args[2].advantages for args, _, _ in calls]
    assert sorted(torch.cat(advantages).tolist()) == pytest.approx(sorted(run.rollouts.advantage), abs=1e-6)
    first = calls[0][2][1]
    assert first["ratio_min"] == pytest.approx(1, abs=1e-4) and first["ratio_max"] == pytest.approx(
        1, abs=1e-4
    )
    assert max(row.ratio_max - 1, 1 - row.ratio_min) > 1e-3  # later steps move away
    if algo == "offpolicy_gspo":
        assert row.clip_fraction > 0
    assert row.clip_fraction == pytest.approx(row.clip_fraction_low + row.clip_fraction_high)


def test_truncated_importance_sampling_caps_the_engines_ratio(tiny, base):
    class Skewed:
        """Reports log-probs as an engine would whose every second token is off by log 4."""

        def __init__(self):
            self.inner = make_sampler("transformers", *load_model(base))

        def generate(self, prompts, params, n=1):
            groups = self.inner.generate(prompts, params, n)
            for completion in (c for group in groups for c in group):
                completion.log_probs = [
                    lp - (math.log(4) if i % 2 else 0) for i, lp in enumerate(completion.log_probs)
                ]
            return groups

        def sync_weights(self, model, step=None):
            self.inner.sync_weights(model, step)

        def close(self):
            raise AssertionError("a sampler that was given is not the trainer's to close")

    plain = train(tiny(n_steps=1, n_val=0), sampler=Skewed(), reward_fn=share_of_lower_case).metrics.iloc[-1]
    run = train(tiny(n_steps=1, n_val=0, tis_cap=2.0), sampler=Skewed(), reward_fn=share_of_lower_case)
    capped, lengths = run.metrics.iloc[-1], run.rollouts.length
    odd = (lengths // 2).sum() / lengths.sum()
    assert capped.logprob_gap_max == pytest.approx(math.log(4), abs=1e-4)
    assert capped.logprob_gap_mean == pytest.approx(odd * math.log(4), abs=1e-4)
    assert plain.logprob_gap_mean == pytest.approx(
        capped.logprob_gap_mean, abs=1e-4
    )  # from the train step itself
    assert capped.tis_share == pytest.approx(odd, abs=1e-6)
    naive = train(
        tiny(n_steps=1, n_val=0, algo="offpolicy_naive", train_batch_size=6),
        sampler=Skewed(),
        reward_fn=share_of_lower_case,
    ).metrics.iloc[-1]  # of its first train batch
    assert naive.logprob_gap_max == pytest.approx(math.log(4), abs=1e-4) and naive.optimizer_steps > 1
    assert capped.grad_norm != pytest.approx(plain.grad_norm, rel=1e-2)


def test_two_steps_with_autocast_and_with_bfloat16_weights(tiny):
    for values in (dict(autocast=True), dict(dtype="bfloat16")):
        metrics = train(tiny(n_steps=2, n_val=0, **values), reward_fn=share_of_lower_case).metrics
        assert metrics.loss.notna().all() and (metrics.grad_norm > 0).all()
        assert 0 < metrics.logprob_gap_max.max() < 0.3


@pytest.mark.parametrize("architecture, pad", [("llama", None), ("qwen2", "<eos>"), ("gpt2", None)])
def test_other_architectures_train(tiny, tmp_path, architecture, pad):
    folder = save_tiny_model(tmp_path / architecture, architecture, pad)
    metrics = train(tiny(model=str(folder), n_steps=2, n_val=0), reward_fn=share_of_lower_case).metrics
    assert metrics.logprob_gap_max.max() < 1e-3 and (metrics.grad_norm > 0).all()


def test_it_learns(tiny):
    """Ten steps double the share of lower-case letters, whatever the model was before."""
    config = tiny(
        n_steps=10, rollout_batch_size=64, group_size=8, gradient_accumulation_steps=1, n_val=0, lr=2e-2
    )
    metrics = train(config, reward_fn=share_of_lower_case).metrics
    assert metrics.reward.iloc[-1] > 2 * metrics.reward.iloc[0]


# ---- what is refused, warned about, left out


def test_a_model_of_ones_own_is_trained_in_place(tiny, base):
    model, tokenizer = load_model(base)
    before = model.get_output_embeddings().weight.clone()
    train(tiny(n_steps=1, n_val=0), model=model, tokenizer=tokenizer, reward_fn=share_of_lower_case)
    assert not torch.equal(before, model.get_output_embeddings().weight)
    with pytest.raises(ValueError, match="model, tokenizer"):
        train(tiny(), model=model)


def test_a_dry_run_says_what_would_be_done_and_touches_nothing(tiny, capsys, tmp_path):
    assert train(tiny(dry_run=True)) is None
    out = capsys.readouterr().out
    assert "nothing stands in the way" in out and not list(tmp_path.iterdir())


def test_a_sink_that_is_not_installed_is_refused_before_anything_else(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("rlkit.jobs.sinks.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="^sink: got 'wandb', but wandb is not installed"):
        train(tiny(sink="wandb"))
    assert not list(tmp_path.iterdir())


def test_a_sink_gets_every_row_and_the_responses_of_an_evaluation(tiny, monkeypatch):
    seen = []

    class Recorder:
        def log(self, row, step, rollouts):
            seen.append((step, row["step"], [r["split"] for r in rollouts]))

        def close(self):
            seen.append("closed")

    def opened(name, folder, first_step):
        seen.append((folder.path.name, first_step))
        return Recorder()

    monkeypatch.setattr(trainer, "open_sink", opened)
    config = tiny(eval_every=0, checkpoint_every=1)
    train(config, reward_fn=share_of_lower_case)
    evaluated = [(0, 0, ["validation"] * 4), (1, 1, []), (2, 2, ["validation"] * 6), "closed"]
    assert seen == [(Path(config.run_dir).name, 0), *evaluated]
    train(replace(config, n_steps=3, resume=True), reward_fn=share_of_lower_case)
    assert seen[5:] == [(Path(config.run_dir).name, 3), (3, 3, ["validation"] * 6), "closed"]


@pytest.mark.parametrize("fault", ["raise ConnectionError", "time.sleep(1e6)"])
def test_a_broken_tracker_changes_no_number_of_a_run(tiny, tmp_path, monkeypatch, fault, capsys):
    (tmp_path / "packages").mkdir()
    code = f"import time\nclass Settings:\n    def __init__(self, **v): pass\ndef init(**options): {fault}\n"
    (tmp_path / "packages" / "wandb.py").write_text(code)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("rlkit.jobs.sinks.find_spec", lambda name: True)
    monkeypatch.setattr("rlkit.jobs.sinks.CLOSE_SECONDS", 2)
    plain, tracked = (train(tiny(sink=sink), reward_fn=share_of_lower_case) for sink in ("none", "wandb"))
    assert tracked.finished and tracked.metrics.reward.equals(plain.metrics.reward)
    assert tracked.metrics.val_reward.equals(plain.metrics.val_reward)
    out = capsys.readouterr().out
    assert out.count("warning: wandb: ") == 1 and "wandb: 3 of 3 rows dropped" in out


def test_too_little_memory_is_said_before_the_model_loads(tiny, monkeypatch):
    monkeypatch.setattr("rlkit.jobs.planning.free_memory", lambda device: 10**4)
    monkeypatch.setattr(trainer, "load_model", None)
    with pytest.raises(ValueError, match="memory: needs about .* MB on cpu, 0 MB free: try gradient_accum"):
        train(tiny())


def test_an_error_leaves_a_run_that_can_go_on(tiny, tmp_path):
    def failing(response, ground_truth):
        raise RuntimeError("reward server gone")

    config = tiny(n_steps=1)
    with pytest.raises(RuntimeError, match="reward server gone"):
        train(config, reward_fn=failing)
    with pytest.raises(ValueError, match="resume: .*reward_fn .there '.*failing, sha256"):
        train(replace(config, resume=True), reward_fn=share_of_lower_case)
    run = train(replace(config, resume=True, allow_changes=True), reward_fn=share_of_lower_case)
    assert run.finished and run.metrics.step.tolist() == [0, 1]
    assert "reward_fn (there" in run.config["resumed"][0]["changes"][0]


def row(**values):
    nothing = {
        "rows_used": 0,
        "groups_identical": 0,
        "groups_all_right": 0,
        "reward": 0.0,
        "format_reward": 0.125,
    }
    return nothing | values


def test_the_watch_warns_after_20_empty_steps_and_again_and_never_before():
    said = []
    watch = Watch(said.append)
    for step in range(1, 20):
        watch(step, row(), 4)
    assert said == []  # 15-30 such steps are usual at a success rate of 1/1000
    watch(20, row(), 4)
    assert len(said) == 1 and "20 steps" in said[0] and "well-formed 0.125" in said[0]
    watch(21, row(rows_used=8), 4)
    for step in range(22, 42):
        watch(step, row(groups_all_right=4, reward=1.0), 4)
    assert len(said) == 2 and "every reward was 1" in said[1]


def test_the_watch_reports_groups_of_one_repeated_text():
    said = []
    watch = Watch(said.append)
    for step in range(1, 6):
        watch(step, row(rows_used=1, groups_identical=3), 4)
    assert len(said) == 1 and "3 of 4" in said[0] and "seed" in said[0]


def test_the_watch_reports_a_sampler_that_is_off():
    said = []
    watch = Watch(said.append)
    for step in range(1, 23):
        watch(step, row(rows_used=1, logprob_gap_mean=0.03 if step == 1 else 0.5), 4)
    assert (
        len(said) == 2
        and said[0].startswith("warning: step 2:")
        and "0.50 nats" in said[0]
        and "step 22" in said[1]
    )
    said.clear()  # few tokens far off, as beyond a window
    Watch(said.append)(1, row(rows_used=1, logprob_gap_mean=0.02, logprob_gap_max=12.6), 4)
    for cause in ("12.60 at most", "old weights", "temperature", "dtype", "architecture"):
        assert cause in said[0]
    Watch(said.append)(1, row(rows_used=1, logprob_gap_mean=0.02, logprob_gap_max=1.0), 4)
    assert len(said) == 1


def test_weights_stay_where_they_are_without_a_gradient(tiny, base):
    """AdamW's default weight decay of 0.01 would shrink them."""
    run = train(tiny(n_steps=1, n_val=0), reward_fn=lambda response, gold: {"reward": 0.0})
    after, _ = load_model(run.path)
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), load_model(base)[0].parameters()))
    assert load_run(run.path).metrics.iloc[-1].rows_used == 0


def test_prompts_come_from_the_train_split(tiny):
    rollouts = train(tiny(n_steps=1), reward_fn=share_of_lower_case).rollouts
    train_set = {f"Q: {p.question}\nA:" for p in load_problems("laptop", "train", 16)}
    val_set = {f"Q: {p.question}\nA:" for p in load_problems("laptop", "validation", 6)}
    assert set(rollouts[rollouts.split == "train"].prompt) <= train_set
    assert set(rollouts[rollouts.split == "validation"].prompt) == val_set


def test_the_sampler_gets_the_weights_once_per_update(tiny, base):
    model, tokenizer = load_model(base)
    inner, log = make_sampler("transformers", model, tokenizer), []

    class Watching:
        def generate(self, prompts, params, n=1):
            log.append(("generate", n, params.seed))
            return inner.generate(prompts, params, n)

        def sync_weights(self, model, step=None):
            log.append(("sync", step))

        def close(self):
            pass

    train(
        tiny(n_steps=3, eval_every=2),
        model=model,
        tokenizer=tokenizer,
        sampler=Watching(),
        reward_fn=share_of_lower_case,
    )
    assert [entry[:2] for entry in log] == [
        ("sync", 0),
        ("generate", 1),
        ("generate", 4),
        ("sync", 2),
        ("generate", 4),
        ("sync", 2),
        ("generate", 1),
        ("generate", 4),
        ("sync", 3),
        ("generate", 1),
    ]
    seeds = [entry[2] for entry in log if entry[0] == "generate"]
    assert len(set(seeds)) == len(seeds)  # a fixed seed would repeat its samples


def test_no_last_evaluation(tiny):
    """n_val_final=0: evaluations on the way only, and the run finishes."""
    run = train(tiny(n_val=4, n_val_final=0, n_steps=2, eval_every=1), reward_fn=share_of_lower_case)
    assert run.finished and run.metrics.set_index("step").val_n.dropna().index.tolist() == [0, 1]


def test_a_callable_object_as_a_part_is_recorded_by_its_class(tiny):
    class Half(torch.nn.Module):
        def forward(self, rewards):
            return rewards.mean(1, keepdim=True) / 2

    mine = replace(ALGORITHMS["drgrpo"], name="mine", baseline=Half())
    run = train(tiny(n_steps=1, n_val=0), algorithm=mine, reward_fn=share_of_lower_case)
    assert run.config["algorithm"]["baseline"].split(", sha256 ")[0].endswith("Half")


def test_a_chat_model_with_a_beginning_of_text(tiny, tmp_path):
    """The tokenizer's own template and its BOS, once, in what is sampled from; the run says so."""
    tokenizer = chat_tokenizer(bos=True)
    config = LlamaConfig(**SIZES | {"vocab_size": len(tokenizer)}, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    seen = []

    class Watching(TransformersSampler):
        def generate(self, prompts, params, n=1):
            groups = super().generate(prompts, params, n)
            seen.extend(c.prompt_token_ids for group in groups for c in group)
            return groups

    model, loaded = load_model(tmp_path / "chat")
    given = dict(model=model, tokenizer=loaded, sampler=Watching(model, loaded))
    run = train(tiny(n_steps=1, prompt="chat"), reward_fn=share_of_lower_case, **given)
    assert run.config["prompts_open_with"] == [tokenizer.bos_token_id]
    assert all(ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id for ids in seen)
    assert run.rollouts.iloc[0].prompt.startswith("<s><|im_start|>system\nFirst think about the question")
    with pytest.raises(ValueError, match="prompt: 'chat' needs a tokenizer with a chat template"):
        train(tiny(n_steps=1, prompt="chat"))


@pytest.mark.parametrize(
    "given, said",
    [
        ({"config": None}, "config: got None, expected a Config"),
        ({"config": {"n_steps": 1}}, "config: got {'n_steps': 1}, expected a Config"),
        ({"sampler": "vllm"}, "sampler: got 'vllm', expected an object with generate"),
        ({"reward_fn": "r1_zero"}, "reward_fn: got 'r1_zero', expected a function"),
        ({"val_reward_fn": 1.0}, "val_reward_fn: got 1.0, expected a function"),
    ],
)
def test_train_refuses_what_is_not_of_its_kind(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        train(**{"config": Config()} | given)
