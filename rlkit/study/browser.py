"""Look at a rollout batch group by group, each token coloured by a number: first records, then views.

records = annotate_rollouts(model, tokenizer, prompts, token_ids, rewards, group_size=8)   # plain dicts
rollout_html(records, "entropy", group=0)     # a str of static HTML, no script; show it with IPython's HTML
rollout_browser(records)                      # ipywidgets: choose the group and the colour
save_html(records, "rollouts.html")           # one page with every colouring
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path

import torch

from rlkit.advantages import compute_group_normalized_rewards
from rlkit.batch import RolloutBatch, beside_labels
from rlkit.grpo import score
from rlkit.losses import (
    REWEIGHTINGS,
    check_reweighting,
    clip_statistics,
    loss_gspo,
    sequence_ratio,
    token_ratio,
)
from rlkit.support.arguments import as_tensor, check_shape, named_function
from rlkit.support.text import visible
from rlkit.tokenization import tokenize_prompt_and_output

COLOR_BY = {
    "advantage": "advantage (one per response, no unit)",
    "log_prob": "log-probability (nats)",
    "entropy": "entropy of the next-token distribution (nats)",
    "ratio": "importance ratio w (log scale)",
    "clipped": "clipping binds",
}
PER_TOKEN = ("log_prob", "entropy", "ratio", "clipped")
BLUE, ORANGE = (86, 180, 233), (230, 159, 0)  # Okabe and Ito's, both light enough for black text
SATURATE = {
    "log_prob": 5.0,
    "ratio": math.log(4),
}  # full colour from here on, or one rare token pales all others
BOX = "background-color:#ffffff;color:#000000"  # explicit, for dark themes
PRE = f"{BOX};white-space:pre-wrap;font-family:monospace;line-height:1.5;margin:2px 0 8px 0;padding:0"


# ---- records


def annotate_rollouts(
    model,
    tokenizer,
    prompts,
    token_ids,
    rewards=None,
    *,
    group_size,
    advantages=None,
    prompt_token_ids=None,
    finish_reasons=None,
    old_log_probs=None,
    cliprange=None,
    method="grpo",
    temperature=1.0,
    microbatch_size=32,
) -> list[dict]:
    """Score N responses with ``model`` and write down, token by token, what the loss sees.

    Args (the rows of a group together, group_size each):
        prompts: N strings. token_ids: N lists, the sampler's own response ids. prompt_token_ids: likewise, or
            None.
        rewards: N numbers, or a dict of lists of N numbers, such as {"reward": ..., "format_reward": ...}.
        advantages: N numbers; None computes standard GRPO's from the rewards (group mean, standard
            deviation).
        finish_reasons: N strings. old_log_probs: N 1-D rows, one value per response token (as from
            ``response_log_probs``); None means on-policy: every ratio is 1 and nothing is clipped.
        method, cliprange: see ``compute_policy_gradient_loss``. For "gspo" a token's ratio is its sequence's.
        temperature: the sampler's.

    Returns: N dicts of plain values: group, index (in the group), prompt, response (all text but special
        tokens), the rewards by name, advantage, length (tokens), finish_reason, method, cliprange, and
        tokens, a list of {id, text, special, log_prob (nats), entropy (nats), ratio, clipped ("low", "high"
        or None: the loss's rule)}. Numbers are None for a token that cannot be scored (the first after an
        empty prompt).

    Raises: ValueError for lists of other lengths, no rewards and no advantages, and what the components
        refuse.
    """
    n_rows = len(token_ids)
    named = dict(rewards) if isinstance(rewards, Mapping) else {} if rewards is None else {"reward": rewards}
    for name, values in dict(
        named, prompts=prompts, finish_reasons=finish_reasons or [None] * n_rows
    ).items():
        if len(values) != n_rows:
            raise ValueError(f"{name}: got {len(values)}, expected {n_rows}, one for each row of token_ids")
    if not isinstance(group_size, int) or group_size < 1 or n_rows % group_size:
        raise ValueError(
            f"group_size: got {group_size!r} for {n_rows} rows, expected a positive divisor of them"
        )
    if advantages is None and "reward" not in named:
        raise ValueError("rewards: got none and no advantages either, expected one of them")
    method_function = named_function("method", method, REWEIGHTINGS)
    if old_log_probs is not None:
        check_reweighting(method_function, old_log_probs, cliprange)
    if advantages is None:
        advantages, _ = compute_group_normalized_rewards(named["reward"], group_size)
    ids = dict(prompt_token_ids=prompt_token_ids, output_token_ids=token_ids)
    batch = RolloutBatch(**tokenize_prompt_and_output(prompts, None, tokenizer, **ids))
    batch.advantages = as_tensor("advantages", advantages, "numbers", dtype=torch.float32)
    check_shape("advantages", batch.advantages, (n_rows,), "one per response")
    if old_log_probs is not None:
        batch.old_log_probs = beside_labels("old_log_probs", old_log_probs, batch.response_mask)
    batch = batch.to(next(model.parameters()).device)
    columns = [{}] * n_rows
    for rows in batch.split(batch.response_mask.any(dim=1), microbatch_size):
        scored = _score(model, batch.select(rows), method_function, cliprange, temperature)
        for i, column in zip(rows.tolist(), scored):
            columns[i] = column
    return [
        {
            "group": i // group_size,
            "index": i % group_size,
            "prompt": prompts[i],
            "response": "".join(t["text"] for t in tokens if not t["special"]),
            **{name: float(values[i]) for name, values in named.items()},
            "advantage": float(advantages[i]),
            "length": len(tokens),
            "finish_reason": finish_reasons[i] if finish_reasons else None,
            "method": getattr(method, "__name__", method),
            "cliprange": cliprange,
            "tokens": tokens,
        }
        for i, tokens in enumerate(_tokens(tokenizer, list(ids), c) for ids, c in zip(token_ids, columns))
    ]


@torch.no_grad()
def _score(model, part, method, cliprange, temperature):
    """A list with {name: one value per scored token} for each row."""
    scored, masks, result = score(model, part, temperature, None, True), part.response_mask, []
    old = scored["log_probs"] if part.old_log_probs is None else part.old_log_probs
    ratio = sequence_ratio if method is loss_gspo else token_ratio
    ratios = ratio(scored["log_probs"], old, masks).expand_as(masks)
    for i, mask in enumerate(masks):
        tokens, advantage = mask.nonzero().squeeze(1), part.advantages[i].view(1, 1)
        clipped = [None] * len(tokens)
        if part.old_log_probs is not None:  # the loss's own count, of one token at a time
            counts = [
                clip_statistics(method, advantage, ratios[i, t].view(1, 1), cliprange, mask[t].view(1, 1))
                for t in tokens
            ]
            clipped = [
                "low" if c["n_clipped_low"] else "high" if c["n_clipped_high"] else None for c in counts
            ]
        result.append(
            {
                "log_prob": scored["log_probs"][i, tokens].tolist(),
                "ratio": ratios[i, tokens].tolist(),
                "entropy": scored["token_entropy"][i, tokens].tolist(),
                "clipped": clipped,
            }
        )
    return result


def _tokens(tokenizer, ids, column):
    """One dict per token. The texts joined are the response; a character cut in two is its last token's."""
    special, seen, done, tokens = set(tokenizer.all_special_ids), [], "", []
    for i, token_id in enumerate(ids):
        if token_id in special:
            text = tokenizer.convert_ids_to_tokens(token_id)
        else:
            seen.append(token_id)
            now = tokenizer.decode(seen, clean_up_tokenization_spaces=False)
            if not special.issuperset(ids[i + 1 :]):  # while more follows, an incomplete character waits
                now = now.rstrip("\ufffd")
            text, done = now[len(done) :], now
        place = i - len(ids) + len(column.get("ratio", ()))  # < 0: not scored
        values = {name: column[name][place] if place >= 0 else None for name in PER_TOKEN}
        tokens.append({"id": token_id, "text": text, "special": token_id in special, **values})
    return tokens


# ---- colours


def _value(record, token, color_by):
    """A signed number, 0 where the colour is white; None if unknown."""
    if color_by == "clipped":
        return {"low": -1.0, "high": 1.0, None: 0.0}[token["clipped"]]
    value = record["advantage"] if color_by == "advantage" else token[color_by]
    return math.log(value) if color_by == "ratio" and value is not None else value


def _limit(records, color_by):
    """The |value| of the full colour, one for all groups so that they compare."""
    values = [abs(v) for r in records for t in r["tokens"] if (v := _value(r, t, color_by)) is not None]
    return min(max(values, default=0.0), SATURATE.get(color_by, math.inf))


def _color(value, limit):
    """White at 0 (and for None), blue at +limit, orange at -limit."""
    share = min(1.0, abs(value) / limit) if value else 0.0
    return "#" + "".join(
        f"{round(255 + (end - 255) * share):02x}" for end in (ORANGE if value and value < 0 else BLUE)
    )


def _legend(records, color_by, limit):
    """What the colours say, as HTML, from orange to blue."""
    title, (low, high) = COLOR_BY[color_by], {"log_prob": (-1, 0), "entropy": (0, 1)}.get(color_by, (-1, 1))
    stops = [limit * (low + (high - low) * k / 4) for k in range(5)] if limit else [0.0]
    labels = [f"{math.exp(v):.3g}" if color_by == "ratio" else f"{v:.2f}" if v else "0" for v in stops]
    if limit == SATURATE.get(color_by):
        labels = [labels[0] + " or less", *labels[1:-1], labels[-1] + " or more" * (high > 0)]
    if color_by == "clipped":
        title += f" ({records[0]['method']}, cliprange e = {records[0]['cliprange']})"
        stops, labels = (-1, 0, 1), ("low: A < 0, w < 1 - e", "no", "high: w > 1 + e")
    return (
        f"colour: {escape(title)} "
        + " ".join(
            f'<span style="background-color:{_color(v, limit or 1)};border:1px solid #999999;padding:0 4px">'
            f"{escape(label)}</span>"
            for v, label in zip(stops, labels)
        )
        + " (underlined: clipped)"
    )


def _shown(token):
    """The token's text with line breaks, tabs and control characters made visible; line breaks are kept."""
    return visible(token["text"].replace("\n", "↵\n").replace("\t", "⇥")) or "▯"


def _headline(record):
    def number(name, form=".3g"):
        return format(record[name], form) if record.get(name) is not None else "–"

    return (
        f"#{record['index']} · reward {number('reward')} · format {number('format_reward')} · advantage "
        f"{number('advantage', '+.2f')} · {record['length']} tokens · finish: "
        f"{record['finish_reason'] or '–'}"
    )


def _check(records, color_by, group=None):
    groups = sorted({record["group"] for record in records})
    if color_by not in COLOR_BY:
        raise ValueError(f"color_by: got {color_by!r}, expected one of {', '.join(COLOR_BY)}")
    if not groups or group is not None and group not in groups:
        raise ValueError(f"group: got {group!r}, but the records' groups are {groups}; expected one of them")
    return groups if group is None else [group]


# ---- views


def rollout_html(records, color_by="advantage", group=None) -> str:
    """Static HTML of one group, or of all (folded, the first open). A token's numbers show under the pointer.

    color_by: a key of ``COLOR_BY``. All model text is escaped. A clipped token is also underlined, and the
    headers are text, for pages that strip inline styles. ValueError: unknown color_by or group.
    """
    groups, limit = _check(records, color_by, group), _limit(records, color_by)
    prompts = {r["prompt"] for r in records}
    start = (
        os.path.commonprefix(list(prompts)).rfind("\n") + 1 if len(prompts) > 1 else 0
    )  # instructions all share
    parts = [
        f'<div class="mathjax_ignore tex2jax_ignore" style="{BOX};padding:8px">',
        f"<div>{_legend(records, color_by, limit)}</div>",
    ]
    for i, g in enumerate(groups):
        rows = [r for r in records if r["group"] == g]
        rewards = [r["reward"] for r in rows if r.get("reward") is not None]
        mean = f", mean reward {sum(rewards) / len(rewards):.3g}" if rewards else ""
        parts.append(
            f"<details{'' if i else ' open'}><summary><b>group {escape(str(g))}</b>: {len(rows)} "
            f"responses{mean}</summary>"
            f'<pre style="{PRE}">{"… " if start else ""}{escape(rows[0]["prompt"][start:])}</pre>'
        )
        parts += [
            f'<div><b>{escape(_headline(r))}</b></div><pre style="{PRE}">'
            + "".join(_span(r, t, color_by, limit) for t in r["tokens"])
            + "</pre>"
            for r in rows
        ]
        parts.append("</details>")
    return "\n".join([*parts, "</div>"])


def _span(record, token, color_by, limit):
    known = ", ".join(
        f"{name} {token[name]:.3g}" if name != "clipped" else f"clipped {token[name]}"
        for name in PER_TOKEN
        if token[name] is not None
    )
    text = escape(_shown(token))
    for tag, wanted in (("i", token["special"]), ("u", token["clipped"])):
        text = f"<{tag}>{text}</{tag}>" if wanted else text
    return (
        f'<span style="background-color:{_color(_value(record, token, color_by), limit)}" '
        f'title="{escape(known)}">{text}</span>'
    )


def rollout_browser(records):
    """ipywidgets: a group's number and a colour to choose, the group below."""
    import ipywidgets

    class Browser(ipywidgets.VBox):
        def __repr__(self):  # what readers without a kernel see in its place
            return f"rollout_browser: {len(records)} responses (choosing needs a running kernel)"

    group = ipywidgets.Dropdown(options=_check(records, "advantage"), description="group")
    color_by = ipywidgets.Dropdown(options=list(COLOR_BY), description="colour")
    page = ipywidgets.HTML()

    def redraw(_=None):
        page.value = rollout_html(records, color_by.value, group.value)

    for knob in (group, color_by):
        knob.observe(redraw, names="value")
    redraw()
    return Browser([group, color_by, page])


def save_html(records, path) -> Path:
    """Write one HTML page with all colourings, folded and without scripts. Returns the path."""
    views = [
        f"<details{'' if i else ' open'}><summary><b>coloured by {name}</b></summary>\n"
        f"{rollout_html(records, name)}\n</details>"
        for i, name in enumerate(COLOR_BY)
    ]
    path = Path(path)
    path.write_text(
        "\n".join(
            [
                '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Rollouts</title>'
                f'</head><body style="{BOX};font-family:sans-serif">',
                *views,
                "</body></html>\n",
            ]
        ),
        encoding="utf-8",
    )
    return path
