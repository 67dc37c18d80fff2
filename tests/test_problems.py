"""Problems: GSM8K's golds read right, generated problems right, reproducible and split for good."""

import json
import re

import pytest

from rlkit.laptop.problems import TASKS, draw_story, generate_problems, split_of
from rlkit.tasks.problems import Problem, gsm8k_gold, load_gsm8k, load_problems

ROWS = [
    {
        "question": f"Question {i}?",
        "answer": f"Half of 4 is <<4/2=2>>2. 2+{i}=<<2+{i}={i + 2}>>{i + 2}\n#### {i + 2}",
    }
    for i in range(5)
]


@pytest.fixture
def folder(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8"
        )
    return tmp_path


def fault(folder, name):
    rows = map(json.loads, (folder / "faults.jsonl").read_text(encoding="utf-8").splitlines())
    return next(row for row in rows if row["id"] == name)


# ---- GSM8K


def test_gold_is_what_follows_the_mark(shared_cases):
    assert gsm8k_gold(fault(shared_cases, "B096")["input"]["gold"]) == "72"
    assert gsm8k_gold(fault(shared_cases, "B097")["input"]["raw"]) == "1200"
    assert gsm8k_gold(fault(shared_cases, "B098")["input"]["raw"]) == "-3"


@pytest.mark.parametrize(
    "worked, gold",
    [
        ("x #### 109,200,000", "109200000"),
        ("#### 0", "0"),
        ("a #### 1\n#### 2 ", "2"),
        ("3.5 #### 3.5", "3.5"),
        ("####-47", "-47"),
    ],
)
def test_gold_by_hand(worked, gold):
    assert gsm8k_gold(worked) == gold


@pytest.mark.parametrize("worked", ["", "the answer is 3", "3 ####", "3 #### ,"])
def test_no_gold_is_an_error(worked):
    with pytest.raises(ValueError, match="answer: .*####"):
        gsm8k_gold(worked)


def test_a_folder_of_jsonl(folder):
    problems = load_gsm8k(folder, "train")
    assert problems == [Problem(f"Question {i}?", str(i + 2), 2) for i in range(5)]
    assert load_problems(folder, "validation") == load_problems(str(folder), "test") == problems


def test_n_none_is_all_and_0_is_none(folder, shared_cases):
    case = fault(shared_cases, "B070")
    assert [len(load_gsm8k(folder, "train", n)) for n in case["input"]["max_examples"]] == case["expected"][
        "read"
    ]
    assert [len(load_problems("laptop", "train", n)) for n in (0, 1)] == [0, 1]


def test_the_real_files(gsm8k_dir):
    train, test = load_problems(gsm8k_dir, "train"), load_problems(gsm8k_dir, "validation")
    assert (len(train), len(test)) == (7473, 1319)
    assert [p.answer for p in train if p.answer.startswith("-")] == ["-7", "-47", "-12"]
    assert [p.answer for p in test if p.answer.startswith("-")] == ["-10", "-3"]
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", p.answer) for p in train + test)
    assert (train[0].answer, train[0].n_steps, test[0].answer) == ("72", 2, "18")


def test_a_hub_id_goes_through_datasets(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def fake(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert load_problems("openai/gsm8k", "validation", 2) == [
        Problem(f"Question {i}?", str(i + 2), 2) for i in (0, 1)
    ]
    load_problems("openai/gsm8k@v1/b", "train", 1)
    assert calls == [
        (("openai/gsm8k", "main"), {"split": "test", "revision": None}),
        (("openai/gsm8k", "main"), {"split": "train", "revision": "v1/b"}),
    ]


def test_what_is_wrong_is_said(folder):
    with pytest.raises(ValueError, match="split: got 'valid'"):
        load_problems(folder, "valid")
    with pytest.raises(ValueError, match="split: got 'test'"):
        load_problems("laptop", "test")
    with pytest.raises(ValueError, match="dataset: got 'labtop'.*'laptop'"):
        load_problems("labtop", "train")
    with pytest.raises(ValueError, match="dataset: got './no/such/folder'"):
        load_problems("./no/such/folder", "train")
    with pytest.raises(ValueError, match="n: got 6, but .* has 5"):
        load_problems(folder, "train", 6)
    for n in (-1, 2.0, True, "3"):
        with pytest.raises(ValueError, match="n: got .*whole number"):
            load_problems("laptop", "train", n)
    (folder / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"question": "Q?"}) + "\n")
    with pytest.raises(
        ValueError, match="train.jsonl line 2: expected a text in column 'question' and an answer"
    ):
        load_problems(folder, "train")
    (folder / "test.jsonl").unlink()
    with pytest.raises(ValueError, match="has no test.jsonl"):
        load_problems(folder, "validation")


# ---- the laptop's problems


def solve_by_reading(question):
    """The answer, from the words of the question, by a reader that shares no code with the writer."""
    *sentences, ask = re.findall(r"[^.?]+[.?]", question)
    owners = {}
    for s in sentences:
        numbers = [int(x) for x in re.findall(r"\d+", s)]
        words = s.strip().strip(".").split()
        name = words[1] if words[0] == "Then" else words[0]
        if "boxes" in s or "bags" in s:
            owners[name] = numbers[0] * numbers[1]
        elif "times" in s:
            owners[name] = numbers[0] * owners[words[-1]]
        elif words[1] == "gives" and words[2] in owners:  # X gives the owner some
            name = words[2]
            owners[name] += numbers[0]
        elif any(verb in words for verb in ("gives", "loses", "sells")):
            owners[name] = owners.get(name, 0) - numbers[0]  # of an aside's name only this is known
        elif "more" in words:
            owners[name] += numbers[0]
        else:
            owners[name] = numbers[0]
    (asked,) = [word for word in re.findall(r"[A-Z][a-z]+", ask) if word in owners]
    return owners[asked]


TASK_SPLITS = [(task, split) for task in TASKS for split in TASKS[task].splits]


@pytest.mark.parametrize("task, split", TASK_SPLITS)
def test_answers_are_right(task, split):
    for problem in generate_problems(1000, split, seed=3, task=task):
        assert str(solve_by_reading(problem.question)) == problem.answer, problem
        assert 1 <= int(problem.answer) <= 99
        assert problem.n_steps in {"laptop": (1, 2, 3), "laptop_long": (4, 5, 6, 7, 8)}[task]


@pytest.mark.parametrize("task", TASKS)
def test_splits_never_meet_whatever_the_seeds(task):
    drawn = {
        split: {p.question for seed in range(3) for p in generate_problems(800, split, seed, task)}
        for split in TASKS[task].splits
    }
    assert sum(map(len, drawn.values())) == len(set().union(*drawn.values()))
    for split, questions in drawn.items():
        assert {split_of(question, TASKS[task]) for question in questions} == {split}


def test_long_problems_steps_and_asides_are_counted_by_reading():
    """Every sentence but the first, the question and the asides (of a name met once) is one step."""
    sentences_aside = 0
    for problem in generate_problems(600, "tuning", task="laptop_long"):
        first, *sentences, _ = re.findall(r"[^.?]+[.?]", problem.question)
        names = re.findall(r"[A-Z][a-z]+", re.sub(r"\bThen\b", "", problem.question))
        asides = [
            s
            for s in sentences
            if names.count(s.split()[0]) == 1 and not re.search(r"times| gives (?!away)", s)
        ]
        groups = "boxes" in first or "bags" in first
        assert problem.n_steps == len(sentences) - len(asides) + groups, problem.question
        sentences_aside += len(asides)
    assert 0.5 < sentences_aside / 600 < 0.9  # 1 * .30 + 2 * .20 = .70
    assert len(load_problems("laptop_long", "tuning", 20)) == 20
    with pytest.raises(ValueError, match="split: got 'tuning', expected 'train' or 'validation'"):
        load_problems("laptop", "tuning")
    with pytest.raises(ValueError, match="task: got 'laptop_lang', expected 'laptop' or 'laptop_long'"):
        generate_problems(3, task="laptop_lang")


def test_problems_are_seeded_and_all_different():
    a = generate_problems(600, "train", 1)
    assert a == generate_problems(600, "train", 1) and a[:50] == generate_problems(50, "train", 1)
    assert a != generate_problems(600, "train", 2)
    assert len({p.question for p in a}) == 600
    assert [len(load_problems("laptop", split)) for split in ("train", "validation")] == [6400, 512]


def test_problems_vary():
    problems = generate_problems(2000, "train")
    steps = [sum(p.n_steps == k for p in problems) / 2000 for k in (1, 2, 3)]
    assert min(steps) > 0.15
    answers = [p.answer for p in problems]
    assert max(answers.count(a) for a in set(answers)) < 0.08 * 2000  # no constant guess gets far
    words = " ".join(p.question for p in problems)
    for word in "Tom Kim apples nuts finds buys gives loses sells times boxes bags".split():
        assert word in words


@pytest.mark.parametrize("task", TASKS)
def test_a_story_s_steps_chain(task):
    import random

    rng = random.Random(0)
    for _ in range(300):
        story = draw_story(rng, TASKS[task])
        for i, s in enumerate(story.steps):
            assert s.result == {"+": s.left + s.right, "-": s.left - s.right, "*": s.left * s.right}[s.op]
            if i:
                assert s.left == story.steps[i - 1].result
        assert story.start is None or story.steps[0].left == story.start


@pytest.mark.parametrize("value", ["a\0b", "x" * 5000, "a/b/c", "./nothing", None, 7, "x/" * 3000])
def test_an_absurd_dataset_is_one_short_error(value):
    with pytest.raises(ValueError, match="^dataset: got ") as error:
        load_problems(value, "train", 3)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "content, message", [(b'{"question": 1\n', "line 1 is not a JSON object"), (b"\xff\xfe", "UTF-8")]
)
def test_a_broken_data_file_is_named(tmp_path, content, message):
    (tmp_path / "train.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=f"^dataset: .*train.jsonl.*{message}"):
        load_problems(str(tmp_path), "train")
