"""How good is a model at a set of problems: accuracy with its standard error, and what stands behind it."""

from dataclasses import dataclass, field
from functools import partial

import pandas as pd
import torch

from rlkit.samplers.base import Sampler, SamplingParams
from rlkit.support.arguments import check_count
from rlkit.support.stats import mean_se, pass_at_k
from rlkit.support.text import visible
from rlkit.tasks.problems import Problem
from rlkit.tasks.prompts import Prompt
from rlkit.tasks.rewards import REWARD_KEYS, grade_responses, truths_for

pd.set_option("display.html.use_mathjax", False)  # "$5 and $6" in a response is no formula


@dataclass(frozen=True)
class Evaluation:
    """The result of ``evaluate``. Shares are from 0 to 1, over all samples of all problems.

    accuracy, accuracy_se: mean reward, and its standard error over problems (their means are independent).
    format_rate: share of well-formed responses. response_length: mean tokens. truncated_share: cut at
        max_tokens.
    counts: responses by (format_reward, answer_reward): {(1, 1): ..., (1, 0): ..., (0, 0): ...}.
    by_steps: accuracy, accuracy_se, n_problems for each number of solution steps (empty if unknown).
    pass_at_k: {k: unbiased estimate}, k = 1, 2, 4, ... up to the samples per problem.
    rows: a DataFrame with one response a row: problem, sample, question, gold, n_steps, prompt, response,
        reward, format_reward, answer_reward, length (tokens), finish_reason, and reward_<key> for
        each further key under which every response has a number.
    """

    n_problems: int
    n_samples: int
    accuracy: float
    accuracy_se: float
    format_rate: float
    response_length: float
    truncated_share: float
    counts: dict[tuple[int, int], int]
    by_steps: pd.DataFrame
    pass_at_k: dict[int, float]
    rows: pd.DataFrame = field(repr=False)

    def examples(self, format_reward: int, answer_reward: int, n: int = 10) -> pd.DataFrame:
        """The first ``n`` responses of one category, to read: is the parser or the model wrong?"""
        chosen = (self.rows.format_reward == format_reward) & (self.rows.answer_reward == answer_reward)
        return self.rows.loc[chosen, ["question", "response", "gold"]].head(n).map(visible)


def evaluate(
    sampler: Sampler,
    problems: list[Problem],
    prompt: Prompt,
    *,
    max_tokens: int,
    n_samples: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    fast: bool = True,
    reward_fn=None,
    **sampling,
) -> Evaluation:
    """Sample ``n_samples`` responses to each problem and grade them.

    prompt: how questions are asked, when a response stops and, unless ``reward_fn(response, gold)`` is given
        (or ``f(response, problem)``, see ``truths_for``),
        how it is graded. fast=False grades leniently (sentences, labels, markdown), for audits; see
        ``rlkit.tasks.grading``.
    temperature 0 is greedy; ``sampling`` is for the other fields of ``SamplingParams`` (top_p, top_k, ...).
    The same seed and weights give the same responses.
    """
    if not problems:
        raise ValueError("problems: got none, expected at least one problem")
    check_count("n_samples", n_samples)
    options, grade = {"fast": fast} if reward_fn is None else {}, reward_fn or prompt.reward_fn
    sampling |= {"temperature": temperature, "stop": tuple(prompt.stop), "seed": seed}
    prompt = prompt.for_tokenizer(getattr(sampler, "tokenizer", None))
    texts = [prompt.fill(problem.question) for problem in problems]
    groups = sampler.generate(texts, SamplingParams(max_tokens=max_tokens, **sampling), n_samples)
    responses = [completion.text for completions in groups for completion in completions]
    truths = [t for t, completions in zip(truths_for(grade, problems), groups) for _ in completions]
    graded = grade_responses(partial(grade, **options), responses, truths, torch.float64)
    graded = {name: graded["reward"] for name in REWARD_KEYS} | graded
    rewards = (dict(zip(graded, values)) for values in zip(*(column.tolist() for column in graded.values())))
    rows = []
    for i, (problem, text, completions) in enumerate(zip(problems, texts, groups)):
        asked = {
            "question": problem.question,
            "gold": problem.answer,
            "n_steps": problem.n_steps,
            "prompt": text,
        }
        for j, completion in enumerate(completions):
            ending = {"length": len(completion.token_ids), "finish_reason": completion.finish_reason}
            row = {"problem": i, "sample": j, **asked, "response": completion.text}
            rows.append(row | next(rewards) | ending)
    return summarize(pd.DataFrame(rows))


def summarize(rows: pd.DataFrame) -> Evaluation:
    """The ``Evaluation`` of graded responses (the ``rows`` of another one, or some of them)."""
    problems = rows.assign(right=rows.reward >= 1).groupby("problem")
    rewards, right, n = problems.reward.mean(), problems.right.sum(), problems.size()
    accuracy, accuracy_se = mean_se(rewards)
    pairs = list(zip(rows.format_reward >= 1, rows.answer_reward >= 1))
    steps = rewards.groupby(problems.n_steps.first().dropna().astype(int))
    by_steps = {step: (*mean_se(group), len(group)) for step, group in steps}
    powers = [2**i for i in range(int(min(n)).bit_length())]
    return Evaluation(
        n_problems=len(rewards),
        n_samples=int(min(n)),
        accuracy=accuracy,
        accuracy_se=accuracy_se,
        format_rate=float(rows.format_reward.mean()),
        response_length=float(rows.length.mean()),
        truncated_share=float((rows.finish_reason == "length").mean()),
        counts={key: pairs.count(key) for key in ((1, 1), (1, 0), (0, 0))},
        by_steps=pd.DataFrame.from_dict(by_steps, "index", columns=["accuracy", "accuracy_se", "n_problems"]),
        pass_at_k={k: mean_se([pass_at_k(m, c, k) for m, c in zip(n, right)])[0] for k in powers},
        rows=rows,
    )
