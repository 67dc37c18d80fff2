"""Problems, rewards and columns of one's own, through load_problems, evaluate and train."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rlkit import Completion, Config, Problem, evaluate, load_problems, load_prompt, train
from rlkit.jobs.loop import rollouts
from rlkit.jobs.record import problems_hash
from rlkit.laptop import model_path
from rlkit.tasks.problems import gold_of
from rlkit.tasks.rewards import grade_responses, truths_for


def write(folder, name, rows):
    text = "\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    (folder / name).write_bytes(b"\xef\xbb\xbf" + text.encode())  # as Windows' editors save it


def test_other_columns_numbers_byte_order_marks_and_a_validation_file(tmp_path):
    write(
        tmp_path, "train.jsonl", [{"q": "Wie groß?", "a": 42}, "", {"q": "and", "a": "3 + 4 = 7 #### 7,000"}]
    )
    write(tmp_path, "validation.jsonl", [{"q": "set", "a": " (1, 2) "}, {"q": "half", "a": 4.5}])
    columns = {"question_column": "q", "answer_column": "a"}
    found = load_problems(tmp_path, "train", **columns)
    assert [(p.question, p.answer) for p in found] == [("Wie groß?", "42"), ("and", "7000")]
    found = load_problems(tmp_path, "validation", **columns)
    assert [(p.question, p.answer) for p in found] == [("set", "(1, 2)"), ("half", "4.5")]
    assert [gold_of(v) for v in (42.0, -3, "x #### 5 #### 6")] == ["42", "-3", "6"]
    assert gold_of(10**400) == "1" + "0" * 400  # more than a float can hold


@pytest.mark.parametrize(
    "row, said",
    [
        ({"q": "fine", "b": "1"}, "'a', its columns are q, b"),
        ({"q": 5, "a": "1"}, "question: got 5"),
        ({"q": "fine", "a": None}, "answer: got None"),
        ({"q": "fine", "a": " "}, "answer: got ' '"),
        ({"q": "fine", "a": True}, "answer: got True"),
        ({"q": "fine", "a": "so ####"}, "answer: 'so ####'"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, said):
    write(tmp_path, "train.jsonl", [{"q": "fine", "a": "1"}, "", "", row])
    with pytest.raises(ValueError) as caught:
        load_problems(tmp_path, "train", question_column="q", answer_column="a")
    text = str(caught.value)
    assert f"{tmp_path}/train.jsonl line 4: expected a text in column 'q' and an answer in 'a'" in text
    assert said in text


def test_a_reward_sees_the_problem_where_it_asks_for_it():
    problems = [Problem("a", "1", metadata={"k": 5}), Problem("b", "2")]
    assert truths_for(lambda response, problem: None, problems) == problems
    assert truths_for(lambda response, ground_truth: None, problems) == ["1", "2"]
    assert truths_for(max, problems) == ["1", "2"]  # a builtin without a signature
    assert problems[0] == Problem("a", "1") and len({*problems, Problem("a", "1")}) == 2


def test_further_numbers_of_a_reward_come_under_their_own_names():
    def reward(response, truth):
        return {"reward": 1.0, "short": len(response) < 3, "why": "text", "points": len(response)}

    rows = grade_responses(reward, ["ab", "abcd"], ["", ""])
    assert {name: values.tolist() for name, values in rows.items()} == {
        "reward": [1, 1],
        "reward_short": [1, 0],
        "reward_points": [2, 4],
    }
    with pytest.raises(ValueError, match="reward_fn: 'points' of a response is nan"):
        grade_responses(lambda r, t: {"reward": 1.0, "points": float("nan")}, ["a"], [""])


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)])
def test_a_further_number_may_be_numpys_or_torchs(value):
    rows = grade_responses(lambda r, t: {"reward": 1.0, "half": value}, ["a", "b"], ["", ""])
    assert rows["reward_half"].tolist() == [0.5, 0.5]


SUMS = [
    Problem(f"What is {a} plus {b}?", str(a + b), metadata={"a": a}) for a in range(1, 5) for b in range(1, 5)
]
SMALL = dict(n_steps=2, rollout_batch_size=16, n_val=4, n_val_final=4, eval_every=0, checkpoint_every=1)


def test_a_run_on_problems_of_ones_own(tmp_path):
    seen = []

    def reward(response, problem):
        seen.append(problem)
        return {"reward": float(problem.answer in response), "first": float(problem.metadata["a"])}

    def judge(response, problem):
        return {"reward": 1.0 if problem.metadata["a"] == 1 else 0.0}

    config = Config(run_dir=str(tmp_path / "run"), **SMALL)
    run = train(config, reward_fn=reward, val_reward_fn=judge, problems=SUMS, val_problems=SUMS[2:6])
    assert len(seen) == 32 and all(problem in SUMS for problem in seen)
    rollouts = run.rollouts[run.rollouts.split == "train"]
    for _, row in rollouts.iterrows():
        problem = next(p for p in SUMS if p.question in row.prompt)
        assert row.gold == problem.answer and row.reward_first == problem.metadata["a"]
        assert row.reward == float(problem.answer in row.response)
    by_step = rollouts.groupby("step").reward_first.mean()
    assert run.metrics.reward_first.dropna().tolist() == pytest.approx([by_step[1], by_step[2]])
    assert run.metrics.val_reward.iloc[-1] == 0.5  # SUMS[2:4] have a = 1, SUMS[4:6] a = 2
    assert run.config["inputs"]["training problems"].startswith("16, sha256 ")

    more = Config(run_dir=str(tmp_path / "run"), resume=True, **SMALL | {"n_steps": 3})
    own = dict(reward_fn=reward, val_reward_fn=judge)
    moved = dict(problems=[*SUMS, SUMS[2]], val_problems=SUMS[3:6])  # one from validation to training
    for other in (dict(problems=SUMS[::-1], val_problems=SUMS[2:6]), moved, {}):
        with pytest.raises(ValueError, match=r"resume: .*training problems \(there '16, sha256"):
            train(more, **other, **own)
    assert train(more, problems=SUMS, val_problems=SUMS[2:6], **own).finished


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(problems=SUMS), "val_problems: got None, expected a list of Problem"),
        (dict(val_problems=SUMS), "problems: got None, expected a list of Problem"),
        (dict(problems=["What?"], val_problems=SUMS), "problems: got .*expected a list of Problem"),
        (dict(problems=SUMS[:1], val_problems=SUMS), "problems: got 1, expected at least 2"),
        (dict(problems=[*SUMS, Problem("2 + 5", 7)], val_problems=SUMS), r"problems\[16\]: got .*as texts"),  # type: ignore
    ],
)
def test_problems_that_no_run_can_use_are_refused(tmp_path, given, said):
    with pytest.raises(ValueError, match=said):
        train(Config(run_dir=str(tmp_path / "run"), **SMALL), **given)
    assert not (tmp_path / "run").exists()


class Echo:
    def generate(self, prompts, params, n):
        return [[Completion(f"{i}.{j}", [1], "stop") for j in range(n)] for i in range(len(prompts))]


def judged(reward_fn, **options):
    return evaluate(
        Echo(), SUMS[:8], load_prompt("question_only"), max_tokens=3, reward_fn=reward_fn, **options
    )


def test_evaluate_takes_a_reward_that_sees_the_problem():
    found = judged(lambda response, problem: {"reward": float(problem.metadata["a"] == 2)})
    assert found.accuracy == 0.5


def test_evaluate_gives_each_response_its_own_reward():
    def reward(response, problem):
        return {"reward": int(problem.answer) + float(response) / 10, "format_reward": 0.1}

    rows = judged(reward, n_samples=3).rows
    wanted = [int(SUMS[i].answer) + float(f"{i}.{j}") / 10 for i in range(8) for j in range(3)]
    assert rows.reward.tolist() == wanted == rows.answer_reward.tolist()  # float64, to the last digit
    assert rows.format_reward.tolist() == [0.1] * 24


@pytest.mark.parametrize(
    "given, said",
    [
        (0.5, "expected a dict with the key 'reward'"),
        ({"score": 1}, "expected a dict with the key 'reward'"),
        ({"reward": float("nan")}, "'reward' of a response is nan"),
        ({"reward": "1"}, "'reward' of a response is '1'"),
    ],
)
def test_evaluate_says_what_is_wrong_with_a_reward(given, said):
    with pytest.raises(ValueError, match=f"reward_fn: .*{said}"):
        judged(lambda response, problem: given)


def test_readmes_task_of_reasoning_gym_trains_by_its_own_scorer(repo, tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    blocks = re.findall(r"```python\n(.*?)```", (repo / "README.md").read_text(), re.S)
    code = next(block for block in blocks if "reasoning_gym" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 16
    names, small = {}, "n_steps=2, n_val=8, n_val_final=8, rollout_batch_size=32"
    monkeypatch.chdir(tmp_path)
    exec(code.replace("n_steps=100", small), names)
    first = names["problems"][0]
    right, wrong = (f"so <think> </think> <answer> {a} </answer>" for a in (first.answer, "no"))
    assert names["scored"](right, first) == {"reward": 1.0, "score": 1.0}
    assert names["scored"](wrong, first)["reward"] == 0.0 == names["scored"]("nothing", first)["reward"]
    rollouts = names["run"].rollouts
    known = {problem.question: problem.answer for problem in names["problems"]}
    asked = [next(q for q in known if f"User: {q}\n" in prompt) for prompt in rollouts.prompt]
    assert rollouts.gold.tolist() == [known[question] for question in asked]
    assert "reward_score" in names["run"].metrics


def test_a_run_and_its_plan_read_the_columns(tmp_path):
    rows = [{"question": "not this", "answer": "0", "q": p.question, "a": p.answer} for p in SUMS]
    for name in ("train.jsonl", "validation.jsonl"):
        write(tmp_path, name, rows)
    columns = dict(question_column="q", answer_column="a", dataset=str(tmp_path), n_train=16)
    config = Config(run_dir=str(tmp_path / "run"), rollouts_every=1, **SMALL | {"n_steps": 1}, **columns)
    known = {f"User: {p.question}\n": p.answer for p in SUMS}
    rollouts = train(config).rollouts
    asked = [next(gold for line, gold in known.items() if line in prompt) for prompt in rollouts.prompt]
    assert rollouts.gold.tolist() == asked and set(rollouts.split) == {"train", "validation"}


MATH = [  # as MATH writes them: (problem, solution, its gold, a right answer, a wrong one)
    ("Solve.", r"Thus $x \in \boxed{(0,5)}$.", "(0,5)", "(0, 5)", "0.5"),
    ("Add.", r"We get $1+1=\boxed{2}$, as $\boxed{2}>1$.", "2", "2", "3"),
    ("Divide.", r"So it is $\boxed{\dfrac{3}{4}}$.", r"\dfrac{3}{4}", r"\frac34", r"\frac43"),
    ("Roots?", r"The roots are $\boxed{-1, 3}$.", "-1, 3", "3, -1", "(-1, 3)"),
    ("How long?", r"It is $\boxed{5 \text{ cm}}$ long.", r"5 \text{ cm}", "5", r"5 \text{ m}"),
    ("Base?", r"That is $\boxed{2516_8}$.", "2516_8", "2516_{8}", "2516"),
    ("Simplify.", r"\[\boxed{\frac{\sqrt{2}}{2}}\]", r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", "0.7071"),
    ("Which?", r"So the answer is $\boxed{\text{(B)}}$.", r"\text{(B)}", "B", "b"),
]


@pytest.mark.parametrize("prompt", ["r1_zero", "question_only"])
def test_a_folder_like_math_end_to_end(tmp_path, prompt):
    """Columns problem and solution, golds in the last box: loaded, trained on, evaluated and graded."""
    rows = [{"problem": question, "solution": worked, "level": "Level 1"} for question, worked, *_ in MATH]
    for name in ("train.jsonl", "test.jsonl"):
        write(tmp_path, name, rows)
    columns = dict(question_column="problem", answer_column="solution")
    problems = load_problems(tmp_path, "validation", **columns)
    assert [p.answer for p in problems] == [gold for _, _, gold, *_ in MATH]

    values = SMALL | dict(n_steps=1, n_val=8, n_val_final=8, n_train=8, prompt=prompt, rollouts_every=1)
    run = train(Config(run_dir=str(tmp_path / "run"), dataset=str(tmp_path), **values, **columns))
    assert set(run.rollouts.gold) == {gold for _, _, gold, *_ in MATH} and run.metrics.step.tolist()[-1] == 1

    form = "so </think> <answer> %s </answer>" if prompt == "r1_zero" else r"so it is $\boxed{%s}$."

    class Answers:  # right on the even questions, wrong on the odd ones
        def generate(self, texts, params, n):
            answers = [row[3 + i % 2] for i, row in enumerate(MATH)]
            return [[Completion(form % answer, [1], "stop")] * n for answer in answers]

    evaluation = evaluate(Answers(), problems, load_prompt(prompt), max_tokens=8)
    assert evaluation.rows.reward.tolist() == [1, 0] * 4
    evaluation = evaluate(Answers(), problems[::-1], load_prompt(prompt), max_tokens=8)
    assert not evaluation.rows.reward.any()  # each answer belongs to its own question


@pytest.mark.parametrize("where", ["problems", "val_problems", "columns"])
def test_the_plan_counts_the_tokens_of_ones_own_problems(tmp_path, capsys, where):
    long = Problem("What is " + "1 plus " * 60 + "1?", "61")
    lists = {"problems": SUMS, "val_problems": SUMS} | ({where: [long, *SUMS]} if where != "columns" else {})
    values = SMALL | dict(dry_run=True, run_dir=str(tmp_path / "run"))
    if where == "columns":
        for name in ("train.jsonl", "test.jsonl"):
            write(tmp_path, name, [{"question": "short", "answer": 1, "q": long.question, "a": "61"}] * 4)
        lists, columns = {}, dict(question_column="q", answer_column="a")
        values |= dict(dataset=str(tmp_path), n_train=4) | columns
    train(Config(**values), **lists)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    longest = len(tokenizer(load_prompt("r1_zero").fill(long.question))["input_ids"])
    assert f", {longest} at most" in capsys.readouterr().out


def test_a_further_key_is_logged_where_every_response_has_a_number():
    """Whatever the order of the responses: what some lack says nothing about the batch, and ends no run."""
    given = [{"reward": 1.0, "steps": 3, "half": np.float32(0.5)}, {"reward": 0.0, "steps": None, "half": 1}]
    for rows in (given, given[::-1], [given[0], given[1] | {"steps": "none"}], [given[0], {**given[1]}]):
        found = grade_responses(lambda response, truth: truth, ["a", "b"], rows)
        assert {name: sorted(values.tolist()) for name, values in found.items()} == {
            "reward": [0, 1],
            "reward_half": [0.5, 1],
        }


def test_a_key_that_one_round_of_resampling_lacks_is_left_out():
    class Echo:
        def generate(self, prompts, params, n):
            return [[Completion(f"{prompt} {i}", [1], "stop") for i in range(n)] for prompt in prompts]

    def reward(response, problem):  # the first problem's group has all rewards equal, so it gives way
        first = {"early": 1.0} if problem in SUMS[:2] else {}
        return {"reward": float(problem != SUMS[0] and response.endswith("1")), "all": 2.0} | first

    config = Config(resamples=1, rollout_batch_size=4, group_size=2).resolved()
    prompt = load_prompt("question_only")
    kept, _, rewards, _ = rollouts(Echo(), SUMS[:2], SUMS[2:4], prompt, reward, config, step=1)
    assert kept == [SUMS[1], SUMS[2]]
    assert {name: values.tolist() for name, values in rewards.items()} == {
        "reward": [0, 1, 0, 1],
        "reward_all": [2, 2, 2, 2],
    }


def test_the_hash_of_problems_knows_where_a_question_ends():
    one, other = Problem("a", "b"), Problem("c", "d")
    assert problems_hash([one, other]) != problems_hash([Problem("a\0b\0c", "d")])
    assert problems_hash([one, other]) != problems_hash([other, one])


def test_validation_problems_come_from_their_own_file_before_the_test_set(tmp_path):
    write(tmp_path, "test.jsonl", [{"question": "t", "answer": 1}])
    assert load_problems(tmp_path, "validation")[0].question == "t"
    write(tmp_path, "validation.jsonl", [{"question": "v", "answer": 1}])
    assert [load_problems(tmp_path, split)[0].question for split in ("validation", "test")] == ["v", "t"]


def test_validation_rollouts_keep_the_further_numbers_too(tmp_path):
    def judge(response, problem):
        return {"reward": 0.0, "first": problem.metadata["a"], "why": "text"}

    config = Config(run_dir=str(tmp_path / "run"), **SMALL | {"n_steps": 1})
    run = train(config, problems=SUMS, val_problems=SUMS[2:6], val_reward_fn=judge)
    rows = run.rollouts[run.rollouts.split == "validation"]
    assert rows.reward_first.tolist() == [1, 1, 2, 2] * 2  # the base model's evaluation and the last one
    assert "reward_why" not in rows
