"""DAPO's parts, the KL penalty and the learning rate's schedules, each against values worked out by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from toys import grads_of_step

from rlkit import ALGORITHMS, Completion, Config, aggregate_loss_across_microbatch, train
from rlkit.jobs import loop
from rlkit.losses import bounds, compute_policy_gradient_loss, k3
from rlkit.tasks.problem import Problem


def test_a_pair_clips_each_side_by_its_own_bound():
    ratios = torch.tensor([[0.75, 0.85, 1.25, 1.3]])
    for advantage, expected in ((1.0, [0.75, 0.85, 1.25, 1.28]), (-1.0, [-0.8, -0.85, -1.25, -1.3])):
        found, seen = compute_policy_gradient_loss(
            torch.tensor([advantage]), ratios.log(), "grpo", torch.zeros(1, 4), (0.2, 0.28)
        )
        torch.testing.assert_close(-found[0], torch.tensor(expected))
        assert (seen["n_clipped_low"], seen["n_clipped_high"]) == ((0, 1) if advantage > 0 else (1, 0))
    assert bounds(0.2) == (0.8, 1.2) and bounds((0.2, 0.28)) == (0.8, 1.28)


@pytest.mark.parametrize("pair", [(0.2,), (0.2, 0.28, 0.3), (0.2, None), (-0.1, 0.2)])
def test_a_cliprange_that_is_no_pair_of_numbers_is_refused(pair):
    with pytest.raises(ValueError, match="cliprange: got"):
        compute_policy_gradient_loss(torch.ones(1), torch.zeros(1, 2), "grpo", torch.zeros(1, 2), pair)


def test_the_token_mean_weighs_every_token_alike():
    loss = torch.tensor([[6.0, 9.0, 9.0], [1.0, 2.0, 3.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    assert aggregate_loss_across_microbatch(loss, mask, "token").item() == 12 / 4  # sequence: (6 + 2) / 2
    assert aggregate_loss_across_microbatch(loss, mask, "token", 8).item() == 12 / 8


def test_the_token_mean_does_not_depend_on_the_microbatches():
    # a model whose log-prob of every token is its one weight w: the gradient is minus the mean advantage
    # over tokens, (1 x 1 + 3 x -1 + 2 x 1) / 6 with the row of advantage 0 counted in the divisor
    rows = dict(
        prompt_token_ids=[[1, 2]] * 4,
        response_token_ids=[[3], [3, 4, 3], [4, 4], [4] * 4],
        advantages=[1.0, -1.0, 1.0, 0.0],
        loss_normalization="token",
    )
    from toys import Bigram

    model = Bigram(6)
    whole = grads_of_step(model, gradient_accumulation_steps=1, **rows)
    for steps in (2, 3, 4):
        parts = grads_of_step(model, gradient_accumulation_steps=steps, **rows)
        assert parts[0].item() == pytest.approx(whole[0].item(), abs=1e-6)
        for name, gradient in whole[2].items():
            torch.testing.assert_close(parts[2][name], gradient, rtol=0, atol=1e-6)
    # the loss by hand, in float64: log-probs of a bigram model by softmax of its row for the token before
    logits = {name: p.detach().double() for name, p in model.named_parameters()}
    if len(logits) == 1:
        table = next(iter(logits.values())).log_softmax(-1)
        total = 0.0
        for prompt, response, a in zip(*[rows[k] for k in list(rows)[:3]]):
            for before, token in zip([prompt[-1], *response], response):
                total -= a * table[before, token].item()
        assert whole[0].item() == pytest.approx(total / 10, abs=1e-5)


def test_k3_and_its_gradient():
    log_p, ref = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True), torch.tensor([-3.0]).double()
    value = k3(log_p, ref)
    assert value.item() == pytest.approx(math.exp(-2) - 1 + 2)
    value.backward()
    assert log_p.grad.item() == pytest.approx(1 - math.exp(-2))  # 1 - ref / pi
    assert k3(torch.zeros(3), torch.zeros(3)).tolist() == [0.0] * 3


def test_k3s_expected_gradient_is_that_of_the_forward_kl():
    theta = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    pi = theta.softmax(0)
    (pi.detach() * k3(pi.log(), ref.log())).sum().backward()
    expected = pi.detach() - ref  # grad of sum ref log(ref / pi) in the logits
    torch.testing.assert_close(theta.grad, expected)


def test_a_step_with_a_kl_needs_the_reference():
    from toys import Bigram, batch_of_ids

    from rlkit import train_step

    model, batch = Bigram(6), batch_of_ids([[1]] * 2, [[2], [3]])
    batch.advantages = torch.zeros(2)
    with pytest.raises(ValueError, match="ref_log_probs: got None with a kl_coef"):
        train_step(
            model, torch.optim.SGD(model.parameters()), batch, replace(ALGORITHMS["grpo"], kl_coef=0.1)
        )


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ],
)
def test_the_learning_rate_rises_then_falls_to_zero_after_the_last_step(schedule, expected):
    config = Config(lr=0.1, n_steps=7, lr_warmup_steps=4, lr_schedule=schedule)
    found = [loop.learning_rate(config, step) / 0.1 for step in range(1, 8)]
    assert found == pytest.approx(expected)


# ---- dynamic sampling

TEXTS = {"silent": ["no", "no"], "mixed": ["yes", "no"], "all": ["yes", "yes"]}


class Recorder:
    def __init__(self):
        self.asked, self.seeds = [], []

    def generate(self, prompts, params, n):
        self.asked.append(list(prompts))
        self.seeds.append(params.seed)
        return [[Completion(t, [1], "stop", [-1.0], [1]) for t in TEXTS[p.split()[0]]] for p in prompts]


def sampled(resamples, kinds, others):
    sampler, prompt = Recorder(), SimpleNamespace(fill=lambda q: q, stop=())
    problems = [Problem(f"{kind} {i}", "yes") for i, kind in enumerate(kinds)]
    others = [Problem(f"{kind} {10 + i}", "yes") for i, kind in enumerate(others)]
    config = SimpleNamespace(resamples=resamples, group_size=2, max_tokens=4, temperature=1.0, seed=3)

    def reward(response, gold):
        return {"reward": float(response == gold)}

    found = loop.rollouts(sampler, problems, others, prompt, reward, config, 5)
    return sampler, [p.question for p in found[0]], found[1], found[2]["reward"].tolist(), found[3]


def test_groups_without_signal_give_way_to_other_prompts():
    sampler, questions, groups, rewards, asked = sampled(
        3, ["silent", "mixed", "all"], ["all", "mixed", "mixed", "mixed"]
    )
    assert sampler.asked == [["silent 0", "mixed 1", "all 2"], ["all 10", "mixed 11"], ["mixed 12"]]
    assert questions == ["mixed 1", "mixed 11", "mixed 12"] and rewards == [1, 0] * 3
    assert [[c.text for c in group] for group in groups] == [["yes", "no"]] * 3
    assert asked == {"prompts_asked": 6} and len(set(sampler.seeds)) == 3


def test_the_cap_keeps_what_the_last_round_gave():
    _, questions, _, rewards, asked = sampled(1, ["silent", "mixed"], ["all", "mixed"])
    assert questions == ["mixed 1", "all 10"] and rewards == [1, 0, 1, 1] and asked == {"prompts_asked": 3}
    assert sampled(2, ["silent", "silent"], ["mixed"])[1] == ["silent 0", "silent 1"]  # nothing left to ask
    sampler, questions, *_, asked = sampled(0, ["silent", "mixed"], ["mixed"])
    assert len(sampler.asked) == 1 and questions == ["silent 0", "mixed 1"] and asked == {}


def test_other_prompts_are_the_rest_in_an_order_of_the_step():
    problems = [Problem(str(i), "1") for i in range(20)]
    first = loop.other_prompts(problems, problems[:5], 1, 0)
    assert sorted(first, key=problems.index) == problems[5:]
    assert (
        first
        == loop.other_prompts(problems, problems[:5], 1, 0)
        != loop.other_prompts(problems, problems[:5], 2, 0)
    )


def test_a_dapo_run_resumes_to_the_same_numbers(tmp_path):
    values = dict(algo="dapo", rollout_batch_size=32, n_val=0, lr=5e-4, checkpoint_every=1, kl_coef=0.05)
    values |= dict(train_batch_size=16)
    whole = train(Config(n_steps=3, run_dir=str(tmp_path / "a"), **values))
    train(Config(n_steps=2, run_dir=str(tmp_path / "b"), **values))
    resumed = train(Config(n_steps=3, run_dir=str(tmp_path / "b"), resume=True, **values))
    names = [n for n in whole.metrics if not n.startswith(("time", "tokens_per"))]
    assert whole.metrics[names].equals(resumed.metrics[names])
    assert whole.metrics.kl.iloc[-1] > 0 and (whole.metrics.prompts_asked >= 4).all()
    with pytest.raises(ValueError, match=r"n_steps \(there 3, at whose end the learning rate is 0, now 4\)"):
        path = str(tmp_path / "c")
        train(Config(n_steps=3, run_dir=path, lr_schedule="linear", **values))
        train(Config(n_steps=4, run_dir=path, lr_schedule="linear", resume=True, **values))
