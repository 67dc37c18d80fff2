"""Prompts: exact text, filling that never breaks, and prompt, reward and stop kept together."""

import json

import pytest
from tiny_model import chat_tokenizer

from rlkit.tasks.prompts import Prompt, load_prompt, prompt_names
from rlkit.tokenization import encode_prompts

AWKWARD = [
    "Set {x} and {question}?",
    "50% of {} is {0}?",
    r"\frac{1}{2} \1 \g<0>",
    "{{a}}",
    "",
    "line\nbreak",
]


def fault(folder, name):
    rows = map(json.loads, (folder / "faults.jsonl").read_text(encoding="utf-8").splitlines())
    return next(row for row in rows if row["id"] == name)


def test_the_three_prompts_exactly():
    assert prompt_names() == ["chat", "question_only", "r1_zero", "r1_zero_three_shot"]
    assert load_prompt("question_only").fill("Why?") == r"Why? Please put your final answer within \boxed{}."
    assert load_prompt("r1_zero").fill("Why?") == (
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. "
        "The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with "
        "the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> "
        "</answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        "User: Why?\nAssistant: <think>"
    )


def test_three_shot_is_the_zero_shot_prompt_with_three_right_examples():
    zero, three = load_prompt("r1_zero").fill("Why?"), load_prompt("r1_zero_three_shot").fill("Why?")
    head, tail = zero.split("User:")
    assert three.startswith(head + "User:") and three.endswith("User:" + tail)
    examples = three[len(head) : -len("User:" + tail)].split("User: ")[1:]
    assert len(examples) == 3
    for example in examples:
        question, response = example.split("\nAssistant: <think>")
        assert question.endswith("?") and response.endswith(" </answer>\n")
        work, answer = response.split(" </think> <answer> ")
        last_equation = work.rstrip(".").split(". ")[-1]
        left, _, right = last_equation.partition(" = ")
        a, op, b = left.split()[-3:]
        assert int(right.split()[0]) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op]
        assert answer == f"{right.split()[0]} </answer>\n"


@pytest.mark.parametrize("question", AWKWARD)
@pytest.mark.parametrize("name", ["question_only", "r1_zero", "r1_zero_three_shot"])
def test_any_question_goes_in_unchanged(name, question):
    before, after = load_prompt(name).template.split("{question}")
    assert load_prompt(name).fill(question) == before + question + after


def test_doubled_braces_and_literal_braces_both_work(shared_cases):
    case = fault(shared_cases, "B067")
    prompt = Prompt("t", case["input"]["template"], "question_only")
    assert prompt.fill(case["input"]["question"]) == case["expected"]["prompt"]
    literal = Prompt("t", case["input"]["template"].replace("{{}}", "{}"), "question_only")
    assert literal.fill(case["input"]["question"]) == case["expected"]["prompt"]


def test_nested_literal_braces_stay():
    rest = r" \frac{\sqrt{2}}{\boxed{}}"
    assert Prompt("t", "{question}" + rest, "question_only").fill("Q") == "Q" + rest


def test_doubled_braces_are_read_as_str_format_reads_them():
    template = "Put it in \\boxed{{}}.\n{question} {{}}"
    assert Prompt("t", template, "question_only").fill("Q") == template.format(question="Q")


@pytest.mark.parametrize(
    "name, reward, stop",
    [
        ("question_only", "question_only", ()),
        ("r1_zero", "r1_zero", ("</answer>",)),
        ("r1_zero_three_shot", "r1_zero", ("</answer>",)),
    ],
)
def test_prompt_reward_and_stop_are_one_record(name, reward, stop):
    prompt = load_prompt(name)
    assert (prompt.name, prompt.reward, prompt.stop) == (name, reward, stop)
    assert prompt.reward_fn.__name__ == f"{reward}_reward_fn"


def test_each_prompt_s_own_reward_reads_its_responses(shared_cases):
    case = fault(shared_cases, "B066")
    response, gold = case["input"]["response"], case["input"]["gold"]
    for name in ("question_only", "r1_zero"):
        assert load_prompt(name).reward_fn(response, gold)["reward"] == case["expected"][f"{name}_reward"]


def test_a_prompt_file_works_wherever_a_name_does(tmp_path):
    path = tmp_path / "mine.prompt"
    path.write_text("Solve: {question}\nThink, then write <answer> n </answer>.\n", encoding="utf-8")
    prompt = load_prompt(path)
    assert prompt == load_prompt(str(path))
    assert (prompt.name, prompt.reward, prompt.stop) == ("mine", "r1_zero", ("</answer>",))
    assert prompt.fill("Q") == "Solve: Q\nThink, then write <answer> n </answer>."
    assert load_prompt(path, reward="question_only").stop == ()
    path.write_text("{question}")
    assert load_prompt(path).reward == "question_only"
    assert load_prompt(prompt) is prompt


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ValueError, match="prompt: got 'r1_zer0'.*did you mean 'r1_zero'"):
        load_prompt("r1_zer0")
    with pytest.raises(ValueError, match="prompt: got .*no_such_file.txt"):
        load_prompt(tmp_path / "no_such_file.txt")
    with pytest.raises(ValueError, match="template: 't' has no {question}"):
        Prompt("t", "Solve it", "r1_zero")
    with pytest.raises(ValueError, match="reward: got 'boxed'"):
        Prompt("t", "{question}", "boxed")
    with pytest.raises(ValueError, match="question: got int 3"):
        load_prompt("r1_zero").fill(3)


@pytest.mark.parametrize(
    "value, message",
    [
        ("x" * 100_000, "100002 characters"),
        ("a\0b", "a text file"),
        (7, "expected one of"),
        (None, "expected one of"),
        ("/", "is a folder"),
        ("Solve {question}", "a template of your own goes into a file"),
    ],
)
def test_what_names_no_prompt_is_one_short_error(value, message):
    with pytest.raises(ValueError, match=f"^prompt: got .*{message}") as error:
        load_prompt(value)
    assert len(str(error.value)) < 400


def test_a_binary_file_is_no_prompt(tmp_path):
    (tmp_path / "model.bin").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match="^prompt: got .*model.bin', which is not UTF-8 text"):
        load_prompt(tmp_path / "model.bin")


def test_a_chat_goes_through_the_tokenizers_own_template():
    prompt, tokenizer = load_prompt("chat"), chat_tokenizer(bos=True)
    assert (prompt.reward, prompt.stop) == ("r1_zero", ("</answer>",))
    with pytest.raises(ValueError, match="^prompt: 'chat' is a chat, expected .for_tokenizer"):
        prompt.fill("Why?")
    system = prompt.template.split("\n")[0]
    assert system.endswith("</think> <answer> answer here </answer>")
    asked = prompt.for_tokenizer(tokenizer).fill("Why {x}?")
    assert asked == (
        f"<s><|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nWhy {{x}}?<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )
    (ids,) = encode_prompts([asked], tokenizer)
    assert ids.count(tokenizer.bos_token_id) == 1
    tokenizer.chat_template = (  # Gemma's has no system turn
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<u>{{ messages[0]['content'] }}</u>"
    )
    assert prompt.for_tokenizer(tokenizer).fill("Why?") == f"<u>{system}\n\nWhy?</u><think>"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="^prompt: 'chat' needs a tokenizer with a chat template"):
        prompt.for_tokenizer(tokenizer)
    assert load_prompt("r1_zero").for_tokenizer(tokenizer) == load_prompt("r1_zero")
