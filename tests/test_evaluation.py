"""Evaluation on a scripted sampler: every number worked out by hand."""

import pandas as pd
import pytest

from rlkit.jobs.tables import paired_table
from rlkit.samplers import Completion
from rlkit.tasks.evaluation import evaluate, summarize
from rlkit.tasks.problems import Problem
from rlkit.tasks.prompts import load_prompt

RIGHT, WRONG, BAD = " t </think> <answer> 7 </answer>", " t </think> <answer> 8 </answer>", "seven"
PROBLEMS = [Problem("a?", "7", 1), Problem("b?", "7", 1), Problem("c?", "7", 2), Problem("d?", "7", 3)]


class Scripted:
    """Gives the listed responses; a token per character, cut off at 6."""

    def __init__(self, texts):
        self.texts, self.calls = texts, []

    def generate(self, prompts, params, n=1):
        self.calls.append((prompts, params, n))
        return [
            [Completion(text, list(range(len(text))), "length" if text == BAD else "stop") for text in row]
            for row in self.texts
        ]


def test_counts_accuracy_and_standard_error():
    sampler = Scripted([[RIGHT], [WRONG], [BAD], [RIGHT]])
    found = evaluate(sampler, PROBLEMS, load_prompt("r1_zero"), max_tokens=64, seed=5)
    assert found.accuracy == 0.5 and found.accuracy_se == pytest.approx(
        (1 / 3) ** 0.5 / 2
    )  # s^2 = 4 x 1/4 / 3
    assert found.counts == {(1, 1): 2, (1, 0): 1, (0, 0): 1}
    assert (found.format_rate, found.truncated_share) == (0.75, 0.25)
    assert found.response_length == pytest.approx((len(RIGHT) * 2 + len(WRONG) + 5) / 4)
    assert found.by_steps.accuracy.to_dict() == {1: 0.5, 2: 0.0, 3: 1.0}
    assert found.by_steps.n_problems.to_dict() == {1: 2, 2: 1, 3: 1}
    prompts, params, n = sampler.calls[0]
    assert prompts[0].endswith("User: a?\nAssistant: <think>") and n == 1
    assert (params.stop, params.seed, params.max_tokens, params.temperature) == (("</answer>",), 5, 64, 1.0)
    assert found.examples(1, 0).response.tolist() == [WRONG] and found.examples(0, 0).question.tolist() == [
        "c?"
    ]


def test_several_samples_per_problem():
    sampler = Scripted([[RIGHT, BAD, BAD, BAD], [RIGHT, RIGHT, WRONG, WRONG]])
    found = evaluate(sampler, PROBLEMS[:2], load_prompt("r1_zero"), max_tokens=8, n_samples=4)
    assert found.accuracy == pytest.approx(3 / 8) and found.accuracy_se == pytest.approx(
        1 / 8
    )  # means 1/4 and 1/2
    # pass@2: 1 - C(3,2)/C(4,2) = 1/2 and 1 - C(2,2)/C(4,2) = 5/6
    assert found.pass_at_k == {1: pytest.approx(3 / 8), 2: pytest.approx((1 / 2 + 5 / 6) / 2), 4: 1.0}
    assert summarize(found.rows).pass_at_k == found.pass_at_k


def test_the_prompts_reward_comes_with_it_and_fast_goes_through():
    sentence = " t </think> <answer> The answer is 7. </answer>"
    prompt = load_prompt("r1_zero")
    assert evaluate(Scripted([[sentence]]), PROBLEMS[:1], prompt, max_tokens=8).accuracy == 0.0
    assert evaluate(Scripted([[sentence]]), PROBLEMS[:1], prompt, max_tokens=8, fast=False).accuracy == 1.0
    boxed = Scripted([[r"so \boxed{7}"]])
    assert evaluate(boxed, PROBLEMS[:1], load_prompt("question_only"), max_tokens=8).accuracy == 1.0
    assert boxed.calls[0][1].stop == ()
    own = evaluate(
        Scripted([[BAD]]), PROBLEMS[:1], prompt, max_tokens=8, reward_fn=lambda r, g: {"reward": 0.5}
    )
    assert own.accuracy == 0.5


def test_refuses_nothing_to_do():
    with pytest.raises(ValueError, match="^problems"):
        evaluate(Scripted([]), [], load_prompt("r1_zero"), max_tokens=8)
    with pytest.raises(ValueError, match="^n_samples"):
        evaluate(Scripted([]), PROBLEMS, load_prompt("r1_zero"), max_tokens=8, n_samples=0)


def test_two_models_are_compared_question_by_question():
    def answered(*rewards):
        rows = [(i, 0, f"q{i}", "1", 1, "", "", r, r, r, 5, "stop") for i, r in enumerate(rewards)]
        names = "problem sample question gold n_steps prompt response reward format_reward answer_reward"
        return summarize(pd.DataFrame(rows, columns=[*names.split(), "length", "finish_reason"]))

    a, b = answered(1.0, 1.0, 1.0, 0.0, 1.0), answered(1.0, 0.0, 0.0, 0.0, 0.0)
    table = paired_table({"p": a}, {"p": b})
    # differences 0 1 1 0 1: mean .6, sd .5477, t(.975, 4) = 2.7764: .6 +- .6801; McNemar 2 * (1/2)^3 = .25
    assert table.loc["p"].tolist() == [0.8, 0.2, 0.6, -0.08, 1.28, 3, 0, 0.25]
    with pytest.raises(ValueError, match="others: the questions of 'p' are not the same in both"):
        paired_table({"p": a}, {"p": answered(1.0, 0.0, 0.0, 0.0)})
