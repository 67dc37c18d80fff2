"""The in-process sampler: what it draws, from which distribution, and where it stops."""

import itertools
import json
import math

import pytest
import torch
import transformers
from scipy.stats import chi2
from tiny_model import chat_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rlkit.samplers import Completion, Sampler, SamplingParams, TransformersSampler, make_sampler
from rlkit.samplers.shared_prefix import PlainDecoder, SharedPrefixDecoder, make_decoder
from rlkit.samplers.transformers_sampler import draw, penalize_repetition, row_uniforms, sampling_log_probs
from rlkit.tasks.prompts import load_prompt

INTRO = "A conversation between User and Assistant. The Assistant thinks first. "
QUESTIONS = ["Tom has 3 plums. How many?", "x", "Ann has 5 boxes with 4 pears in each. How many pears?", "x"]
PROMPTS = [INTRO + q for q in QUESTIONS]
SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE with few merges: tags, and characters outside ASCII, take several tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        PROMPTS + ["so 4 </answer> more.>>"] * 3,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|pad|>", "<|end|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>")


def random_model(kind, vocabulary, spread=0.15, **options):
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(
        vocab_size=vocabulary, pad_token_id=0, eos_token_id=1, bos_token_id=None, **options
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=spread)  # sharper distributions than a fresh model's
    return model.eval()


@pytest.fixture(scope="module")
def olmo(tokenizer):
    return random_model("Olmo2", len(tokenizer), num_key_value_heads=4, **SMALL)


def ids_of(groups):
    return [[completion.token_ids for completion in group] for group in groups]


class ScriptedModel(torch.nn.Module):
    """Puts all probability on the next id of a script, whatever it is fed."""

    def __init__(self, script, vocabulary, prompt_length):
        super().__init__()
        self.config = transformers.Olmo2Config(
            vocab_size=vocabulary, num_hidden_layers=1, hidden_size=4, num_attention_heads=1, eos_token_id=1
        )
        self.script, self.prompt_length, self.device = script, prompt_length, torch.device("cpu")
        self.dtype, self.calls = torch.float32, 0
        self.embedding = torch.nn.Embedding(1, 1)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        self.calls += 1
        seen = 0
        if past_key_values is not None:
            seen, nothing = past_key_values.get_seq_length(), torch.zeros(*input_ids.shape, 1)[:, None]
            past_key_values.update(nothing, nothing, 0)
        at = range(seen + 1 - self.prompt_length, seen + 1 - self.prompt_length + input_ids.shape[1])
        said = torch.tensor([self.script[max(t, 0)] for t in at])
        logits = 50.0 * torch.nn.functional.one_hot(said, self.config.vocab_size)
        logits = logits.expand(len(input_ids), -1, -1)
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)


def say(tokenizer, script, stop=(), max_tokens=None, eos_token_ids=None) -> Completion:
    """What the sampler makes of a model that says these ids."""
    model = ScriptedModel(script + [5] * 40, len(tokenizer), len(tokenizer("x")["input_ids"]))
    sampler = TransformersSampler(model, tokenizer, eos_token_ids=eos_token_ids)
    make_decoder(model)  # tries the model out
    model.calls = 0
    completion = sampler.generate(["x"], SamplingParams(max_tokens=max_tokens or len(script) + 5, stop=stop))[
        0
    ][0]
    assert model.calls == len(completion.token_ids)  # it ended at once, not only afterwards
    return completion


# --- the distribution sampled from


@pytest.mark.parametrize(
    "kind, options, decoder",
    [
        ("Olmo2", dict(SMALL, num_key_value_heads=4, tie_word_embeddings=False), SharedPrefixDecoder),
        ("Olmo2", dict(SMALL, num_key_value_heads=4, tie_word_embeddings=True), SharedPrefixDecoder),
        ("Llama", dict(SMALL, num_key_value_heads=2, tie_word_embeddings=False), SharedPrefixDecoder),
        ("Llama", dict(SMALL, num_key_value_heads=1, tie_word_embeddings=True), SharedPrefixDecoder),
        (
            "Qwen3",
            dict(SMALL, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False),
            SharedPrefixDecoder,
        ),
        ("Qwen2", dict(SMALL, num_key_value_heads=2, tie_word_embeddings=True), SharedPrefixDecoder),
        (
            "GPT2",
            dict(n_embd=64, n_layer=2, n_head=4, n_positions=256, tie_word_embeddings=True),
            SharedPrefixDecoder,
        ),
        (
            "GPT2",
            dict(n_embd=64, n_layer=2, n_head=4, n_positions=256, tie_word_embeddings=False),
            SharedPrefixDecoder,
        ),
        ("GPTNeoX", SMALL, SharedPrefixDecoder),
        ("Mistral", dict(SMALL, num_key_value_heads=2, sliding_window=16), PlainDecoder),  # a window
        (
            "Mistral",
            dict(SMALL, num_key_value_heads=2, sliding_window=99),
            SharedPrefixDecoder,
        ),  # cannot bind
        ("Gemma2", dict(SMALL, num_key_value_heads=2, head_dim=16), PlainDecoder),  # capped logits
        (
            "GptOss",
            dict(
                SMALL,
                num_key_value_heads=2,
                head_dim=16,
                num_local_experts=4,
                layer_types=["full_attention"] * 2,
            ),
            PlainDecoder,
        ),  # sinks
        (
            "DeepseekV3",
            dict(
                SMALL,
                num_key_value_heads=4,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=16,
                qk_nope_head_dim=16,
                v_head_dim=24,
                n_routed_experts=2,
                n_group=1,
                topk_group=1,
                num_experts_per_tok=1,
                moe_intermediate_size=16,
            ),
            PlainDecoder,
        ),  # keys made after the cache
        ("Bloom", dict(hidden_size=64, n_layer=2, n_head=4), PlainDecoder),  # biases by distance
    ],
)
def test_log_probs_are_those_of_teacher_forcing(tokenizer, kind, options, decoder):
    model = random_model(kind, len(tokenizer), **options)
    sampler = TransformersSampler(model, tokenizer)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    groups = sampler.generate(PROMPTS, params, n=2) + sampler.generate(["Zoe 7", INTRO], params)
    assert type(sampler._decoder) is decoder
    for completion in itertools.chain(*groups):
        ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[
                0, len(completion.prompt_token_ids) - 1 : -1
            ]
        expected = (
            (logits / 0.8).log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        )
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "options",
    [dict(temperature=0.8), dict(temperature=0.8, top_k=5, repetition_penalty=1.5), dict(temperature=0)],
    ids=str,
)
def test_entropies_are_those_of_what_was_drawn_from(tokenizer, olmo, options):
    params = SamplingParams(max_tokens=12, seed=3, **options)
    for completion in itertools.chain(*TransformersSampler(olmo, tokenizer).generate(PROMPTS, params, n=2)):
        start, ids = len(completion.prompt_token_ids), completion.prompt_token_ids + completion.token_ids
        with torch.no_grad():
            logits = olmo(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
        for t, row in enumerate(logits):
            for i in set(ids[: start + t]):
                row[i] *= params.repetition_penalty ** (-1 if row[i] > 0 else 1)
        scaled = logits / (params.temperature or 1)
        if params.top_k:
            scaled[scaled < scaled.topk(params.top_k).values[:, -1:]] = -torch.inf
        expected = torch.distributions.Categorical(logits=scaled).entropy()
        torch.testing.assert_close(torch.tensor(completion.entropies), expected, atol=1e-4, rtol=0)


def test_a_truncation_that_was_asked_for(shared_cases):
    rows = map(json.loads, (shared_cases / "faults.jsonl").open(encoding="utf-8"))
    case = next(row for row in rows if row["id"] == "B017")
    logits = torch.tensor([case["input"]["probs"]]).log()
    expected = case["expected"]
    truncated = sampling_log_probs(logits, top_p=case["input"]["top_p"])
    torch.testing.assert_close(truncated.exp()[0], torch.tensor(expected["truncated_probs"]))
    assert truncated[0, 0].item() == pytest.approx(expected["log_prob_of_token0_truncated"], abs=1e-6)
    assert sampling_log_probs(logits)[0, 0].item() == pytest.approx(
        expected["log_prob_of_token0_full"], abs=1e-6
    )


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 4}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 9}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [0, 4 / 7, 0, 3 / 7]),  # .4/.9 + .3/.9 = .78 >= .7
        ({"min_p": 0.6, "top_p": 0.57}, [0, 1, 0, 0]),  # 4/7 = .571 alone reaches .57
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"temperature": 0.5, "top_p": 0.8}, [0, 0.64, 0, 0.36]),  # temperature first: .533 + .3 = .83
    ],
)
def test_truncations_by_hand(options, expected):
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    got = sampling_log_probs(logits, **options).exp()
    torch.testing.assert_close(got, torch.tensor([expected], dtype=torch.float32))


def test_repetition_penalty_by_hand():
    got = penalize_repetition(
        torch.tensor([[2.0, -2.0, 2.0, -2.0]]), torch.tensor([[True, True, False, False]]), 1.25
    )
    torch.testing.assert_close(got, torch.tensor([[1.6, -2.5, 2.0, -2.0]]))


def test_draw_inverts_the_cumulative_distribution():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens = draw(probs.log().expand(4000, -1), grid)
    assert torch.bincount(tokens, minlength=6).tolist() == [0, 1000, 0, 2000, 1000, 0]
    edges = torch.tensor([0.0, 0.2500001, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs.log().expand(3, -1), edges).tolist() == [1, 3, 4]


def word_tokenizer():
    words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")


@pytest.mark.parametrize("temperature, top_p, top_k", [(1.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 2)])
def test_frequencies_are_the_exact_probabilities(temperature, top_p, top_k):
    """All responses of up to 3 tokens over a vocabulary of 3, enumerated; chi-square at 0.001, fixed seed."""
    model = random_model(
        "Olmo2",
        3,
        spread=0.08,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model.config.eos_token_id = model.generation_config.eos_token_id = 0

    def next_probs(ids):
        with torch.no_grad():
            p = (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1).tolist()
        order, kept, mass = sorted(range(3), key=lambda i: -p[i]), [], 0.0
        for i in order[: top_k or 3]:
            if mass < top_p:
                kept.append(i)
                mass += p[i]
        total = sum(p[i] for i in kept)
        return {i: p[i] / total for i in kept}

    exact = {}

    def enumerate_from(response, probability):
        if len(response) == 3 or response[-1:] == [0]:
            exact[tuple(response)] = probability
            return
        for token, p in next_probs([1, 2] + response).items():
            enumerate_from(response + [token], probability * p)

    enumerate_from([], 1.0)
    assert math.isclose(sum(exact.values()), 1)
    samples, params = 4000, SamplingParams(3, temperature=temperature, top_p=top_p, top_k=top_k, seed=1)
    (group,) = TransformersSampler(model, word_tokenizer(), batch_size=1500).generate(
        ["a b"], params, n=samples
    )
    counts = {}
    for completion in group:
        key = tuple(completion.token_ids)
        counts[key] = counts.get(key, 0) + 1
        assert sum(completion.log_probs) == pytest.approx(math.log(exact[key]), abs=1e-4)
    statistic = sum((counts.get(key, 0) - samples * p) ** 2 / (samples * p) for key, p in exact.items())
    assert len(exact) >= 4 and statistic < chi2.ppf(0.999, len(exact) - 1)


def test_nothing_comes_from_the_generation_config(tokenizer, olmo):
    params = SamplingParams(max_tokens=12, seed=5)
    before = ids_of(TransformersSampler(olmo, tokenizer).generate(PROMPTS, params, n=2))
    kept = olmo.generation_config
    olmo.generation_config = transformers.GenerationConfig(
        temperature=0.01,
        top_k=1,
        top_p=0.1,
        repetition_penalty=3.0,
        max_new_tokens=2,
        do_sample=False,
        eos_token_id=1,
    )
    try:
        assert ids_of(TransformersSampler(olmo, tokenizer).generate(PROMPTS, params, n=2)) == before
    finally:
        olmo.generation_config = kept


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_is_what_transformers_generates(tokenizer, olmo, penalty):
    params = SamplingParams(max_tokens=16, temperature=0, repetition_penalty=penalty)
    for group in TransformersSampler(olmo, tokenizer).generate(PROMPTS, params):
        prompt = torch.tensor([group[0].prompt_token_ids])
        expected = olmo.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=16,
            repetition_penalty=penalty,
        )[0, prompt.shape[1] :]
        assert group[0].token_ids == expected.tolist()
        assert all(-10 < p < 0 for p in group[0].log_probs)


# --- seeds


def test_same_seed_same_responses_and_no_two_alike(tokenizer, olmo):
    sampler = TransformersSampler(olmo, tokenizer)
    params = SamplingParams(max_tokens=10, seed=7)
    first, again = (sampler.generate(PROMPTS, params, n=4) for _ in range(2))
    assert first == again
    assert ids_of(sampler.generate(PROMPTS, SamplingParams(max_tokens=10, seed=8), n=4)) != ids_of(first)
    assert all(len(set(map(tuple, group))) == 4 for group in ids_of(first))
    repeated = sampler.generate(["x"] * 8, params)  # the same prompt again and again, n = 1
    assert len({tuple(ids) for (ids,) in ids_of(repeated)}) == 8
    torch.rand(3)  # the global generator plays no part
    assert sampler.generate(PROMPTS, params, n=4) == first


@pytest.mark.parametrize(
    "options", [{"batch_size": 1}, {"batch_size": 5}, {"compact_at": 1e-9}, {"compact_at": 1.0}]
)
def test_batches_and_dropped_rows_change_nothing(tokenizer, olmo, options):
    params = SamplingParams(max_tokens=30, seed=2, stop=("e", ">"))  # rows end at very different steps
    expected = TransformersSampler(olmo, tokenizer).generate(PROMPTS, params, n=4)
    got = TransformersSampler(olmo, tokenizer, **options).generate(PROMPTS, params, n=4)
    assert len({len(ids) for group in ids_of(expected) for ids in group}) > 3
    assert ids_of(got) == ids_of(expected)
    for a, b in zip(itertools.chain(*got), itertools.chain(*expected)):
        assert a.text == b.text and a.finish_reason == b.finish_reason
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


def test_fewer_copies_or_tokens_are_a_part_of_more(tokenizer, olmo):
    sampler = TransformersSampler(olmo, tokenizer)
    more = ids_of(sampler.generate(PROMPTS, SamplingParams(max_tokens=12, seed=4), n=3))
    fewer = ids_of(sampler.generate(PROMPTS[:2], SamplingParams(max_tokens=5, seed=4), n=2))
    assert fewer == [[ids[:5] for ids in group[:2]] for group in more[:2]]


def test_row_uniforms_are_uniform_and_independent():
    u = torch.stack([row_uniforms(0, i, copy, 50) for i in range(20) for copy in range(20)])
    assert abs(u.mean().item() - 0.5) < 4 * (1 / 12 / u.numel()) ** 0.5
    correlation = torch.corrcoef(u)
    assert (correlation - torch.eye(400)).abs().max() < 6 / 50**0.5


# --- where a response ends


def test_a_stop_string_may_straddle_tokens(tokenizer):
    script = tokenizer.encode("so 4 </answer> more.")
    pieces = [tokenizer.decode([i]) for i in script]
    assert "</answer>" not in pieces and "".join(pieces) == "so 4 </answer> more."
    completion = say(tokenizer, script, stop=("</answer>",))
    assert completion.text == "so 4 </answer>" and completion.finish_reason == "stop"
    assert tokenizer.decode(completion.token_ids) == "so 4 </answer>"
    assert len(completion.log_probs) == len(completion.token_ids)


def test_text_is_cut_inside_the_token_that_completed_the_stop_string(tokenizer):
    script = (
        tokenizer.encode("so 4 </answer")
        + [tokenizer.convert_tokens_to_ids(".>>")]
        + tokenizer.encode(" more")
    )
    completion = say(tokenizer, script, stop=("r.>",))
    assert completion.text == "so 4 </answer.>" and completion.finish_reason == "stop"
    assert tokenizer.decode(completion.token_ids) == "so 4 </answer.>>"  # the ids are those sampled
    assert say(tokenizer, script, stop=(".>>", ".>")).text == "so 4 </answer.>"
    assert say(tokenizer, script, stop=("r.",)).text == "so 4 </answer."


def test_the_stop_string_that_ends_first_counts(tokenizer):
    script = tokenizer.encode("so 4 </answer> more.")
    assert say(tokenizer, script, stop=("more", "answer>", "</answer", "never")).text == "so 4 </answer"
    assert say(tokenizer, script, stop=("s",)).token_ids == say(tokenizer, script, stop=("so", "s")).token_ids


@pytest.mark.parametrize("stop", ["🍎", "é🍎", "🍎é", "漢"])
def test_characters_split_over_tokens(tokenizer, stop):
    script = tokenizer.encode("4 é🍎é漢 é")
    assert len(script) > 12  # each is 2 to 4 byte tokens
    completion = say(tokenizer, script, stop=(stop,))
    whole = "4 é🍎é漢 é"
    assert completion.text == whole[: whole.index(stop) + len(stop)] and completion.finish_reason == "stop"
    assert tokenizer.decode(completion.token_ids) == completion.text
    assert say(tokenizer, script + [1]).text == whole


def test_end_of_text(tokenizer):
    script = tokenizer.encode("so 4")
    completion = say(tokenizer, script + [1])
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("so 4", script + [1], "stop")
    assert len(completion.log_probs) == len(script) + 1
    assert say(tokenizer, script + [7], eos_token_ids=[1, 7]).token_ids == script + [7]  # several ids
    assert say(tokenizer, script + [7], eos_token_ids=[1, 7]).text == "so 4"
    completion = say(tokenizer, [1])
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [1], "stop")
    tokenizer_without_pad = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>"
    )
    assert say(tokenizer_without_pad, script + [1]).token_ids == script + [1]
    tokenizer_without_pad.pad_token = "<|end|>"  # pad == eos
    assert say(tokenizer_without_pad, script + [1]).token_ids == script + [1]


def test_length_is_what_remains(tokenizer):
    script = tokenizer.encode("so 4 </answer> more.")
    completion = say(tokenizer, script, stop=("</answer>",), max_tokens=3)
    assert completion.token_ids == script[:3] and completion.finish_reason == "length"
    assert len(say(tokenizer, script, max_tokens=1).token_ids) == 1
    n_stop = len(say(tokenizer, script, stop=("</answer>",)).token_ids)
    assert (
        say(tokenizer, script, stop=("</answer>",), max_tokens=n_stop).finish_reason == "stop"
    )  # on the last one
    assert say(tokenizer, script[:2] + [1], max_tokens=3).finish_reason == "stop"


def test_every_end_of_text_id_of_model_and_tokenizer_counts(tokenizer, olmo):
    model = random_model("Olmo2", len(tokenizer), num_key_value_heads=4, **SMALL)
    model.generation_config.eos_token_id = [4, 9]
    model.config.eos_token_id = 3
    assert TransformersSampler(model, tokenizer).eos_token_ids == [1, 3, 4, 9]


# --- what is computed, and what is left behind


def test_prompts_are_computed_once_and_finished_rows_leave(tokenizer, olmo):
    fed = []
    hook = olmo.register_forward_pre_hook(
        lambda m, _, inputs: fed.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    try:
        sampler = TransformersSampler(olmo, tokenizer, compact_at=0.25)
        sampler.generate(["x"], SamplingParams(max_tokens=1))
        fed.clear()
        groups = sampler.generate(PROMPTS, SamplingParams(max_tokens=30, stop=("e", ">"), seed=2), n=8)
    finally:
        hook.remove()
    prompts = [group[0].prompt_token_ids for group in groups]
    shared = next(i for i, ids in enumerate(zip(*prompts)) if len(set(ids)) > 1)
    longest = max(map(len, prompts))
    assert fed[:3] == [(1, shared), (4, longest - 1 - shared), (4, 1)]
    decoding = fed[3:]
    assert decoding[0] == (32, 1) and decoding[-1][0] < 8 and all(new == 1 for _, new in decoding)
    useful = sum(len(ids) for group in ids_of(groups) for ids in group)
    assert sum(rows for rows, _ in decoding) < 1.5 * useful < 32 * 29


def test_the_model_is_left_as_it_was(tokenizer, olmo):
    olmo.train()
    olmo.model.layers[0].eval()
    modes = [module.training for module in olmo.modules()]
    attention = olmo.config._attn_implementation
    sampler = TransformersSampler(olmo, tokenizer)
    try:
        sampler.generate(PROMPTS, SamplingParams(max_tokens=2))
        hook = olmo.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sampler.generate(PROMPTS, SamplingParams(max_tokens=2))
        hook.remove()
        assert [module.training for module in olmo.modules()] == modes
        assert olmo.config._attn_implementation == attention
        olmo(torch.tensor([[5, 6]])).logits.sum().backward()  # and can be trained on
        assert olmo.lm_head.weight.grad is not None
    finally:
        olmo.zero_grad()
        olmo.eval()


def test_dropout_is_off_while_sampling(tokenizer):
    model = random_model("GPT2", len(tokenizer), n_embd=64, n_layer=2, n_head=4, n_positions=256)
    sampler = TransformersSampler(model, tokenizer)
    expected = sampler.generate(PROMPTS, SamplingParams(max_tokens=8))
    model.train()
    assert sampler.generate(PROMPTS, SamplingParams(max_tokens=8)) == expected


def test_sync_weights(tokenizer, olmo):
    other = random_model("Olmo2", len(tokenizer), num_key_value_heads=4, **SMALL)
    with torch.no_grad():
        other.lm_head.weight.mul_(-1)
    params = SamplingParams(max_tokens=8)
    mine, sampler = TransformersSampler(other, tokenizer), TransformersSampler(olmo, tokenizer)
    assert isinstance(sampler, Sampler)
    assert isinstance(make_sampler("transformers", olmo, tokenizer), TransformersSampler)
    theirs = sampler.generate(PROMPTS, params)
    assert mine.generate(PROMPTS, params) != theirs
    mine.sync_weights(other)
    assert mine.generate(PROMPTS, params) != theirs
    mine.sync_weights(olmo, step=3)
    assert mine.generate(PROMPTS, params) == theirs
    mine.close()


# --- bad input


def test_no_prompts_no_responses(tokenizer, olmo):
    assert TransformersSampler(olmo, tokenizer).generate([], SamplingParams(max_tokens=4), n=2) == []


@pytest.mark.parametrize(
    "prompts, options, n, match",
    [
        (["x"], {"max_tokens": 256}, 1, r"prompts\[0\].*1 tokens.*max_tokens=256.*256"),
        (["x", "x y " * 150], {}, 1, r"prompts\[1\].*max_position_embeddings"),
        (["x", ""], {}, 1, r"prompts\[1\].*no tokens"),
        ("x", {}, 1, "prompts.*list of strings"),
        ([3], {}, 1, "prompts.*list of strings"),
        (["x"], {}, 0, "n: got 0"),
        (["x"], {"max_tokens": 0}, 1, "max_tokens: got 0"),
        (["x"], {"temperature": -1.0}, 1, "temperature: got -1.0"),
        (["x"], {"temperature": float("nan")}, 1, "temperature: got nan"),
        (["x"], {"top_p": 0.0}, 1, "top_p: got 0.0"),
        (["x"], {"top_k": -1}, 1, "top_k: got -1"),
        (["x"], {"min_p": 1.5}, 1, "min_p: got 1.5"),
        (["x"], {"repetition_penalty": 0.0}, 1, "repetition_penalty: got 0.0"),
        (["x"], {"stop": "</answer>"}, 1, "stop: got '</answer>'"),
        (["x"], {"stop": ("",)}, 1, "stop"),
    ],
)
def test_bad_input_is_named_before_any_work(tokenizer, olmo, prompts, options, n, match):
    hook = olmo.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    try:
        with pytest.raises(ValueError, match=match):
            TransformersSampler(olmo, tokenizer).generate(
                prompts, SamplingParams(**{"max_tokens": 4, **options}), n=n
            )
    finally:
        hook.remove()


def test_bad_construction(tokenizer, olmo):
    with pytest.raises(ValueError, match="batch_size: got 0"):
        TransformersSampler(olmo, tokenizer, batch_size=0)
    with pytest.raises(ValueError, match="compact_at: got 0"):
        TransformersSampler(olmo, tokenizer, compact_at=0)


def test_diverged_weights_are_named(tokenizer):
    model = random_model("Olmo2", len(tokenizer), num_key_value_heads=4, **SMALL)
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="model.*NaN"):
        TransformersSampler(model, tokenizer).generate(["x"], SamplingParams(max_tokens=3))


@pytest.mark.parametrize("stop", ["</answer>", "<|im_end|>", "4</answer>"])
def test_a_stop_string_that_is_a_special_token_is_met_and_stays(stop):
    special = chat_tokenizer()
    script = special.encode("so 4</answer><|im_end|> more", add_special_tokens=False)
    completion = say(special, script, stop=(stop,))
    assert (
        completion.finish_reason == "stop"
        and completion.text == "so 4</answer><|im_end|>".partition(stop)[0] + stop
    )
    assert completion.token_ids == script[: len(completion.token_ids)]


def test_a_tag_that_is_a_special_token_is_graded():
    special = chat_tokenizer()
    script = special.encode("2 + 2 = 4 </think> <answer> 4 </answer>", add_special_tokens=False)
    text = say(special, [*script, special.eos_token_id]).text
    assert text.endswith("</answer>") and load_prompt("r1_zero").reward_fn(text, "4")["reward"] == 1


def test_the_sampler_is_conditioned_on_what_the_tokenizer_opens_a_text_with():
    special = chat_tokenizer(bos=True)
    model = random_model("Olmo2", len(special), num_key_value_heads=4, **SMALL)
    [[completion]] = TransformersSampler(model, special).generate(["ab"], SamplingParams(max_tokens=2))
    assert completion.prompt_token_ids == [
        special.bos_token_id,
        *special.encode("ab", add_special_tokens=False),
    ]
