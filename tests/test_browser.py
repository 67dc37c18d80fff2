"""The rollout browser: records agree with hand-made numbers and the loss's clip rule; the HTML is inert."""

import json
import math
from html.parser import HTMLParser

import pytest
import torch
from tiny_model import byte_tokenizer
from toys import Bigram, scored_rows

from rlkit import compute_policy_gradient_loss
from rlkit.study import browser

BLUE, ORANGE, WHITE = "#56b4e9", "#e69f00", "#ffffff"
TOKENIZER = byte_tokenizer()
VOID = {"meta", "br"}


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


PROMPTS = ["Solve.\nA?"] * 2 + ["Solve.\nB<i>?"] * 2
RESPONSES = [
    '<b>1</b>\n& "two"',
    "3\t<script>alert('x')</script>",
    "é",
    "$4$ and $5$",
]  # é is two byte tokens
IDS = [ids(text) + ([1] if i % 2 else []) for i, text in enumerate(RESPONSES)]  # 1 is <eos>


def annotate(**changes):
    arguments = (
        dict(
            rewards={"reward": [1, 0, 0, 0], "format_reward": [1, 1, 0, 0]},
            group_size=2,
            finish_reasons=["length", "stop"] * 2,
        )
        | changes
    )
    return browser.annotate_rollouts(Bigram(258), TOKENIZER, PROMPTS, IDS, **arguments)


def old_log_probs(shift=0.5, seed=0):
    """The model's own, moved by +-shift: some ratios lie on each side of the clip range."""
    own = scored_rows(Bigram(258), TOKENIZER(PROMPTS, add_special_tokens=False)["input_ids"], IDS)
    generator = torch.Generator().manual_seed(seed)
    return [row + shift * (2 * torch.rand(row.shape, generator=generator) - 1) for row in own]


class Page(HTMLParser):
    """Reads a page strictly (tags must nest); collects the coloured tokens: text, colour, title."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.tokens, self.tags, self.text = [], [], set(), ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        attributes = dict(attributes)
        if "title" in attributes:
            color = attributes["style"].removeprefix("background-color:")
            self.tokens.append({"text": "", "color": color, "title": attributes["title"]})

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "span" in self.open and self.tokens:
            self.tokens[-1]["text"] += data


def test_records_hold_what_was_sampled():
    records = annotate()
    assert [(r["group"], r["index"]) for r in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for record, text, row in zip(records, RESPONSES, IDS):
        assert record["response"] == text and [t["id"] for t in record["tokens"]] == row
        assert record["length"] == len(row)
    assert [(t["text"], t["special"]) for t in records[1]["tokens"]][-1] == ("<eos>", True)
    assert [t["text"] for t in records[2]["tokens"]] == ["", "é"]  # no half a character anywhere
    half = math.sqrt(0.5)  # 0.5 / std(1, 0) = 0.5 / sqrt(0.5)
    assert [r["advantage"] for r in records] == pytest.approx([half, -half, 0, 0], abs=1e-5)
    assert records == annotate() and json.loads(json.dumps(records)) == records


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_numbers_are_the_models_own(temperature):
    table = Bigram(258).table.detach().double() / temperature
    for record, prompt, row in zip(annotate(temperature=temperature), PROMPTS, IDS):
        for before, token in zip([ids(prompt)[-1], *row], record["tokens"]):
            p = table[before].exp() / table[before].exp().sum()
            assert token["log_prob"] == pytest.approx(math.log(p[token["id"]]), abs=1e-4)
            assert token["entropy"] == pytest.approx(-(p * p.log()).sum().item(), abs=1e-4)
            assert token["ratio"] == 1.0 and token["clipped"] is None  # on-policy


@pytest.mark.parametrize("method", ["grpo", "gspo", "cispo", "noclip"])
def test_clip_flags_are_the_losses(method):
    advantages, cliprange, old = [1.0, -2.0, 0.0, -0.5], 0.0 if method == "gspo" else 0.2, old_log_probs()
    records = annotate(
        rewards=None, advantages=advantages, old_log_probs=old, cliprange=cliprange, method=method
    )
    seen = set()
    for record, advantage, old_row in zip(records, advantages, old):
        log_probs = torch.tensor([[t["log_prob"] for t in record["tokens"]]], requires_grad=True)
        loss, stats = compute_policy_gradient_loss(
            torch.tensor([advantage]), log_probs, method, old_row[None], cliprange
        )
        [gradient] = torch.autograd.grad(loss.sum(), log_probs)
        flags = [t["clipped"] for t in record["tokens"]]
        seen |= set(flags)
        if method in ("grpo", "gspo") and advantage:  # clipped is where no gradient flows
            assert [flag is not None for flag in flags] == (gradient[0] == 0).tolist()
        sequences = len(flags) if method == "gspo" else 1
        for side in ("low", "high"):
            assert flags.count(side) == sequences * int(stats[f"n_clipped_{side}"])
        ratios = torch.tensor([t["ratio"] for t in record["tokens"]])
        if method == "gspo":
            assert ratios.tolist() == pytest.approx(
                [(log_probs[0] - old_row).mean().exp().item()] * len(flags)
            )
        else:
            torch.testing.assert_close(ratios, (log_probs[0] - old_row).exp().detach(), rtol=1e-4, atol=1e-5)
    assert seen == {"grpo": {None, "low", "high"}, "cispo": {None, "high"}, "noclip": {None}}.get(
        method, seen
    )
    assert method != "gspo" or seen - {None}


def test_every_text_is_escaped_and_the_html_is_plain():
    page = Page(browser.rollout_html(annotate()))
    assert page.tags <= {"div", "span", "details", "summary", "b", "i", "u", "pre"} and "B<i>?" in page.text
    shown = "".join(token["text"] for token in page.tokens)
    wanted = [t.replace("\n", "↵\n").replace("\t", "⇥").replace("é", "▯é") for t in RESPONSES]
    assert shown == "".join(text + "<eos>" * (i % 2) for i, text in enumerate(wanted))
    html = browser.rollout_html(annotate(finish_reasons=["<img src=x>"] * 4))
    assert (
        "<img" not in html and "background-color:#ffffff;color:#000000" in html and "mathjax_ignore" in html
    )


def test_control_characters_are_shown():
    assert browser._shown({"text": "a\r\x00b"}) == "a␍␀b"


def record(group, index, advantage, *tokens):
    """A hand-made record of (text, log_prob, entropy, ratio, clipped)."""
    names = ("text", "log_prob", "entropy", "ratio", "clipped")
    return {
        "group": group,
        "index": index,
        "prompt": "q",
        "response": "",
        "reward": 1.0,
        "advantage": advantage,
        "length": len(tokens),
        "finish_reason": "stop",
        "method": "grpo",
        "cliprange": 0.2,
        "tokens": [dict(zip(names, token), id=0, special=False) for token in tokens],
    }


HAND_MADE = [
    record(0, 0, 1.0, ("a", -0.0, 0.0, 1.0, None), ("b", -2.5, 1.0, 2.0, "high")),
    record(0, 1, -1.0, ("c", -9.0, 2.0, 0.5, "low"), ("d", None, None, None, None)),
    record(3, 0, 0.0, ("e", -5.0, 2.0, 1.0, None)),
]


def test_one_rare_token_does_not_pale_the_others():
    rare = [
        record(
            0, 0, 1.0, ("a", -12.0, 0.0, 1e-9, None), ("b", -1.0, 0.0, 4.0, None), ("c", 0.0, 0.0, 2.0, None)
        )
    ]
    html = browser.rollout_html(rare, "ratio")
    assert [t["color"] for t in Page(html).tokens] == [
        ORANGE,
        BLUE,
        "#aadaf4",
    ]  # a factor of 4 is the full colour
    assert "0.25 or less" in html and "4 or more" in html
    assert "-5.00 or less" in browser.rollout_html(
        rare, "log_prob"
    ) and "or more" not in browser.rollout_html(rare, "log_prob")


@pytest.mark.parametrize(
    "color_by, colors",
    [
        ("advantage", [BLUE, BLUE, ORANGE, ORANGE, WHITE]),
        ("log_prob", [WHITE, "#f2cf80", ORANGE, WHITE, ORANGE]),  # 5 nats is the full colour, 2.5 half of it
        ("entropy", [WHITE, "#aadaf4", BLUE, WHITE, BLUE]),
        ("ratio", [WHITE, BLUE, ORANGE, WHITE, WHITE]),  # 2 and 1/2 are equally far from 1
        ("clipped", [WHITE, BLUE, ORANGE, WHITE, WHITE]),
    ],
)
def test_colours_of_a_hand_made_case(color_by, colors):
    html = browser.rollout_html(HAND_MADE, color_by)
    assert [token["color"] for token in Page(html).tokens] == colors
    assert html.count("<u>") == 2 and browser.COLOR_BY[color_by] in html  # clipped is underlined, too
    assert Page(html).tokens[3]["title"] == "" and "ratio 0.5, clipped low" in Page(html).tokens[2]["title"]


def test_one_group_or_all():
    assert [t["text"] for t in Page(browser.rollout_html(HAND_MADE, group=3)).tokens] == ["e"]
    assert browser.rollout_html(HAND_MADE).count("<details open>") == 1
    one = browser.rollout_html(HAND_MADE, "entropy", group=0)  # same scale as with all groups
    assert [t["color"] for t in Page(one).tokens] == [
        t["color"] for t in Page(browser.rollout_html(HAND_MADE, "entropy")).tokens[:4]
    ]
    assert "#1 · reward 1 · format – · advantage -1.00 · 2 tokens · finish: stop" in one


def test_empty_responses_and_empty_prompts():
    records = browser.annotate_rollouts(
        Bigram(258), TOKENIZER, ["", "p"], [ids("ab"), []], [0, 1], group_size=2
    )
    assert records[0]["tokens"][0]["log_prob"] is None and records[0]["tokens"][1]["log_prob"] < 0
    assert records[1]["tokens"] == [] and Page(browser.rollout_html(records)).tokens[0]["title"] == ""


def test_browser_redraws(tmp_path):
    box = browser.rollout_browser(HAND_MADE)
    group, color_by, page = box.children
    assert page.value == browser.rollout_html(HAND_MADE, "advantage", 0) and "needs a running kernel" in repr(
        box
    )
    group.value, color_by.value = 3, "clipped"
    assert page.value == browser.rollout_html(HAND_MADE, "clipped", 3)


def test_saved_page(tmp_path):
    html = browser.save_html(HAND_MADE, tmp_path / "rollouts.html").read_text(encoding="utf-8")
    assert (
        "<script" not in html and "http" not in html and len(Page(html).tokens) == 5 * len(browser.COLOR_BY)
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"group_size": 3}, "group_size: got 3"),
        ({"rewards": None}, "rewards: got none"),
        ({"rewards": [1, 0]}, "reward: got 2, expected 4"),
        ({"finish_reasons": ["stop"]}, "finish_reasons: got 1"),
        ({"advantages": [1.0]}, "advantages: got shape"),
        ({"old_log_probs": old_log_probs()}, "cliprange: got None"),
        ({"old_log_probs": [torch.zeros(1)] * 4, "cliprange": 0.2}, "old_log_probs: got shape"),
    ],
)
def test_bad_input_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        annotate(**changes)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="color_by: got 'colour'"):
        browser.rollout_html(HAND_MADE, "colour")
    with pytest.raises(ValueError, match=r"group: got 1, but the records' groups are \[0, 3\]"):
        browser.rollout_html(HAND_MADE, group=1)
