"""Sampling in process, from any causal language model of transformers, on CPU, CUDA or MPS.

The loop is the textbook one: feed a token, get logits, draw the next token. Around it: the prompts' shared
parts are computed once (see shared_prefix), responses that are done leave the batch, and stop strings are
found in the text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from hashlib import blake2b
from typing import Any

import torch

from rlkit.log_probs import label_log_probs, token_entropy
from rlkit.samplers.base import Completion, SamplingParams, end_of_text_ids, prompt_ids
from rlkit.samplers.shared_prefix import PlainDecoder, make_decoder
from rlkit.support.adapters import for_sampling, inner, merged
from rlkit.support.probes import evaluating, positions
from rlkit.support.progress import progress
from rlkit.tokenization import cut_at_stop, decode, hidden_ids

# --- distributions


def penalize_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Makes tokens that occurred before less likely: positive logits are divided by ``penalty``, negative
    multiplied.

    logits: (rows, vocab). seen: (rows, vocab) bool, tokens of the prompt and of the response so far.
    Source: Keskar et al. 2019, CTRL, section 4.1, in the sign-aware form that transformers and vLLM use.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def sampling_log_probs(
    logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0
) -> torch.Tensor:
    """Log-probabilities (rows, vocab), float32, of the distribution that is sampled from; -inf for what is
    cut off.

    Temperature first; then min-p (keep p >= min_p * max p), top-k (keep the k likeliest), top-p (keep the
    fewest of the likeliest whose probabilities, among those kept so far, add up to at least top_p): vLLM's
    order. What is kept is normalised again. All off: log_softmax(logits / temperature).

    >>> sampling_log_probs(torch.tensor([[.5, .3, .2]]).log(), top_p=.7).exp()
    tensor([[0.6250, 0.3750, 0.0000]])
    """
    log_probs = (logits.float() / temperature).log_softmax(dim=-1)
    if min_p > 0:
        too_small = log_probs < log_probs.amax(dim=-1, keepdim=True) + math.log(min_p)
        log_probs = log_probs.masked_fill(too_small, -math.inf)
    if 0 < top_k < log_probs.shape[-1] or top_p < 1:
        ordered, index = log_probs.sort(dim=-1, descending=True, stable=True)
        if top_k > 0:
            ordered[:, top_k:] = -math.inf
        if top_p < 1:
            probs = ordered.softmax(dim=-1)
            ordered = ordered.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, -math.inf)
        log_probs = torch.empty_like(log_probs).scatter_(-1, index, ordered)
    return log_probs if min_p <= 0 and top_k <= 0 and top_p >= 1 else log_probs.log_softmax(dim=-1)


def draw(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token per row by inverting the cumulative distribution; a token of probability 0 is never drawn.

    log_probs: (rows, vocab). uniforms: (rows,) in [0, 1), float64 where the device has it. Returns (rows,)
        long.
    """
    cumulative = log_probs.exp().cumsum(dim=-1, dtype=uniforms.dtype)
    below_total = cumulative[:, -1:] * (
        1 - 2 * torch.finfo(uniforms.dtype).eps
    )  # rounding must not reach the total
    token = torch.searchsorted(cumulative, uniforms[:, None] * below_total, right=True).squeeze(-1)
    return token.clamp(max=log_probs.shape[-1] - 1)  # NaN would be out of range


def row_uniforms(seed: int, prompt_index: int, copy: int, count: int) -> torch.Tensor:
    """The (count,) float64 uniforms of one response, a function of these numbers alone.

    So a response's randomness depends neither on the batch it is computed in nor on when other rows end, two
    equal prompts never get the same one, and a larger ``count`` only continues the stream.
    """
    key = int.from_bytes(blake2b(f"{seed}/{prompt_index}/{copy}".encode(), digest_size=4).digest(), "little")
    return torch.rand(count, generator=torch.Generator().manual_seed(key), dtype=torch.float64)


# --- stop strings


class StopStrings:
    """Finds stop strings in growing responses without decoding every response at every step.

    Only tokens whose text can hold the END of a stop string (`candidates`) make it look, and then at a tail
    of the response only. What counts in the end is the decoded text: see `cut`.
    """

    def __init__(
        self, stop: tuple[str, ...], tokenizer, token_texts: list[str], hidden: Collection[int] = ()
    ):
        self.stop, self.tokenizer, self.hidden = stop, tokenizer, hidden
        self.tail = (
            max((len(s.encode()) for s in stop), default=0) + 4
        )  # a token is at least one byte of text
        ends = {s[k:] for s in stop for k in range(1, len(s))}
        broken = any(not s.isascii() for s in stop)  # may share a character with another token
        self.candidates = torch.tensor(
            [
                any(s in text for s in stop)
                or any(text.startswith(end) for end in ends)
                or (broken and "\ufffd" in text)
                for text in token_texts
            ]
        )

    def met(self, ids: list[int]) -> bool:
        """Whether the text of ``ids`` (the last ``tail`` of a response are enough) holds a stop string."""
        text = decode(self.tokenizer, ids, self.hidden)
        return any(s in text for s in self.stop)

    def cut(self, ids: list[int]) -> tuple[str, int | None]:
        """The text through the first stop string: see `cut_at_stop`."""
        return cut_at_stop(self.tokenizer, ids, self.stop, self.hidden)


def token_texts(tokenizer, size: int) -> list[str]:
    """The text that each of ``size`` ids adds after another token; unknown ids add none."""
    known = min(size, len(tokenizer))
    anchor = next((ids for ids in (tokenizer.encode(c, add_special_tokens=False) for c in "a.0") if ids), [])
    start = len(decode(tokenizer, anchor))
    texts = tokenizer.batch_decode([anchor + [i] for i in range(known)], clean_up_tokenization_spaces=False)
    return [text[start:] for text in texts] + [""] * (size - known)


# --- the sampler


class TransformersSampler:
    """Samples with the model object that is being trained: nothing is copied, `sync_weights` has nothing to
    do.

    model: any causal LM of transformers, or a ``PeftModel`` of one. tokenizer: its tokenizer.
    batch_size: most responses computed at once. None: 512; lower it where memory is short.
    compact_at: share of finished rows at which they are dropped from the batch, in (0, 1].
    eos_token_ids: ids that end a response. None: those of the tokenizer, the model's config and its
        generation config (from which nothing else is ever taken).
    show_progress: a bar over the responses, where somebody watches.

    Log-probs are those of `sampling_log_probs` for the token drawn. At temperature 0 the likeliest token is
    taken and its log-prob is reported at temperature 1, as vLLM does (a point mass would make them all 0).

    The same seed, prompts and weights give the same responses. Random numbers belong to (seed, index of the
    prompt, index of the copy), so they do not change with batch_size, compact_at, n or max_tokens; the logits
    may differ in their last bits between batch shapes, so on a change of those a near tie may, rarely, fall
    the other way.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        batch_size: int | None = None,
        compact_at: float = 0.25,
        eos_token_ids: list[int] | None = None,
        show_progress: bool = False,
    ):
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"model: got the encoder-decoder {type(model).__name__}, expected a causal language model"
            )
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1 or None")
        if not 0 < compact_at <= 1:
            raise ValueError(f"compact_at: got {compact_at}, expected a share in (0, 1]")
        self.model, self.tokenizer = inner(model), tokenizer
        self.batch_size = batch_size or 512
        self.compact_at = compact_at
        self.eos_token_ids = (
            end_of_text_ids(model, tokenizer) if eos_token_ids is None else sorted(set(eos_token_ids))
        )
        self.show_progress = show_progress
        self._decoder: Any = None
        self._token_texts, self._stop = None, {}

    def generate(self, prompts: list[str], params: SamplingParams, n: int = 1) -> list[list[Completion]]:
        """``n`` completions per prompt, in order. Prompts are encoded by ``encode_prompts``.

        Raises ValueError for values out of range, an empty prompt, or a prompt that leaves no room for
        max_tokens.
        """
        if n < 1:
            raise ValueError(f"n: got {n!r}, expected at least 1")
        room = positions(self.model.config)
        encoded = prompt_ids(self.tokenizer, prompts, params.max_tokens, room)
        if not prompts:
            return []
        rows: dict[tuple[int, int], Completion] = {}
        total = n * len(prompts)
        with (
            for_sampling(self.model),
            torch.inference_mode(),
            evaluating(self.model),
            progress(total=total, desc="sampling", disable=None if self.show_progress else True) as bar,
        ):
            self._decoder = make_decoder(self.model, max(map(len, encoded)) + params.max_tokens)
            for batch in self._batches(encoded, n):
                rows |= dict(self._generate_batch(encoded, batch, params))
                bar.update(len(batch))
            self._decoder.cache = None  # its memory is the training's now
        return [[rows[i, copy] for copy in range(n)] for i in range(len(prompts))]

    def sync_weights(self, model: torch.nn.Module, step: int | None = None) -> None:
        """Nothing for the model that is already held, else a copy of ``model``'s weights into it."""
        if inner(model) is not self.model:
            with merged(model):
                self.model.load_state_dict(model.state_dict())

    def close(self) -> None:
        """Nothing to release."""

    def _batches(self, prompt_ids: list[list[int]], n: int):
        """Lists of at most batch_size rows (prompt index, copy), prompts of similar length together."""
        one_length = isinstance(self._decoder, PlainDecoder)
        batch = []
        for i in sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i])):
            for copy in range(n):
                other_length = one_length and batch and len(prompt_ids[batch[-1][0]]) != len(prompt_ids[i])
                if len(batch) == self.batch_size or other_length:
                    yield batch
                    batch = []
                batch.append((i, copy))
        yield batch

    def _stop_strings(self, stop: tuple[str, ...], vocabulary: int) -> StopStrings:
        if stop not in self._stop:
            if stop and self._token_texts is None:
                self._token_texts = token_texts(self.tokenizer, vocabulary)
            hidden = hidden_ids(self.tokenizer, self.eos_token_ids, stop)
            texts = self._token_texts or [""] * vocabulary
            self._stop[stop] = StopStrings(stop, self.tokenizer, texts, hidden)
        return self._stop[stop]

    def _generate_batch(self, prompt_ids, batch, params: SamplingParams):
        """Yields ((prompt index, copy), Completion) for every row of ``batch``."""
        counts = Counter(i for i, _ in batch)
        logits = self._decoder.start([prompt_ids[i] for i in counts], list(counts.values()))
        device, vocabulary = logits.device, logits.shape[-1]
        stops = self._stop_strings(tuple(params.stop), vocabulary)
        is_eos = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        is_eos[[i for i in self.eos_token_ids if i < vocabulary]] = True
        may_end = is_eos | stops.candidates.to(device)  # tokens after which a row may be done
        uniforms = torch.stack([row_uniforms(params.seed, i, copy, params.max_tokens) for i, copy in batch])
        uniforms = uniforms.T.to(device, torch.float32 if device.type == "mps" else torch.float64)
        seen = None
        if params.repetition_penalty != 1:
            seen = torch.zeros(len(batch), vocabulary, dtype=torch.bool, device=device)
            for row, (i, _) in enumerate(batch):
                seen[row, prompt_ids[i]] = True

        tokens = torch.zeros(len(batch), params.max_tokens, dtype=torch.long, device=device)
        log_probs = torch.zeros(len(batch), params.max_tokens, device=device)
        entropies = torch.zeros_like(log_probs)
        lengths = [params.max_tokens] * len(batch)
        alive = torch.arange(len(batch), device=device)  # row of ``batch`` behind each row of ``logits``
        running = [True] * len(batch)
        n_alive = len(batch)
        for step in range(params.max_tokens):
            if seen is not None:
                logits = penalize_repetition(logits.float(), seen[alive], params.repetition_penalty)
            if params.temperature == 0:
                distribution = logits.float().log_softmax(dim=-1)
                token = distribution.argmax(dim=-1)
            else:
                distribution = sampling_log_probs(
                    logits, params.temperature, params.top_p, params.top_k, params.min_p
                )
                token = draw(distribution, uniforms[step, alive])
            tokens[alive, step] = token
            log_probs[alive, step] = label_log_probs(distribution, token)
            entropies[alive, step] = token_entropy(distribution)
            if seen is not None:
                seen[alive, token] = True

            look = may_end[token].nonzero().squeeze(-1)
            if len(look):
                rows = alive[look]
                tail = tokens[rows, max(0, step + 1 - 2 * stops.tail) : step + 1].tolist()
                for row, ids, eos in zip(rows.tolist(), tail, is_eos[token[look]].tolist()):
                    if running[row] and (eos or stops.met(ids)):
                        running[row], lengths[row] = False, step + 1
                        n_alive -= 1
            if n_alive == 0 or step + 1 == params.max_tokens:
                break
            if len(alive) - n_alive >= self.compact_at * len(alive):
                keep = torch.tensor(
                    [k for k, row in enumerate(alive.tolist()) if running[row]], device=device
                )
                self._decoder.keep(keep)
                alive, token = alive[keep], token[keep]
            logits = self._decoder.step(token)

        if not log_probs.isfinite().all():
            raise ValueError(
                "model: its logits hold NaN or inf, expected finite ones (have its weights diverged?)"
            )
        for row, *columns in zip(batch, tokens.tolist(), log_probs.tolist(), entropies.tolist()):
            ids, log_p, entropy = columns
            ids = ids[: lengths.pop(0)]
            ended = ids[-1] in self.eos_token_ids
            text, completed = stops.cut(ids)
            ids = ids if completed is None else ids[:completed]
            reason = "length" if completed is None and not ended else "stop"
            n = len(ids)
            yield row, Completion(text, ids, reason, log_p[:n], list(prompt_ids[row[0]]), entropy[:n])
