"""Exercises on prompts and grading. References are plain loops; the library's code is not called in them."""

from __future__ import annotations

import re

from rlkit.study.exercises.core import exercise
from rlkit.tasks import grading
from rlkit.tasks.problems import gsm8k_gold as library_gsm8k_gold
from rlkit.tasks.prompts import Prompt


@exercise(
    title="Fill a prompt template",
    difficulty=1,
    minutes=5,
    problem="prompting_baselines",
    notebook="01",
    reveals="rlkit.tasks.prompts:Prompt.fill",
    axes=(),
    solution=lambda template, question: str(Prompt("exercise", template, "question_only").fill(question)),
    cases=lambda: [
        ("a plain question", ("Q: {question}\nA:", "What is 2 + 3?")),
        ("braces in the template", (r"{question} Put it in \boxed{}.", "What is 2 + 3?")),
        ("braces in the question", ("Q: {question}\nA:", "Let S = {1, 2}. Is {question} a word?")),
        ("a percent sign and a backslash", ("Q: {question}\nA:", r"What is 50% of \frac{4}{2}?")),
        ("the slot twice", ("{question}\nAgain: {question}\nA:", "2 + 3?")),
        ("blanks around the question", ("Q:{question}A:", "  two \n")),
    ],
    hints=(
        "str.format gives a meaning to every brace. Which string method gives one to none?",
        "str.replace, or splitting the template at the slot and joining with the question.",
    ),
)
def fill_prompt(template: str, question: str) -> str:
    """The template with the question at every {question}; all other characters stay as they are."""
    out, i, slot = "", 0, "{question}"
    while i < len(template):
        if template[i : i + len(slot)] == slot:
            out, i = out + question, i + len(slot)
        else:
            out, i = out + template[i], i + 1
    return out


fill_prompt.mistake("str.format reads every brace as a slot", "fill_str_format")(
    lambda t, q: t.format(question=q)
)
fill_prompt.mistake("re.sub reads backslashes in the question as escapes", "fill_re_sub")(
    lambda t, q: re.sub(r"\{question\}", q, t)
)
fill_prompt.mistake("only the first slot is filled", "fill_first_slot")(
    lambda t, q: t.replace("{question}", q, 1)
)
fill_prompt.mistake("the question's own white space is stripped", "fill_stripped")(
    lambda t, q: t.replace("{question}", q.strip())
)
fill_prompt.mistake("% formatting reads the percent signs of the text", "fill_percent")(
    lambda t, q: t.replace("{question}", "%s") % tuple([q % ()] * t.count("{question}"))
)


@exercise(
    title="Find the last box",
    difficulty=2,
    minutes=10,
    problem="prompting_baselines",
    notebook="01",
    reveals="rlkit.tasks.grading:last_boxed",
    axes=(),
    may_return_none=True,
    solution=grading.last_boxed,
    cases=lambda: [
        ("a plain box", (r"so \boxed{72}.",)),
        ("nested braces", (r"\boxed{\frac{1}{2}} is it",)),
        ("two boxes, the last counts", (r"\boxed{71} no, \boxed{72}",)),
        ("no box", ("the answer is 72",)),
        ("a box that never closes", (r"\boxed{72",)),
        ("an empty box", (r"\boxed{}",)),
        ("braces after the box", (r"\boxed{3} and {4}",)),
    ],
    hints=(
        "A regular expression without recursion cannot count braces: walk through the text.",
        "Start behind the last '\\boxed{' with depth 1; '{' adds one, '}' takes one; at 0 you are done.",
    ),
)
def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}, its braces balanced; None without a box that closes."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, content = 1, ""
    for character in text[start + 7 :]:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return content
        content += character
    return None


@last_boxed.mistake("the search stops at the first closing brace")
def boxed_until_first_brace(text):
    found = re.findall(r"\\boxed\{(.*?)\}", text)
    return found[-1] if found else None


@last_boxed.mistake("the pattern is greedy and runs to the last brace of the text")
def boxed_greedy(text):
    found = re.search(r".*\\boxed\{(.*)\}", text)
    return found[1] if found else None


@last_boxed.mistake("the pattern is greedy: it runs from the first box to the last brace of the text")
def boxed_greedy_from_the_first(text):
    found = re.search(r"\\boxed\{(.*)\}", text)
    return found[1] if found else None


@last_boxed.mistake("the pattern is greedy, to the last brace of the text, and wants one character at least")
def boxed_greedy_and_not_empty(text):
    found = re.search(r"\\boxed\{(.+)\}", text)
    return found[1] if found else None


@last_boxed.mistake("the pattern allows no brace inside the box, and nested ones are never found")
def boxed_without_nesting(text):
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1] if found else None


@last_boxed.mistake("the first box is taken, not the last, and the search stops at the first closing brace")
def boxed_first_until_brace(text):
    found = re.search(r"\\boxed\{(.*?)\}", text)
    return found[1] if found else None


@last_boxed.mistake("the first box is taken, not the last")
def boxed_first(text):
    start = text.find("\\boxed{")
    return (
        None
        if start < 0
        else last_boxed.reference(
            text[: text.find("\\boxed{", start + 1)] if text.count("\\boxed{") > 1 else text
        )
    )


@last_boxed.mistake("a box that never closes still gives its beginning")
def boxed_unclosed(text):
    inside = last_boxed.reference(text)
    return text.rpartition("\\boxed{")[2] if inside is None and "\\boxed{" in text else inside


@last_boxed.mistake("an empty box counts as no box", name="boxed_empty_is_none")
def boxed_empty_is_none(text):
    return last_boxed.reference(text) or None


@exercise(
    title="Extract the answer of an r1_zero response",
    difficulty=2,
    minutes=10,
    problem="prompting_baselines",
    notebook="01",
    reveals="rlkit.tasks.grading:extract_answer",
    axes=(),
    may_return_none=True,
    solution=grading.extract_answer,
    observe=lambda attempt, response: _stripped(attempt(response)),
    cases=lambda: [
        ("well formed", (" 3 + 4 = 7 </think> <answer> 7 </answer>",)),
        ("two answers, the last counts", (" so </think> <answer> 6 </answer> wait <answer> 7 </answer>",)),
        ("no thinking ended", (" <answer> 7 </answer>",)),
        ("no space between the tags", (" so </think><answer> 7 </answer>",)),
        ("never closed", (" so </think> <answer> 7",)),
        ("cut off early", (" 3 + 4 is",)),
        ("closed only before the thinking ends", (" a </answer> b </think> <answer> 7",)),
        ("the last answer never closed", (" so </think> <answer> 6 </answer> wait <answer> 7",)),
    ],
    hints=(
        "The format has two parts: '</think> <answer>' with exactly one space, and a '</answer>' after it.",
        "Once the format is there, the answer is what follows the last '<answer>', up to the next "
        "'</answer>'.",
    ),
)
def extract_answer(response: str) -> str | None:
    """The text in the last answer tag; None unless '</think> <answer>' and a later '</answer>' are there."""
    start = response.find("</think> <answer>")
    if start < 0 or response.find("</answer>", start) < 0:
        return None
    opened = max(i for i in range(len(response)) if response.startswith("<answer>", i)) + len("<answer>")
    closed = response.find("</answer>", opened)
    return response[opened:closed].strip() if closed >= 0 else None


def _stripped(text):
    return text.strip() if isinstance(text, str) else text


@extract_answer.mistake("the first answer tag is taken, not the last")
def answer_first(response):
    whole = extract_answer.reference(response)
    return None if whole is None else response.partition("<answer>")[2].partition("</answer>")[0]


@extract_answer.mistake("the end of the thinking is not required")
def answer_without_think(response):
    if "<answer>" not in response or "</answer>" not in response.partition("<answer>")[2]:
        return None
    return response.rpartition("<answer>")[2].partition("</answer>")[0]


@extract_answer.mistake("any white space, or none, between the tags is accepted")
def answer_loose_space(response):
    found = re.search(r"</think>\s*<answer>", response)
    if not found or "</answer>" not in response[found.start() :]:
        return None
    return response.rpartition("<answer>")[2].partition("</answer>")[0]


@extract_answer.mistake("a tag that never closes still gives an answer")
def answer_unclosed(response):
    if "</think> <answer>" not in response:
        return None
    return response.rpartition("<answer>")[2].partition("</answer>")[0]


@extract_answer.mistake("the closing tag may stand before the opening one")
def answer_closed_before(response):
    if "</think> <answer>" not in response or "</answer>" not in response:
        return None
    return response.rpartition("<answer>")[2].partition("</answer>")[0]


@exercise(
    title="GSM8K's gold answer",
    difficulty=1,
    minutes=5,
    problem="prompting_baselines",
    notebook="01",
    reveals="rlkit.tasks.problems:gsm8k_gold",
    axes=(),
    solution=library_gsm8k_gold,
    cases=lambda: [
        ("a plain number", ("Half of 48 is 24. 48 + 24 = 72\n#### 72",)),
        ("a thousands comma", ("600 x 2 = <<600*2=1200>>1200\n#### 1,200",)),
        ("a sign", ("7 - 10\n#### -3",)),
        ("a big number", ("so\n#### 109,200,000",)),
        ("a decimal", ("#### 0.5 \n",)),
        ("hash marks inside the reasoning", ("use ## and #### once\n#### 5",)),
    ],
    hints="str.rpartition cuts at the last occurrence. What has to go afterwards?",
)
def gsm8k_gold(worked_answer: str) -> str:
    """The text after the last '####': no thousands commas, no blanks around it, the sign kept."""
    end = max(i for i in range(len(worked_answer)) if worked_answer.startswith("####", i)) + 4
    return "".join(c for c in worked_answer[end:] if c not in ", \n")


gsm8k_gold.mistake("the thousands comma stays, and '1,200' is not '1200'", "gold_with_comma")(
    lambda text: text.rpartition("####")[2].strip()
)
gsm8k_gold.mistake("the pattern knows no minus sign", "gold_without_sign")(
    lambda text: re.findall(r"[\d.]+", text.rpartition("####")[2].replace(",", ""))[0]
)
gsm8k_gold.mistake("the text is cut at the first '####'", "gold_first_mark")(
    lambda text: text.partition("####")[2].strip().replace(",", "")
)
gsm8k_gold.mistake("the number ends at its comma or point", "gold_first_digits")(
    lambda text: re.findall(r"-?\d+", text.rpartition("####")[2])[0]
)
gsm8k_gold.mistake("the reasoning is kept: every reward will be 0", "gold_whole_text")(
    lambda text: text.strip()
)
