"""The graders against verdicts settled by hand: those below, and the cases in tests/data."""

import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from fractions import Fraction

import pytest

from rlkit.tasks.grading import (
    answers_match,
    extract_answer,
    last_boxed,
    question_only_reward_fn,
    r1_zero_reward_fn,
)
from rlkit.tasks.grading.cleaning import clean
from rlkit.tasks.grading.lenient import read_sentence
from rlkit.tasks.grading.strict import read_quantity
from rlkit.tasks.grading.units import read_unit

REWARD_FNS = {"r1_zero": r1_zero_reward_fn, "question_only": question_only_reward_fn}

# gold -> answers; escapes where a character would not be seen
RIGHT = {
    "0": ["0"],
    "72": ["072"],
    "15": [
        "+15",
        "15.",
        "15.00",
        "15e0",
        "\uff11\uff15",
        "$ 15",
        "$15.00",
        "\\$15",
        "15 dollars",
        "15 bucks",
        "\xa515",
        "C$15",
        "A$15",
        "Rs 15",
        "USD 15",
        "15 EUR",
        "15 euros",
        "15 cents",
        "15\xa2",
        "$15/week",
        "$15 per hour",
        "$15 an hour",
        "$15 each",
        "$15 dollars",
        "15 US dollars",
        "\u20a915",
        "\u20b115",
        "\u20ba15",
        "15 pounds",
        "15 rupees",
        "\\text{\\$}15",
        "\\$15\\text{ dollars}",
        "$15$",
        "$$15$$",
        "\\textbf{15}",
        "\\text{15 dollars}",
        "$15$ dollars",
        "15\\$",
        "15 hours",
        "15 kg",
        "15kg",
        "15 m/s",
        "15 m/s^2",
        "15 cm^2",
        "15 ft^2",
        "15 square feet",
        "15 sq ft",
        "15 sq. ft.",
        "15 miles per hour",
        "15 miles per gallon",
        "15 people",
        "15 children",
        "15 mice",
        "15 oz",
        "15 lbs",
        "15 lbs.",
        "15\xb0",
        "15\xb0C",
        "15 \xb0F",
        "15 degrees Celsius",
        "15 m",
        "15m",
        "15 L",
        "15 slices of pizza",
        "15 red marbles",
        "15 cm\xb3",
        "15 minutes.",
        "15 days left",
        "15 apples in total",
        "15 mL",
        "15 km\xb2",
        "15 tickets each",
        "15 points",
        "15 calories per serving",
        "15 gigabytes",
        "15 MB",
        "15 years old",
        "15 inches",
        "15\\text{ cm}^2",
        "15 \\text{ m/s}",
        "15\\,\\text{kg}",
        "15\\;\\text{kg}",
        "15\\ \\text{kg}",
        "15\\mathrm{~kg}",
        "15 \\mathrm{kg}",
        "15\\%",
        "15\\text{%}",
        "15^{\\circ}\\text{C}",
        "\\mathrm{15}",
        "15\\quad\\text{books}",
        "\\displaystyle 15",
        "\\left(15\\right)",
        "15 \\text{ dollars per hour}",
        "15^\\circ",
        "15\\!",
        "15~",
        "{15}",
        "15 \\,",
        "15 \\text{ square units}",
        "15 \\text{units}^2",
        "x=15",
        "y = 15",
        "= 15",
        "USD$15",
        "USD 15.00",
        "US$ 15",
        "\\$\\,15",
        "\\text{USD } 15",
        "\\pounds 15",
        "15\\,\\mathrm{km/h}",
        "15\\,\\frac{\\text{km}}{\\text{h}}",
        "15\\,\\text{cm}^{3}",
        "\\underline{\\underline{15}}",
        "\\textcolor{red}{15}",
        "{\\bf 15}",
        "15\\text{.}",
        "15 \\checkmark",
        "15\\\\",
        "15 more apples",
        "15 \xb5g",
        "15\u5143",
        "15 sqft",
        "15 fl. oz.",
        "15 lb/in^2",
        "15 cm2",
        "15 kWh",
        "15 pairs of shoes",
        "15 US$",
        "$15 USD",
        "15 a day",
        "15 o'clock",
        "15 \xb0",
        "15\xb0F",
    ],
    "150": ["1.5E2"],
    "-8": ["\u22128", "\u20138", "negative 8", "-8.00", "Negative 8", "Minus 8"],
    "-15": ["-$15", "$-15"],
    "1250.5": ["\xa31,250.50"],
    "1250.50": ["$1,250.50"],
    "0.75": ["$0.75", "\\frac{3}{4}", "\\frac34", "3/4", "3 / 4", ".75", "7.5e-1"],
    "2000000": ["$2 million"],
    "2500000": ["$2.5 million"],
    "3000": ["3 thousand dollars"],
    "5000": ["5k"],
    "1500000000": ["1.5 billion"],
    "3.50": ["3 dollars and 50 cents"],
    "3.5": ["$3 and 50 cents", "3.50 dollars"],
    "25": ["25%", "25 \\%", "25 percent", "25 per cent", "25\\%", "$25\\%$"],
    "25%": ["25", "25%"],
    "12.5": ["12.5%"],
    "-25": ["-25%"],
    "4500": ["4,500", "4{,}500", "4\\,500", "4,500.00", "$4{,}500$", "4,\\!500", "4\\;500"],
    "4,500": ["4500"],
    "12345678": ["12,345,678", "12\\,345\\,678"],
    "2.5": ["2.5 hours", "2 and a half"],
    "0.5": ["1/2 cup", "\xbd"],
    "-0.75": ["-\\frac{3}{4}", "-3/4"],
    "-3/4": ["\\frac{-3}{4}"],
    "3/4": ["6/8", "0.75"],
    "2.25": ["2 1/4", "2\\frac{1}{4}", "2\xbc", "2 1/4 cups"],
    "9/4": ["2 \\frac{1}{4}"],
    "2\\frac{1}{4}": ["\\frac{9}{4}"],
    "7500": ["7.5e3", "7.5 \\times 10^3", "7.5 \xd7 10^3", "7.5*10^3", "7.5 x 10^{3}"],
    "-2.25": ["-2 1/4"],
    "9.0": ["9.0"],
    "(3, 4)": ["(3,4)"],
    "\\frac{1}{\\sqrt{3}}": ["\\frac{\\sqrt{3}}{3}"],
    "1+x": ["x+1"],
    "2\\pi": ["2\\pi", "2 \\pi"],
    "\\{2,1\\}": ["\\{1,2\\}"],
    "yes": ["Yes"],
    "Yes": ["yes."],
    "blue": ["blue", "\\text{blue}"],
    "(x-1)(x+1)": ["x^2-1"],
    "100000000000000000001": ["100000000000000000001"],
    "0.1": ["0.1"],
    " 15 ": ["15"],
    "$15": ["15"],
    "15 apples": ["15"],
    "15.0": ["15"],
    "1200": ["1'200"],
    "1450000": ["1.450.000"],
    "1200.5": ["1.200,50"],
    "7.5": ["7 and a half hours"],
    "3": ["3 left over"],
    "1.5": ["1 1/2 hours"],
    "600": ["\\frac{1,200}{2}", "1,200/2"],
    "1500000": ["1.5 million"],
    "200": ["2 hundred"],
}

# for lenient eyes: sentences, labels, markdown, arithmetic, equations; strict may miss them
RIGHT_WHEN_LENIENT = {
    "15": [
        "The answer is 15",
        "The answer is 15.",
        "The answer is: 15",
        "The final answer is 15",
        "Answer: 15",
        "Answer = 15",
        "**Answer:** 15",
        "**Answer: 15**",
        "Final answer: $15",
        "Final Answer: 15 apples",
        "So the answer is 15.",
        "Therefore, the answer is 15.",
        "The answer is $15$.",
        "The answer is \\(15\\).",
        "The answer is $\\boxed{15}$.",
        "total = 15",
        "Total: 15",
        "Total cost: $15",
        "10+5=15",
        "10 + 5 = 15",
        "10 + 5 = 15 apples",
        "$10 + $5 = $15",
        "3 x 5 = $15",
        "3 \xd7 5 = 15",
        "3*5=15",
        "30/2 = 15",
        "30 \xf7 2 = 15",
        "3 \\times 5 = 15",
        "x = 15 apples",
        "Tom has 15 apples.",
        "Tom has 15 apples left.",
        "She needs 15 more tickets.",
        "He earned $15 per hour.",
        "Natalia sold 15 clips altogether.",
        "There are 15 apples",
        "So there are 15 apples.",
        "They will need fifteen minutes",
        "15 (fifteen)",
        "fifteen",
        "**15**",
        "*15*",
        "__15__",
        "_15_",
        "`15`",
        '"15"',
        "'15'",
        "\u201c15\u201d",
        "[15]",
        "(15)",
        "{15}",
        "15;",
        "15:",
        "15,",
        "15 \u2713",
        "\u2705 15",
        "15 \U0001f389",
        "\U0001f449 15",
        "\\(15\\)",
        "\\[15\\]",
        "\\boxed{15\\%}",
        "\\boxed{15 \\text{ apples}}",
        "#### 15",
        "=> 15",
        "\u2192 15",
        "\u2248 15",
        "The answer is 15!",
        "15 is the answer",
        "15 is the final answer.",
        "Thus 15.",
        "Hence, 15 km",
        "It costs $15.",
        "The total is 15",
        "The result is 15",
        "Result: 15",
        "result = 15",
        "The 20 books were sold, so 15 remain",
        "The number of apples is 15",
        "They sold 15 in all.",
        "15 apples (10 + 5)",
        "10 plus 5 is 15",
        "10 plus 5 equals 15",
        "20 minus 5 equals 15",
        "20 minus 5 is 15.",
        "3 times 5 is 15",
        "A: 15",
        "Ans: 15",
        "ANSWER: 15",
        "Let x be the number. x = 15",
        "$x = 15$",
        "\\text{Total} = 15",
        "\\text{Answer: } 15",
        "Cost = \\$15",
        "$15",
        "15 total",
        "Total of 15",
        "a total of 15 apples",
        "The answer is x = 15",
        "The answer is 10 + 5 = 15",
        "He is 15 years old.",
        "15 people can fit.",
        "10 + 5",
        "2^4 - 1",
        "(2+3)*3",
        "\\sqrt{225}",
        "\\frac{30}{2}",
        "3 \\cdot 5",
        "15/1",
        "-(-15)",
        "It takes her 15 minutes because 10 + 5 = 15",
        "The answer is 15 because half of 30 is 15.",
        "The area is 15 cm^2.",
        "The area is 15 m\xb2",
        "The speed is 15 km/h.",
        "There are 15 t-shirts.",
        "exactly 15",
        "She has only 15 left.",
        "The answer is 15 clips, which is 10 + 5.",
        "10 + 5 = 15 \u2713",
        "So, x = 15.",
        "Thus, the total is 10 + 5 = 15 dollars.",
        "Maria has 15 stickers now.",
        "Ken earns \xa315 a day",
        "15 stickers remain",
        "Remaining: 15",
        "Profit = $15",
        "profit: 15%",
        "Number of stickers: 15",
        "The final result is 15 km.",
        "**Final Answer:** 15 km",
        "### Answer\n15",
        "\u2022 15",
        "(10 + 5) = 15",
        "3 * (4 + 1) = 15",
        "$3 \\times 5 = 15$",
        "\\[ 3 \\cdot 5 = 15 \\]",
        "$\\text{Total} = 15$",
        "30 - 15 = 15",
        "= 15 apples",
        "Equals 15",
        "That makes 15.",
    ],
    "1500": ["the answer is 1,500"],
    "72": [
        "48 clips in April and 24 in May, so 72 in total",
        "48 + 24 = 72, so she sold 72 clips.",
        "48/2 = 24 and 48+24 = 72",
        "48/2 = 24\n48+24 = 72",
        "Step 1: 48/2 = 24. Step 2: 48 + 24 = 72.",
        "She sold 48/2 = 24 clips in May.\nShe sold 48+24 = 72 clips altogether.\n#### 72",
        "Answer: 72 dollars ($48 + $24)",
    ],
    "18": ["Janet makes $18 every day."],
    "1250": ["She pays 1,250 dollars."],
    "-8": ["The answer is -8", "Answer: -8", "The answer is negative 8", "temperature = -8"],
    "0.5": ["The answer is 1/2", "The answer is \\frac{1}{2}"],
    "2.5": ["The answer is 2 1/2"],
    "0.75": ["The probability is 3/4."],
    "25": ["It is 25%.", "The answer is 25%"],
    "7500": ["The answer is 7.5e3"],
    "2": ["The answer is two"],
    "(3, 4)": ["The answer is (3, 4)"],
    "x+1": ["Answer: x+1"],
    "-15": ["- 15", "negative fifteen"],
    "1250.5": ["The total is $1,250.50."],
    "0": ["zero"],
    "15000": ["fifteen thousand"],
    "30": ["(10+5)*2 = 30 apples"],
}

WRONG = {
    "15": [
        "16",
        "1",
        "150",
        "1.5",
        "15.1",
        "14.999",
        "15.5",
        "-15",
        "5",
        "51",
        "0",
        "15.0001",
        ".15",
        "$15.50",
        "$-15",
        "$1.5",
        "$150",
        "1.5%",
        "150%",
        "15,01",
        "1,5",
        "15 thousand",
        "15k",
        "15M",
        "15 million",
        "15 hundred",
        "16 apples",
        "apples",
        "150 km",
        "15 squared",
        "15 halves",
        "15x",
        "15 x",
        "15y",
        "15pi",
        "15\\pi",
        "15\\sqrt{2}",
        "15^2",
        "15\xb2",
        "15th",
        "15i",
        "15 a 9",
        "15 h 5",
        "1 5",
        "1$5",
        "1%5",
        "15 and 5",
        "1 hour 15 minutes",
        "1/5",
        "1 and 5",
        "12 to 15",
        "15 to 20",
        "15-20",
        "12\u201315",
        "10-15",
        "not 15",
        "It is not 15",
        "15 or 16",
        "16 or 15",
        "either 15 or 16",
        "15, 16",
        "15,16",
        "14, 15",
        "15 and 16",
        "14 and 15",
        "15/16",
        "15 16 17",
        "15; 16",
        "15 16",
        "maybe 15",
        "15?",
        "15 \xb1 2",
        "15 plus 1",
        "15 + 1",
        "15-1",
        "between 14 and 16",
        "between 15 and 20",
        "at least 15",
        "more than 15",
        "less than 15",
        "over 15",
        ">15",
        "<15",
        "\u2265 15",
        "\\geq 15",
        "x > 15",
        "\u226015",
        "\\neq 15",
        "15+",
        "15 or more",
        "15 or so",
        "I am not sure, maybe 15",
        "I think 15 or 16",
        "I don't know",
        "unknown",
        "?",
        "...",
        "N/A",
        "none",
        "I cannot say",
        "15...",
        "15 is wrong",
        "15 is incorrect",
        "The answer is not 15",
        "The answer isn't 15",
        "The answer is 14",
        "The answer is 15 or 16",
        "The 15 books were sold, so 9 remain",
        "It was 15 in June and 20 in July",
        "She had 15, then 20",
        "10+5=14",
        "15 = 14",
        "15 - 3 = 12",
        "First 15, then 16",
        "15 minus one",
        "not 15 but 16",
        "\\boxed{14}",
        "\\boxed{15} \\boxed{14}",
        "\\boxed{}",
        "\\boxed{ }",
        "",
        "   ",
        "not \\boxed{15}",
        "\\boxed{15} or 16",
        "if 15",
        "15 if 16",
        "the answer is 15 not",
        "15 remainder 3",
        "15 R 3",
        "15R3",
        "15 r3",
        "15:16",
        "15 out of 20",
        "15 of 20",
        "15 vs 16",
        "It could be 15",
        "The answer might be 15",
        "probably 15",
        "15 (or 16)",
        "15 (sixteen)",
        "fifteen or sixteen",
        "x = 15, y = 14",
        "x=15 or x=14",
        "x = 14, y = 15",
        "almost 15",
        "5 times",
        "\\frac{15}{16}",
        "15\\frac{1}{2}",
        "inf",
        "__import__('os').system('echo 15')",
        'eval("15")',
        "print(15)",
        "exec('15')",
        "(lambda: 15)()",
        "[15 for x in [1]][0]",
        "$(echo 15)",
        "15 if True else 0",
        'int("15")',
        "15.__class__",
        "{15.__class__}",
        "\\newcommand{\\x}{15}\\x",
        "\\input{15}",
        "<script>15</script>",
        "0xF",
        "0b1111",
        "0o17",
        "globals()[15]",
        "1\x005",
        "1\u200b5",
        "\u202e51",
        "15\x08\x0899",
        "1\n5",
        "1\t5",
        "9**9**9",
        "15!",
        "%d15",
        "lambda x: 15",
        "def f(): return 15",
        "a[15]",
        "f(15)",
        "15j",
        "15L5",
        "15e",
        "T-15",
        "Room 15B",
        "v1.15",
        "3.15.2",
        "The answer is 15. No, 16.",
        "The answer is 15. The answer is 16.",
        "I got 15 but the answer is 14",
        "Perhaps the answer is 15.",
        "I don't think it is 15",
        "It is never 15",
        "The answer is between 10 and 15",
        "Sum of 10 and 5",
        "15 squared is 225",
        "The answer is 15x",
        "$15 + x",
        "15 = x + 1 or 16",
        "~~15~~",
        "Not 14. Not 15.",
        "1. 15\n2. 16",
        "15\n16",
        "Options: 15, 16",
        "no more than 15",
        "The answer is about 15 to 20",
        "The answer is less than 15",
        "rather than 15",
        "15 and a half",
        "15 and three quarters",
        "15.5.5",
        "15ish",
        "15-ish",
        "15 ish",
        "15 odd",
        "15 grand",
        "15 mil",
        "15 degrees below zero",
        "15\u03c0",
        "15\u4e8c",
        "15\u767e",
        "log 15",
        "sqrt 15",
        "half of 15",
        "twice 15",
        "15 doubled",
        "square root of 15",
        "2x = 15",
        "x + 3 = 15",
        "x^2 = 15",
        "x = 15 + y",
        "15 - y",
        "y = 15x",
        "x != 15",
        "15 != 15",
        "15 -> 16",
        "15 hopefully",
        "likely 15",
        "15 unsure",
        "\\boxed{15}? No, 16",
        "x - 1 = 15",
        "15\u2030",
        "one fifteenth",
        "negative fifteen",
        "minus fifteen",
        "fifteen thousand",
        "fifteen hundred",
        "15/0",
        "15:00",
        "15th of May",
        "15.15.15",
        "15 apples 3 pears",
        "15 apples, 3 pears",
        "15+-1",
        "+-15",
        "15 USD or 14 EUR",
        "$15 to $20",
        "$15-$20",
        "15 min 30 sec",
    ],
    "-15": ["15"],
    "0.16": ["15%"],
    "1500": ["1,501", "15,00"],
    "150": ["15,0"],
    "530": ["5 hours 30 minutes", "5 30", "5:30"],
    "5": ["5 hours 30 minutes", "5 hours and 30 minutes", "5:30", "He had 20 and gave 5"],
    "30": ["5 hours 30 minutes"],
    "63": ["6 feet 3 inches", "6 ft 3 in", "6'3\""],
    "6": ["6 feet 3 inches"],
    "24": ["2 days 4 hours", "2 lb 4 oz"],
    "85": ["8 by 5", "8x5", "8 x 5", "8 men 5", "8 less 5"],
    "35": ["3 for 5"],
    "25": ["2 pounds 5 ounces", "2m 5cm"],
    "32": ["3 weeks 2 days"],
    "115": ["1 hour 15 minutes"],
    "48": ["4 dozen 8"],
    "14": ["Answer: 14. Answer: 15"],
    "7273": ["72 73"],
    "123": ["1 2 3"],
    "12300": ["12 300 page books"],
    "22/3": ["4 10/3"],
    "0": ["1/0", "0/0", "nan", "1e-999999999", "False"],
    "nan": ["15"],
    "0.333": ["1/3"],
    "1/3": ["0.333"],
    "\\pi": ["3.14", "3.1416", "2\\pi"],
    "(3, 4)": ["(4,3)", "[3,4)"],
    "\\{1,3\\}": ["\\{1,2\\}"],
    "x+2": ["x+1"],
    "y": ["x"],
    "Yes": ["no"],
    "blue": ["red"],
    "\\frac{1}{\\sqrt{3}}": ["\\frac{\\sqrt{3}}{2}"],
    "3": ["3!", "((3!)!)!", "15 apples, 3 pears"],
    "1": ["1e999999999", "True", "i"],
    "2.718281828": ["e"],
    "20": ["It was 15 in June and 20 in July"],
    "19": ["COVID-19"],
    "16": ["The answer is 15. The answer is 16.", "15\n16", "15 clips or 16", "The answer is 15, not 16"],
    "0.15": ["15%%"],
    "1530": ["15 min 30 sec"],
    "320": ["3 m 20 cm", "3m20cm", "3h20"],
    "205": ["20 less 5"],
    "53": ["5 times 3"],
    "520": ["5 from 20"],
}


def pairs(table):
    return [(answer, gold) for gold, answers in table.items() for answer in answers]


@pytest.mark.parametrize("fast", [True, False])
def test_one_quantity_in_any_dress_is_right(fast):
    assert [pair for pair in pairs(RIGHT) if not answers_match(*pair, fast)] == []


def test_lenient_reads_sentences_labels_arithmetic_and_equations():
    assert [pair for pair in pairs(RIGHT_WHEN_LENIENT) if not answers_match(*pair, fast=False)] == []


@pytest.mark.parametrize("fast", [True, False])
def test_no_false_positive(fast):
    assert [pair for pair in pairs(WRONG) if answers_match(*pair, fast)] == []


def test_strict_wants_the_quantity_itself():
    for answer in (
        "The answer is 15",
        "Answer: 15",
        "10 + 5",
        "10 + 5 = 15",
        "She has 15 apples.",
        "\\sqrt{225}",
        "fifteen",
    ):
        assert not answers_match(answer, "15") and answers_match(answer, "15", fast=False), answer


@pytest.mark.parametrize(
    "gold, right",
    [
        (15, True),
        (15.0, True),
        ("15", True),
        (" 15\n", True),
        ("$15", True),
        (Fraction(30, 2), True),
        (["14", 15], True),
        ({"15"}, True),
        (("x", ("15",)), True),
        (51, False),
        ("", False),
        ("  ", False),
        (None, False),
        ([], False),
        ([None, ""], False),
        (["1", "5"], False),
        (float("nan"), False),
        (float("inf"), False),
        ({}, False),
        (b"15", False),
        ("Half of 30 is 15.\n#### 15", False),  # the gold is split off where the data is loaded
    ],
)
def test_golds_of_every_type(gold, right):
    for fast in (True, False):
        assert answers_match("15", gold, fast) is right
        assert r1_zero_reward_fn("t </think> <answer> 15 </answer>", gold, fast)["reward"] == float(right)


def test_non_finite_golds_and_answers_match_nothing():
    for word in ("nan", "inf", "-inf", "NaN", "Infinity"):
        assert not answers_match(word, float(word)) and not answers_match(word, "0", fast=False)


def test_exact_beyond_floats_and_beyond_pythons_int_limit():
    assert not answers_match("100000000000000000001", "100000000000000000000")
    assert answers_match("0.1", 0.1) and not answers_match("0.1000000000000001", "0.1")
    long = "7" * 6000
    assert answers_match(long, long) and not answers_match(long[:-1] + "8", long)
    assert not answers_match(long, "7", False) and not answers_match("15", 10**5000)


def test_gold_comes_first():
    """An equation may state a number, a number no equation. Swapped arguments would pass the second."""
    assert answers_match("5", "x=5") and answers_match("x=5", "5")
    assert not answers_match("5", "x+y=5", fast=False)


def test_percent_is_a_unit_once_and_for_all():
    assert answers_match("50%", "50") and answers_match("50", "50%") and answers_match("50\\%", "50%")
    for fast in (True, False):
        assert not answers_match("50%", "0.5", fast) and not answers_match("0.5", "50%", fast)


@pytest.mark.parametrize(
    "response, answer",
    [
        ("a </think> <answer> 7 </answer>", " 7 "),
        ("a </think> <answer>7</answer> and more", "7"),
        ("<answer> 5 </answer> </think> <answer> 7 </answer>", " 7 "),
        ("a </think> <answer> 7 </answer> <answer> 5 </answer>", " 5 "),
        ("a </think> <answer></answer>", ""),
        ("a </think><answer> 7 </answer>", None),
        ("a </think>  <answer> 7 </answer>", None),
        ("a </think> <answer> 7", None),
        ("a </think>\n<answer> 7 </answer>", None),
        ("</answer> </think> <answer> 7", None),
        ("<answer> 7 </answer>", None),
        ("</Think> <Answer> 7 </Answer>", None),
        ("a </think> <answer> 5 </answer> so <answer> 7", None),  # an earlier tag closes no later answer
        ("a </think> <answer> 7 </answer> so <answer>", None),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_extract_answer(response, answer):
    assert extract_answer(response) == answer
    assert r1_zero_reward_fn(response, "7")["format_reward"] == float(answer is not None)


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{5} then \boxed{7}.", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{7", None),
        (r"\boxed{7\}", None),
        (r"\boxed{7} \boxed{8", None),
        ("boxed{7}", None),
        (r"\Boxed{7}", None),
        (r"\boxed {7}", None),
        (r"\boxed 7", None),
        (r"\boxed{7}" + " more" * 20_000, "7"),
        ("", None),
        (None, None),
    ],
)
def test_last_boxed(text, inside):
    assert last_boxed(text) == inside
    assert question_only_reward_fn(text, "7")["format_reward"] == float(inside is not None)


def test_box_inside_the_answer_tag():
    def rewards(answer):
        return tuple(r1_zero_reward_fn(f"t </think> <answer> {answer} </answer>", "7").values())

    for hit in (r"\boxed{7}", r"So it is \boxed{7}.", r"\boxed{5} \boxed{7}"):
        assert rewards(hit) == (1.0, 1.0, 1.0), hit
    for miss in (
        r"\boxed{}",
        r"\boxed{7",
        r"\boxed{7} \boxed{5}",
        r"not \boxed{7}",
        r"\boxed{7} or 8",
        r"\boxed{x}",
    ):
        assert rewards(miss) == (0.0, 1.0, 0.0), miss


def test_read_quantity_values():
    for text, value in (
        ("$1,200.50", "2401/2"),
        ("7 1/2 cups", "15/2"),
        ("2.5 thousand", 2500),
        ("-3%", -3),
        ("1e3", 1000),
        ("1.200,50", "2401/2"),
        ("3 dollars and 5 cents", "61/20"),
        (r"2\frac{1}{3}", "7/3"),
        ("1/0", None),
        ("5 hours 30 minutes", None),
        ("9**9", None),
        ("1e9999", None),
        ("", None),
    ):
        assert read_quantity(text) == (None if value is None else Fraction(value)), text


def test_read_sentence_values():
    for text, value in (
        ("48 / 2 = 24, so 48 + 24 = 72 clips.", 72),
        ("2^10 - (3 - 1) * 12", 1000),
        ("-(-3)", 3),
        ("9^9^9^9", None),
        ("2**30**5", None),
        ("170!", None),
        ("1/(1-1)", None),
        ("15 cm^2.", 15),
        ("72 or 73", None),
        ("not 72", None),
        ("2x = 72", None),
    ):
        assert read_sentence(text) == value, text


def test_clean_never_glues_digits():
    for between in ("\x00", "\u200b", "\u202f", "\t", "\n", " ", "\\,", "~", "\\!", "\\quad ", "\x1b"):
        assert clean(f"7{between}2") != "72"
    assert clean("\u0667\u0662") == "72" and clean("\u22123") == "-3" and clean("1\\,200") == "1\u00a0200"


# ---- invented sister cases
UNITS = "apples|km|dollars|square feet|m^2|km/h|kg|lbs.|tickets each|gallons per minute|red marbles|%|m/s^2"
UNITS = UNITS.split("|")
WORDS = "apples books clips coins dogs euros feet hours miles pounds students weeks".split()
RIGHT_FORMS = (
    "{n}",
    " {n} ",
    "{n}.",
    "{n}.0",
    "+{n}",
    "{n:,}",
    "${n:,}",
    "\\${n}",
    "{n:,}.00",
    "\u20ac{n}",
    "{n}\u20ac",
    "USD {n}",
    "{n} {unit}",
    "{n:,} {unit}",
    "\\text{{{n} {word}}}",
    "{n}\\text{{ {word}}}",
    "{n}\\,\\text{{{word}}}",
    "\\({n}\\)",
    "$${n}$$",
    "\\mathbf{{{n}}}",
    "\\boxed{{{n}}}",
    "\\boxed{{{n} \\text{{ {word}}}}}",
    "{n}e0",
    "{twice}/2",
    "\\frac{{{twice}}}{{2}}",
    "${n} per {word}",
    "x = {n}",
    "{n}^\\circ",
    "**{n}**",
    '"{n}"',
)
LENIENT_FORMS = (
    "The answer is {n}.",
    "**Answer:** {n} {unit}",
    "So they have {n} {word} left.",
    "{a} + {b} = {n}",
    "Total: {n}",
    "{a} + {b} = {n} {word} altogether",
    "#### {n}",
    "{n} {word} ({a} + {b})",
    "Therefore, it costs ${n:,}.",
    "First {a} came, then {b}, so {n} in all.",
    "The final answer is $\\boxed{{{n}}}$.",
    "{a} plus {b} equals {n}",
)
WRONG_FORMS = (
    "{m}",
    "-{n}",
    "{n}.5",
    "{n}0",
    "1{n}",
    "{n} thousand",
    "{n}k",
    "{n}x",
    "{n}/{m}",
    "{n} or {m}",
    "{m} or {n}",
    "{n}, {m}",
    "{n} and {m}",
    "not {n}",
    "maybe {n}",
    "between {n} and {m}",
    "{n} {word} {m} {other}",
    "{n} {m} {b}",
    "It was {n} in June and {m} in July",
    "The {n} {word} went, so {m} stayed",
    "{n} - {b}",
    "at least {n}",
    "> {n}",
    "{n}?",
    "The answer is {m}",
    "{a} + {b} = {m}",
    "print({n})",
    "${n}.50",
    "{n}^2",
    "{n}!",
    "{n} squared",
    "{n} by {m}",
    "\\boxed{{{n}}} \\boxed{{{m}}}",
    "{n} to {m}",
    "The answer is not {n}",
    "{n} = {m}",
    "{n}\\pi",
    "{n} is wrong",
    "I do not know, {n} or {m}",
    "x = {n}, y = {m}",
    "{n} + {b} {word}",
    "half of {n}",
    "{n}:30",
)


def test_invented_cases():
    rng = random.Random(0)
    for _ in range(60):
        a, b = rng.randint(2, 3000), rng.randint(2, 900)
        n = a + b
        word, other = rng.sample(WORDS, 2)
        fill = dict(
            a=a,
            b=b,
            n=n,
            m=n + rng.choice([-1, 1, 10]),
            twice=2 * n,
            unit=rng.choice(UNITS),
            word=word,
            other=other,
        )
        for forms, fast, right in (
            (RIGHT_FORMS, True, True),
            (RIGHT_FORMS, False, True),
            (LENIENT_FORMS, False, True),
            (WRONG_FORMS, True, False),
            (WRONG_FORMS, False, False),
        ):
            for form in forms:
                answer = form.format(**fill)
                assert answers_match(answer, str(n), fast) is right, (answer, n, fast)


# ---- hostile text
HOSTILE = [
    "(",
    "{",
    "\\frac{1}{",
    "\\sqrt{",
    "\\boxed{",
    "\\text{",
    "\\",
    "$",
    "%",
    "9",
    "1,",
    "1,111",
    "1.",
    "1 ",
    "1/",
    "1+",
    "--",
    "1*",
    "9**",
    "9^{",
    "(9!)",
    "!",
    "e",
    "1e9",
    " ",
    "\n",
    "\xa0",
    "\u200b",
    "\x00",
    "a",
    "so 1 ",
    "answer 1 ",
    "or 1 ",
    "=",
    "1=1 ",
    "x=1,",
    "'",
    "*",
    "_",
    "~",
    "<b",
    "<answer>",
    "</think> <answer>",
    "</answer>",
    "twenty-",
    "thousand ",
    "1 kg ",
    "and a half ",
    "1 dollar 5 ",
    "m^2 ",
    "\xbd",
    "\u0667",
    "\u4e03",
    "{,}",
    "\\,",
    "1\\,111",
    "\ud800",
    "\U0001f600",
    "1 * 10^",
    "0,1",
    "1.200",
    "\\pi+",
    "x^2+",
    "(x+1)",
    "x^{y}",
    "\\log(",
    "\\sin x",
    "(1,",
    "\x1b[0m",
    "&#9",
    "&lt;",
    "\u00b9\u2082",
    "\\underbrace{7}_{",
    "\\hspace{",
    "0.\\overline{3}",
    "one hundred and ",
    "if 1, ",
    "\\boxed{1} and ",
    "of a day per ",
    "square apples in the ",
    "[1,",
    "\\{1,",
    "x\\le ",
    "\\cup(1,2)",
    "\\begin{pmatrix}1&",
    "\\sqrt{x}+1,",
    "over 5 days ",
]
TOWERS = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "2**30**5",
    "1e999999999",
    "1e-999999999",
    "10^10^10",
    "((9!)!)!",
    "100000!",
    "1/0",
    "\\binom{999999999}{499999999}",
    "\\log_{2}{9^{9^9}}",
    "2^(2^(2^(2^2)))",
    "1 thousand" * 20,
    "9e999" + "*9e999" * 40,
]


def hostile_texts(seed=1):
    rng = random.Random(seed)
    for part in HOSTILE:
        yield from (part * (size // len(part)) for size in (60, 290, 600, 99_000))
    yield from TOWERS
    yield "".join(chr(rng.randrange(0x3000)) for _ in range(99_000))
    for _ in range(60):
        parts = rng.sample(HOSTILE, rng.choice([2, 3, 6]))
        size = rng.choice([40, 100, 300, 600, 99_000])
        yield "".join(rng.choice(parts) for _ in range(size // 3))[:99_000]


def grade_everything(failures):
    """Grades every hostile text in every way; returns the seconds of this thread alone."""
    answers_match("x+1", "1+x")  # sympy is imported on the first symbolic comparison
    for text in hostile_texts():
        for gold in ("72", "0.5", "x+1", "(1, 2)"):
            for fast in (True, False):
                for fn, response in (
                    (r1_zero_reward_fn, f" t </think> <answer> {text} </answer>"),
                    (question_only_reward_fn, "\\boxed{%s}" % text),
                    (question_only_reward_fn, text),
                ):
                    start = time.thread_time()
                    rewards = fn(response, gold, fast=fast)
                    seconds = time.thread_time() - start
                    if seconds > 1 or not set(rewards.values()) <= {0.0, 1.0}:
                        failures.append((ascii(text[:60]), len(text), gold, fast, seconds))
    failures.append("done")


def test_hostile_text_never_raises_and_stays_under_a_second_in_a_thread():
    failures = []
    thread = threading.Thread(target=grade_everything, args=(failures,))
    thread.start()
    thread.join()
    assert failures == ["done"]


def test_hostile_golds():
    for gold in (*TOWERS, "(" * 3000, "x" * 99_000, "\\sin(x)", "x^{y^{z}}"):
        for answer in ("72", "x+1", "\\pi"):
            start = time.thread_time()
            assert not answers_match(answer, gold, fast=False) and time.thread_time() - start < 1


def test_same_verdict_on_the_event_loop_and_off_it():
    """Notebooks run an event loop; math-verify's own timeouts would raise in a worker thread."""

    async def both():
        args = "\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"
        return (
            answers_match(*args),
            await asyncio.to_thread(answers_match, *args),
            await asyncio.to_thread(answers_match, "x+2", "x+1"),
        )

    assert asyncio.run(both()) == (True, True, False)


def test_text_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in (
        "__import__('os').system('touch ran')",
        "open('ran', 'w')",
        "exec(\"open('ran','w')\")",
        "$(touch ran)",
        "\\write18{touch ran}",
        "(lambda: open('ran', 'w'))()",
    ):
        for gold in ("72", "x+1"):
            for fast in (True, False):
                assert not answers_match(code, gold, fast)
    assert list(tmp_path.iterdir()) == []


def test_import_is_light_and_grading_is_quiet():
    script = (
        "import sys; import rlkit.tasks.grading as g; assert not {'sympy', 'math_verify', 'torch'} & "
        "set(sys.modules);"
        "assert g.answers_match('$72', '72') and not g.answers_match('72 or 73', '72', False);"
        "assert 'sympy' not in sys.modules; assert g.answers_match('2x+2', '2(x+1)')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- the cases in tests/data


def test_shared_cases(shared_cases):
    rows = [json.loads(line) for line in (shared_cases / "grading.jsonl").read_text().splitlines()]
    assert len(rows) == 548
    rows = [row for row in rows if not row["debatable"]]
    for fast in (True, False):
        hits = {True: [], False: []}  # by "is a phrase"
        for row in rows:
            got = REWARD_FNS[row["prompt_type"]](row["response"], row["ground_truth"], fast=fast)
            assert got["format_reward"] == row["format_reward"], row["id"]
            assert got["answer_reward"] <= row["answer_reward"], (row["id"], "false positive")
            assert got["reward"] == got["format_reward"] * got["answer_reward"]
            hits[row["category"] == "phrase"].append(got["answer_reward"] == row["answer_reward"])
        asked = hits[False] if fast else hits[False] + hits[True]
        assert len(asked) > 300 and sum(asked) / len(asked) >= 0.98


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def verdicts(rows, mode):
    """(row, wrong way) of the rows whose reward in this mode is not the expected one."""
    for row in rows:
        if (expected := row.get(f"expected_{mode}")) is not None:
            graded = REWARD_FNS[row["prompt_type"]](
                row["response"], row["ground_truth"], fast=mode == "strict"
            )
            yield row, graded["answer_reward"] - expected


@pytest.mark.parametrize("name, size, at_least", [("grading-2", 117, 0.97), ("grading-sisters", 943, 0.99)])
def test_cases_by_kind(shared_cases, name, size, at_least):
    rows = read_rows(shared_cases / f"{name}.jsonl")
    strict, lenient = (list(verdicts(rows, mode)) for mode in ("strict", "lenient"))
    assert len(rows) == size and len(strict) > 0.6 * size < len(lenient)
    assert [row["id"] for row, off in strict if off] == []
    missed = [row["id"] for row, off in lenient if off]
    assert len(missed) <= (1 - at_least) * size, missed


@pytest.mark.parametrize("form, share", [("sentence", 0.95), ("box", 0.98), ("tail", 0.8)])
def test_the_last_sentences_of_gsm8k(gsm8k_dir, form, share):
    """A worked answer's last sentence, read leniently; strictly its number in a box, or with what follows."""
    seen = right = 0
    for row in read_rows(gsm8k_dir / "test.jsonl"):
        body, _, gold = row["answer"].partition("####")
        gold, sentence = gold.strip().replace(",", ""), re.sub("<<.*?>>", "", body).strip().split("\n")[-1]
        tail = re.search(r"(?<![\d.,])\$?([\d,]+(?:\.\d+)?)(?!\d)([^.=<>]*)\.?$", sentence)
        if form == "sentence":
            hit = answers_match(sentence, gold, fast=False)
            assert not answers_match(sentence, f"{gold}1", fast=False)
        elif tail is None or tail[1].replace(",", "") != gold:
            continue
        elif form == "box":
            boxed = f"{sentence[: tail.start(1)]}\\boxed{{{tail[1]}}}{sentence[tail.end(1) :]}"
            hit = question_only_reward_fn(f"First we think. {boxed}", gold)["reward"]
        else:
            hit = answers_match(tail[0], gold)
        seen, right = seen + 1, right + hit
    assert seen > 1200 and right >= share * seen


def test_gsm8k_golds_match_themselves(gsm8k_dir):
    """Every gold of the test split, as an answer in three spellings; and never its neighbour."""
    for line in (gsm8k_dir / "test.jsonl").read_text().splitlines():
        gold = json.loads(line)["answer"].rsplit("####", 1)[1].replace(",", "").strip()
        assert answers_match(f"${int(gold):,}", gold) and answers_match(f"\\boxed{{{gold}.00}}", gold)
        assert answers_match(f"The answer is {gold}.", gold, fast=False) and not answers_match(
            str(int(gold) + 1), gold
        )


@pytest.mark.parametrize(
    "answer",
    [
        r"-\boxed{72}",
        r"1\boxed{72}",
        r"\boxed{72}00",
        r"2 \boxed{72}",
        r"\boxed{72}^2",
        r"\boxed{72}/2",
        r"\boxed{72} - 1",
        r"\boxed{72} + 1 = 73",
        r"\boxed{72} thousand",
        r"\boxed{71}, \boxed{72}",
        r"maybe \boxed{72}",
        r"\boxed{72}?",
        r"\boxed{71} and \boxed{72}",
        r"\boxed{71} or \boxed{72}",
        r"not \boxed{72}",
        r"It is not equal to \boxed{72}",
        r"\boxed{72} is wrong",
        r"\boxed{72}. That is wrong.",
        r"\boxed{72}, or maybe 73",
        r"\boxed{72}, 73",
        r"\boxed{72}.5",
        r"\boxed{72}\pi",
        r"\boxed{72} squared",
        r"\sqrt{\boxed{72}}",
        r"10^{\boxed{72}}",
        r"\frac{1}{\boxed{72}}",
        r"x \le \boxed{72}",
        r"more than \boxed{72}",
        "48 -\n\\boxed{72}",
        "not\n\\boxed{72}",
        "\\boxed{72}\n\nWait, that is wrong.",
        r"f(\boxed{72})",
        r"\boxed{72} times 3",
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_what_stands_around_a_box_belongs_to_the_answer(answer, fast):
    assert not answers_match(answer, "72", fast)
    assert question_only_reward_fn(f"So we find: {answer}", "72", fast)["reward"] == 0
    assert r1_zero_reward_fn(f"t </think> <answer> {answer} </answer>", "72", fast)["reward"] == 0


@pytest.mark.parametrize(
    "answer",
    [
        r"\boxed{72}",
        r"So 48 + 24 = \boxed{72}.",
        r"\[ x = \boxed{72} \]",
        r"She sold \boxed{72} clips in April and May.",
        r"\boxed{71} no, \boxed{72}",
        r"\boxed{71}. Wait, it is \boxed{72}",
        r"It is not 71 but \boxed{72}.",
        r"Therefore, the answer is $\boxed{72}$. I hope it is correct.",
        r"\textbf{Answer: } \boxed{72}",
        r"$\boxed{72}$ dollars",
        r"\boxed{72}\%",
        r"So \boxed{72} girls are not in the team.",
        r"A profit of $\boxed{72} a day from visits",
        "So $48 + 24 = 72$\n\n\\[\n\\boxed{72}\n\\]\n\nIf you have questions, ask.",
        r"x \in \boxed{72}",
        r"It is $\boxed{72}$, not $71$.",
        r"\begin{aligned} x &= 3 \\ y &= \boxed{72} \end{aligned}",
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_a_box_in_a_sentence_is_its_answer(answer, fast):
    assert question_only_reward_fn(answer, "72", fast)["reward"] == 1
    assert r1_zero_reward_fn(f"t </think> <answer> {answer} </answer>", "72", fast)["reward"] == 1


@pytest.mark.parametrize("answer", ["1E999999", "1E+999999", "(1E+999999,2)", "1 E 999999"])
def test_a_number_with_an_exponent_never_reaches_sympy(answer):
    assert not answers_match(answer, "(1,2)", fast=False)


@pytest.mark.parametrize(
    "answer",
    [
        "I doubt it's {n}",
        "I doubt that the answer is {n}",
        "doubtful: {n}",
        "hardly {n}",
        "It is barely {n}.",
        "scarcely {n}",
        "far from {n}",
        "anything but {n}",
        "It isnt {n}",
        "I deny it is {n}",
        "reject {n}",
        "besides {n}",
        "supposedly {n}",
        "\u221a{n}",
        "\u221a({n})",
        "\u221a {n}",
        "The answer is \u221a{n}",
        "x = \u221a{n}",
        "minus \u221a{n}",
        "{n}\u221a",
        "3\u221a{n}",
        "\u221b{n}",
        "\u2211{n}",
        "\u230a{n}\u230b",
        "root {n}",
        "the factorial of {n}",
        "{n} estimated",
        "{n} est.",
        "{n} (estimated)",
        "{n} scratch that",
        "{n}, scratch that",
        "{n} strike that",
        "{n} ignore that",
        "{n} never mind",
        "{n} retracted",
        "{n} oops",
        "{n}, sorry",
        "{n} I take it back",
        "{n} nope",
        "{n} my mistake",
        "{n} in error",
        "{n} invalid",
        "{n} doubtful",
        "{n} at most",
        "{n} max",
        "The answer is {n}. Oops.",
        "The answer is {n}, I take that back",
        "The answer was {n} but I retract it",
    ],
)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("n", ["72", "15"])
def test_a_number_denied_taken_back_or_under_a_root_is_not_the_answer(answer, fast, n):
    assert not answers_match(answer.format(n=n), n, fast)


def test_such_words_elsewhere_deny_nothing():
    for answer in (
        "72 invalid votes",
        "72 scratch cards",
        "72 mistakes",
        "72 estimated hours",
        "72 most popular books",
    ):
        assert answers_match(answer, "72") and answers_match(answer, "72", fast=False), answer
    for answer in (
        "\u221a5184",
        "\u221a5184 = 72",
        "So \u221a(72*72) = 72.",
        "Without a doubt, it is 72",
        "Undoubtedly 72",
        "The Doubtfires have 72 cats.",
        "The total without tax is 72",
        "She refused 5 of 77, so 72 remain",
        "All but 8 of the 80 left, so 72 left",
        "The root is 72",
        "The maximum is 72.",
        "72 is the most",
        "So it is 72",
        "estimated 72",
        "\u2234 72",
        "72 \u220e",
    ):
        assert answers_match(answer, "72", fast=False), answer
    assert not answers_match("2\u221a36", "26", fast=False) and not answers_match(
        "1\u221a36", "16", fast=False
    )


# ---- golds that are no number

GOLDS = r"""
(0,7) | [0,7] | [0,7) | (0,7] | 0,7 | (7,0) | 7 | 0.7 | \frac{\sqrt{3}}{2} | \frac{\sqrt{2}}{2}
\sqrt{3} | x+1 | X+1 | x-1 | 1-x | y+1 | x<5 | x \le 5 | x>5 | x \ge 5 | x \ne 5 | y=5x | x=y | \infty
-\infty | \emptyset | 0 | e | E | i | -i | 3+4i | 3-4i | 4+3i | 2516_8 | 2516_7 | 2516 | (1,2,3,4)
(1,2) | [1,2] | 1,2 | 12 | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix} | \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | x=1,y=2 | x=2,y=1 | 5 \text{ cm} | 5 m | 5 \text{ cm}^2 | \$5
5\% | 5^\circ | 5 apples | \pi | 2\pi | \pi^2 | \frac{\pi}{2} | \frac{2}{\pi} | A | a | B | Tuesday
even | yes | no | \cos x | \sin x | \cos y | \sin^2 x | x^2 | x^3 | 2^x | x^n | e^x | \ln x | \sqrt{x}
x^2+2x+1 | x^2-1 | \frac{x}{y} | \frac{y}{x} | xy | x+y | x-y | y-x | (1,234) | 1234 | 0.\overline{3}
0.3 | 0.33 | (-1,3)\cup(5,6) | (-1,3)\cup[5,6) | -1<x<4 | -1\le x<4 | x^2+y^2=1 | x^2+y^2=2
10\sqrt{2}\text{ cm} | 10\sqrt{2}\text{ m} | 12 minutes | 12 seconds | \{3,4,5\} | (3,4,5) | [3,4,5]
(5,4,3) | a+2A | 2a+A
"""
GOLDS = [gold.strip() for line in GOLDS.strip().splitlines() for gold in line.split(" | ")]


@pytest.mark.parametrize("fast", [True, False])
def test_a_gold_matches_itself_in_any_dress_and_no_other(fast):
    assert len(GOLDS) == len(set(GOLDS)) > 100
    for gold in GOLDS:
        for dress in (" %s ", "$%s$", r"\(%s\)", r"\boxed{%s}", r"so it is $\boxed{%s}$."):
            assert answers_match(dress % gold, gold, fast), (dress, gold)
        assert answers_match(gold, r"\boxed{%s}" % gold, fast)
    found = [
        (answer, gold)
        for gold in GOLDS
        for answer in GOLDS
        if answer != gold and answers_match(answer, gold, fast)
    ]
    # a bare number answers a gold with a unit (and the other way round); 0,7 may be meant as 0.7
    assert {tuple(sorted(pair)) for pair in found} == {
        ("12", "12 minutes"),
        ("12", "12 seconds"),
        ("0,7", "0.7"),
    }


SAME = {
    r"\left(-2, \frac{5}{3}\right)": ["(-2, 5/3)", r"\left(-2,\frac53\right)"],
    r"[-1,1]": [r"-1 \le x \le 1", r"x \in [-1, 1]", r"1 \geq x \geq -1"],
    r"x < -2": ["-2 > x", r"x \lt -2", r"(-\infty, -2)", "(-\u221e,-2)"],
    r"(-\infty,0)\cup(0,\infty)": ["(-\u221e, 0) \u222a (0, +\u221e)", r"(0,\infty) \cup (-\infty,0)"],
    r"\{1,2\}": ["1,2", "2, 1", r"\{2,1\}", "x=1, x=2"],
    "(1,2)": ["(x,y) = (1,2)", "( 1 , 2 )", "(1.0, 4/2)"],
    r"\frac{2\sqrt{6}}{3}": ["2\u221a6/3", "2*sqrt(6)/3", r"\sqrt{\frac{8}{3}}"],
    r"y = -\frac{1}{2}x + 3": ["y=3-x/2", "x+2y=6", r"-\frac12 x + 3"],
    "2(x+3)^2": ["2x^2+12x+18"],
    "a^2b": ["ba^2"],
    r"\frac{1}{2}i": ["0.5i", "i/2"],
    "101101_2": ["101101_{2}", "101101\u2082", "101101 (base 2)"],
    r"\sin(2x)": [r"\sin 2x", "sin(2x)"],
    r"3\pi\text{ cm}^2": [r"3\pi", "3\u03c0 cm^2", r"3\pi \text{ square centimeters}"],
    "15 miles per hour": ["15 mi/h", "15 miles/hour", "15"],
    "20 square feet": ["20 ft^2", "20 sq ft"],
    "8 apples": ["8 red apples", "8 apples left"],
    r"\$4.50": ["4.50 dollars", "4.5"],
    "(A)": ["A", r"\text{(A)}"],
    "2^{10}": ["2^10", "1024", "1,024"],
    r"x = 1 \text{ or } x = 3": ["1, 3", r"\{3, 1\}", "x=3, x=1"],
    "5m": ["5m", "5 m", "5*m"],
}


@pytest.mark.parametrize("fast", [True, False])
def test_other_spellings_of_a_gold(fast):
    assert [pair for pair in pairs(SAME) if not answers_match(*pair, fast)] == []


def test_letters_units_and_brackets_that_differ():
    for answer, gold in (
        ("15 miles", "15 miles per hour"),
        ("20 feet", "20 square feet"),
        ("8 oranges", "8 apples"),
        ("The answer is 8 oranges.", "8 apples"),
        ("\u00a34.50", r"\$4.50"),
        ("5", "5m"),
        ("5 meters", "5m"),
        ("2,1", "x=1, y=2"),
        ("3.14159265358979323846264338328", r"\pi"),
        ("1.4142135623730950488", r"\sqrt{2}"),
        (r"\sqrt{x^2}", "x"),
        ("", r"\boxed{}"),
        ("$", "*"),
    ):
        assert not answers_match(answer, gold) and not answers_match(answer, gold, fast=False), (answer, gold)


def test_lists_of_many_expressions_cost_less_than_a_second():
    items = [rf"\sqrt{{{k}}}x+{k}" for k in range(2, 12)]
    start = time.thread_time()
    assert answers_match(",".join(items), ",".join(reversed(items)))
    assert not answers_match(",".join(items), ",".join(item.replace("+", "-") for item in items))
    assert time.thread_time() - start < 1


def test_a_prompt_s_grader_is_warm():
    """math-verify is imported where the grader is asked for, not while a response waits."""
    script = (
        "import sys, time, rlkit; rlkit.load_prompt('r1_zero').reward_fn;"
        "assert 'math_verify' in sys.modules;"
        "from rlkit.tasks.grading import answers_match; start = time.process_time();"
        r"assert answers_match(r'\frac{1}{\sqrt{2}}', r'\frac{\sqrt{2}}{2}');"
        "assert time.process_time() - start < 0.5"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "tail, unit",
    [
        ("", True),
        ("cm", True),
        ("km/h", True),
        ("gallons of water per day", True),
        ("old wooden toy trains", True),
        ("birds in her garden", True),
        ("hours attending classes", True),
        ("p.m.", True),
        ("m^2", True),
        ("\u5143", True),
        ("apples isn't right", False),
        ("not apples", False),
        ("apples or pears", False),
        ("quadrupled", False),
        ("invalid", False),
        ("sevenths", False),
        ("milliards", False),
        ("thousand apples", False),
        ("\u0442\u044b\u0441\u044f\u0447", False),
        ("fails", False),
        ("in the shop", False),
        ("apples by mistake", False),
    ],
)
def test_what_a_unit_is(tail, unit):
    assert (read_unit(tail) is not None) is unit
