"""Decoding with a key/value cache that holds every shared piece of a prompt once.

A rollout batch repeats itself: all its prompts open with the same instructions, and each prompt is there G
times. The
cache therefore has three parts: ``common`` (one copy for all rows), ``group`` (one copy per prompt: what is
left of it) and ``own`` (one copy per response: its new tokens). Attention over the first two is a matrix
product for many queries at once, where a plain cache reads a separate copy per response. The softmax runs
over all three parts together, so the result is ordinary causal attention, equal up to rounding.

`SharedPrefixDecoder` works for any architecture that takes its attention function from transformers'
AttentionInterface and has plain causal attention (Olmo2, Llama, Qwen, GPT-2, ...). `PlainDecoder` does the
same job with transformers' own cache, `FullDecoder` without any. `make_decoder` takes the first of the three
that agrees with plain full forward passes of the model itself.

A decoder is used as ``start(prompts, counts)``, then ``step(tokens)`` again and again, with ``keep(rows)`` in
between.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager
from os.path import commonprefix

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache

from rlkit.support.probes import PROBED, binding_window, check_causal, judged, say_once

NAME = "rlkit_shared_prefix"
_active = threading.local()


class NotPlainAttention(Exception):
    """The model's attention is not (or not replaceable by) softmax(q k^T) v over all earlier positions."""


class _Part:
    """Keys and values of one part of one layer, each (heads, rows, length, head size), growing along the
    length.

    Heads come first so that one head's rows are one matrix.
    """

    def __init__(self):
        self.buffers, self.length = None, 0

    def append(self, *states: torch.Tensor) -> None:
        need = self.length + states[0].shape[2]
        if self.buffers is None or need > self.buffers[0].shape[2]:
            room = need if need > 1 else 16  # a whole prompt part at once, or responses token by token
            grown = [s.new_empty(*s.shape[:2], max(room, 2 * self.length), s.shape[3]) for s in states]
            for new, old in zip(grown, self.views()):
                new[:, :, : self.length] = old
            self.buffers = grown
        for buffer, state in zip(self.buffers, states):
            buffer[:, :, self.length : need] = state
        self.length = need

    def views(self) -> list[torch.Tensor]:
        return [buffer[:, :, : self.length] for buffer in self.buffers or ()]

    def keep(self, rows: torch.Tensor) -> None:
        self.buffers = [buffer[:, rows] for buffer in self.buffers] if self.buffers else None


class SharedPrefixCache(Cache):
    """The three parts of every layer, and which response belongs to which prompt."""

    def __init__(self):
        super().__init__(layers=[])
        self.parts: list[dict[str, _Part]] = []
        self.calls = [0, 0]  # cache updates and attentions of this forward pass
        self.group_bias: torch.Tensor | None = None
        self.slots = self.places = None

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        while len(self.parts) <= layer_idx:
            self.parts.append({"common": _Part(), "group": _Part(), "own": _Part()})
        self.parts[layer_idx]["own"].append(key_states.transpose(0, 1), value_states.transpose(0, 1))
        self.layer, self.fed, self.calls[0] = layer_idx, (key_states, value_states), self.calls[0] + 1
        return key_states, value_states

    def promote(self, part: str) -> None:
        """What was fed so far becomes ``part``; the rows' own part starts again, empty."""
        for parts in self.parts:
            parts[part], parts["own"] = parts["own"], _Part()

    def keep_own(self, rows: torch.Tensor) -> None:
        for parts in self.parts:
            parts["own"].keep(rows)

    def keep_groups(self, groups: torch.Tensor) -> None:
        for parts in self.parts:
            parts["group"].keep(groups)
        if self.group_bias is not None:
            self.group_bias = self.group_bias[:, groups]

    def assign(self, group_of_row: torch.Tensor) -> None:
        """group_of_row: (rows,) long, ascending from 0. A group's rows become one padded block of queries."""
        counts = torch.bincount(group_of_row)
        first = counts.cumsum(0) - counts
        within = torch.arange(len(group_of_row), device=group_of_row.device) - first[group_of_row]
        width = int(counts.max())
        self.places = group_of_row * width + within  # row -> place in the block
        self.slots = None  # None: rows are a full block already
        if len(counts) * width > len(group_of_row):
            self.slots = group_of_row.new_zeros(len(counts) * width)  # place -> row; padding repeats row 0
            self.slots[self.places] = torch.arange(len(group_of_row), device=group_of_row.device)

    # what transformers may ask of a cache; positions are always given, masks are made here
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return (
            sum(part.length for part in self.parts[layer_idx].values()) if layer_idx < len(self.parts) else 0
        )

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0


def shared_prefix_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Attention of ``query`` (rows, heads, T, head size) over the parts of the active cache."""
    cache: SharedPrefixCache | None = getattr(_active, "cache", None)
    if cache is None:
        raise RuntimeError(f"attention {NAME!r} works only inside rlkit's sampler")
    if (
        attention_mask is not None
        or dropout
        or key is not cache.fed[0]
        or value is not cache.fed[1]
        or any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    ):
        raise NotPlainAttention
    cache.calls[1] += 1
    parts = cache.parts[cache.layer]
    rows, heads, new, size = query.shape
    kv_heads = key.shape[1]
    repeat = heads // kv_heads
    # (kv heads, rows, repeat * T, size): query heads that share keys are further queries of the same block
    q = (query * (size**-0.5 if scaling is None else scaling)).reshape(rows, kv_heads, repeat * new, size)
    q = q.transpose(0, 1).contiguous()
    scores, values = [], []  # per part: (kv heads, rows, repeat * T, length), and p -> p v
    if parts["common"].length:  # one matrix product per head for all rows
        ck, cv = (x[:, 0] for x in parts["common"].views())
        scores.append((q.flatten(1, 2) @ ck.mT).view(*q.shape[:3], -1))
        values.append(lambda p: (p.flatten(1, 2) @ cv).view(*q.shape[:3], -1))
    if parts["group"].length:  # one per head and prompt; here T is 1
        gk, gv = parts["group"].views()

        def block(x):  # rows, repeat -> groups, width * repeat
            x = x if cache.slots is None else x[:, cache.slots]
            return x.reshape(kv_heads, gk.shape[1], -1, x.shape[-1])

        def unblock(x):
            x = x.view(kv_heads, -1, repeat, x.shape[-1])
            return x if cache.slots is None else x[:, cache.places]

        s = block(q) @ gk.mT
        scores.append(unblock(s if cache.group_bias is None else s + cache.group_bias.to(s.dtype)))
        values.append(lambda p: unblock(block(p) @ gv))
    k, v = parts["own"].views()
    s = q @ k.mT
    if new > 1:  # a prompt part, fed at once: own holds just these T positions
        later = torch.ones(new, k.shape[2], dtype=torch.bool, device=s.device).triu(k.shape[2] - new + 1)
        s = s.masked_fill(later.repeat(repeat, 1), float("-inf"))
    scores.append(s)
    values.append(lambda p: p @ v)
    probs = torch.cat(scores, dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    pieces = probs.split([s.shape[-1] for s in scores], dim=-1)
    out = values[0](pieces[0])
    for of, p in zip(values[1:], pieces[1:]):
        out = out + of(p)
    return out.transpose(0, 1).reshape(rows, heads, new, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, shared_prefix_attention)


def _accepts(model, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


class SharedPrefixDecoder:
    """Feeds prompts, then one token per row at a time, through ``model`` over a SharedPrefixCache.

    Attention windows are left out: rows must not be longer than the model's shortest.
    """

    def __init__(self, model):
        if not (getattr(model, "_supports_attention_backend", False) and _accepts(model, "position_ids")):
            raise NotPlainAttention
        self.model, self.config = model, model.config.get_text_config()
        self.extra = {"logits_to_keep": 1} if _accepts(model, "logits_to_keep") else {}

    @contextmanager
    def _attention(self):
        before = self.config._attn_implementation
        self.config._attn_implementation = NAME
        _active.cache = self.cache
        try:
            yield
        finally:
            self.config._attn_implementation = before
            _active.cache = None

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.cache.calls = [0, 0]
        with self._attention():
            logits = self.model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                **self.extra,
            ).logits
        if self.cache.calls[0] != self.cache.calls[1] or not self.cache.calls[0]:
            raise NotPlainAttention
        return logits[:, -1]

    def start(self, prompts: list[list[int]], counts: list[int]) -> torch.Tensor:
        """Logits (sum of counts, vocabulary) of the first new token; row order: prompt by prompt."""
        device = self.model.device
        self.cache = SharedPrefixCache()
        shared = min(
            len(commonprefix(prompts)), min(map(len, prompts)) - 1
        )  # the last token is fed on its own
        if shared:
            ids = torch.tensor([prompts[0][:shared]], device=device)
            self._forward(ids, torch.arange(shared, device=device)[None])
            self.cache.promote("common")
        rest = [prompt[shared:-1] for prompt in prompts]
        longest = max(map(len, rest))
        if longest:
            lengths = torch.tensor([len(r) for r in rest], device=device)
            filler = prompts[0][:1]  # masked below, so any id will do
            ids = torch.tensor([r + filler * (longest - len(r)) for r in rest], device=device)
            self._forward(
                ids, torch.arange(shared, shared + longest, device=device)[None].expand(len(ids), -1)
            )
            self.cache.promote("group")
            padding = torch.arange(longest, device=device) >= lengths[:, None]
            if padding.any():
                self.cache.group_bias = padding.float().masked_fill(padding, float("-inf"))[None, :, None]
        self.group_of_row = torch.arange(len(prompts), device=device)
        self.cache.assign(self.group_of_row)
        self.positions = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        logits = self.step(torch.tensor([prompt[-1] for prompt in prompts], device=device))
        rows = self.group_of_row.repeat_interleave(torch.tensor(counts, device=device))
        self.keep(rows)
        return logits[rows]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens (rows,) long, one per row -> logits (rows, vocabulary) of the next one."""
        logits = self._forward(tokens[:, None], self.positions[:, None])
        self.positions = self.positions + 1
        return logits

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with these rows (long indices, ascending; a row may come several times)."""
        self.positions = self.positions[rows]
        self.cache.keep_own(rows)
        groups, self.group_of_row = self.group_of_row[rows].unique_consecutive(return_inverse=True)
        self.cache.keep_groups(groups)
        self.cache.assign(self.group_of_row)


class PlainDecoder:
    """The same for any causal model that takes ``past_key_values``: transformers' own cache, one copy per
    row.

    All prompts of a batch must have one length, so that nothing is padded; each is computed once, then
    repeated.
    """

    def __init__(self, model):
        if not _accepts(model, "past_key_values"):
            raise NotPlainAttention
        self.model = model
        self.extra = {"logits_to_keep": 1} if _accepts(model, "logits_to_keep") else {}
        self.takes_positions = _accepts(model, "position_ids")

    def _begin(self) -> None:
        self.cache, self.length = DynamicCache(config=self.model.config), 0

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(self.length, self.length + ids.shape[1], device=ids.device)
        self.length += ids.shape[1]
        extra = self.extra | ({"position_ids": positions.expand_as(ids)} if self.takes_positions else {})
        return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, **extra).logits[:, -1]

    def start(self, prompts: list[list[int]], counts: list[int]) -> torch.Tensor:
        self._begin()
        device = self.model.device
        logits = self._forward(torch.tensor(prompts, device=device))
        rows = torch.arange(len(prompts), device=device).repeat_interleave(
            torch.tensor(counts, device=device)
        )
        self.keep(rows)
        return logits[rows]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._forward(tokens[:, None])

    def keep(self, rows) -> None:
        self.cache.reorder_cache(rows)


class FullDecoder(PlainDecoder):
    """The same for a model whose cache cannot be trusted: every step is a full forward pass."""

    def __init__(self, model):
        self.model, self.cache = model, None
        self.extra = {"logits_to_keep": 1} if _accepts(model, "logits_to_keep") else {}

    def _begin(self) -> None:
        self.ids = None

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], dim=1)
        return self.model(input_ids=self.ids, use_cache=False, **self.extra).logits[:, -1]

    def keep(self, rows) -> None:
        self.ids = self.ids[rows]


WAYS = {
    SharedPrefixDecoder: "shared prompts",
    PlainDecoder: "transformers' own cache, every prompt once per response",
    FullDecoder: "a full forward pass per token, without a cache",
}


def make_decoder(model, longest: float = 0) -> SharedPrefixDecoder | PlainDecoder:
    """The fastest decoder that is right for this model and rows of up to ``longest`` tokens.

    Right is what a plain full forward pass of each row says: see `rlkit.support.probes`. One that is not the
    fastest is said in one line. Raises ValueError for a model that none is right for.
    """
    check_causal(model)
    window, why = binding_window(model, longest), "an attention window shorter than the rows"
    if window > PROBED:  # too long to try; transformers' own cache knows it
        kind = PlainDecoder
    else:
        kinds = [*WAYS][bool(window) :]

        def fastest(probe):
            return next((kind for kind in kinds if decodes_right(model, kind, probe)), None)

        kind = judged(model, "decoder", window, fastest)
    if not window:
        why = "what is faster does not agree with its full forward pass"
    if kind is None:
        raise ValueError(
            f"model: got {type(model).__name__}, whose distributions depend on more than the tokens before "
            "(no way of sampling agrees with its forward pass); expected a causal language model"
        )
    if kind is not SharedPrefixDecoder:
        say_once(f"sampling: {type(model).__name__} by {WAYS[kind]} ({why})")
    return kind(model)


def decodes_right(model, kind, probe) -> bool:
    """Whether a decoder agrees with the probe: two prompts, one twice, a step, a dropped row, a step."""
    shorter = len(probe.rows[1]) - 2
    lengths = [shorter + 3 * (kind is SharedPrefixDecoder), shorter, shorter]
    tokens = torch.tensor([row[n : n + 2] for row, n in zip(probe.rows, lengths)], device=model.device)
    kept = torch.tensor([0, 2], device=model.device)
    try:
        decoder = kind(model)
        first = decoder.start([row[:n] for row, n in zip(probe.rows[:2], lengths)], [1, 2])
        second = decoder.step(tokens[:, 0])
        decoder.keep(kept)
        third = decoder.step(tokens[kept, 1])
    except Exception:  # whatever a model without such attention or such a cache raises: it cannot
        return False
    seen = [(row, 0, first[row]) for row in range(3)] + [(row, 1, second[row]) for row in range(3)]
    seen += [(row, 2, third[i]) for i, row in enumerate(kept.tolist())]
    log_p = [(row, lengths[row] - 1 + t, z[None].float().log_softmax(dim=-1)) for row, t, z in seen]
    return probe.agrees(torch.cat([probe.distances(*found) for found in log_p]))
