"""Any architecture is sampled from and scored as its own full forward pass says, or refused by name."""

import pytest
import torch
import transformers
from toys import batch_of_ids

from rlkit.grpo import response_log_probs
from rlkit.samplers import SamplingParams, TransformersSampler
from rlkit.samplers.shared_prefix import FullDecoder, PlainDecoder, SharedPrefixDecoder, make_decoder
from rlkit.samplers.shared_scoring import can_share_prefix
from rlkit.support import probes

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
HEADS = dict(head_dim=8)
EXPERTS = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128)
WINDOW = dict(sliding_window=12, **HEADS)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_expand=2, mamba_n_groups=1)
LONGROPE = dict(
    max_position_embeddings=512,
    original_max_position_embeddings=40,
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=1e4,
        short_factor=[1.0] * 4,
        long_factor=[4.0] * 4,
        original_max_position_embeddings=40,
    ),
)

# name of the config class, what is changed in it, how it is sampled from, whether scoring shares prompts
FAST, CACHE, NO_CACHE = SharedPrefixDecoder, PlainDecoder, FullDecoder
ARCHITECTURES = {
    "Llama": (SIZES, FAST, True),
    "Qwen3": (SIZES | HEADS, FAST, True),
    "Olmo3": (SIZES | WINDOW, CACHE, False),
    "Mixtral": (SIZES | EXPERTS, FAST, True),
    "Mistral": (SIZES | WINDOW, CACHE, False),
    "Gemma": (SIZES | HEADS, FAST, True),
    "Gemma2": (SIZES | WINDOW, CACHE, False),
    "Gemma3Text": (SIZES | WINDOW, CACHE, False),
    "Gemma3": (SIZES | WINDOW, CACHE, False),
    "Phi3": (SIZES | dict(sliding_window=12), CACHE, False),
    "Phimoe": (SIZES | EXPERTS | dict(sliding_window=12), CACHE, False),
    "GPTNeoX": (SIZES, FAST, True),
    "GPTNeo": (
        dict(hidden_size=32, num_layers=2, num_heads=4, window_size=12, max_position_embeddings=128)
        | dict(attention_types=[[["global", "local"], 1]]),
        CACHE,
        False,
    ),
    "GPTJ": (GPT | dict(rotary_dim=4), CACHE, True),
    "Bloom": (dict(hidden_size=32, n_layer=2, n_head=4), CACHE, True),
    "Mpt": (dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=128), CACHE, False),
    "Falcon": (dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True), CACHE, None),
    "OPT": (SIZES | dict(ffn_dim=48, word_embed_proj_dim=32), FAST, None),
    "Cohere": (SIZES, FAST, False),
    "Llama4Text": (SIZES | EXPERTS | HEADS | dict(attention_chunk_size=12), CACHE, False),
    "Bamba": (SIZES | MAMBA | dict(attn_layer_indices=[1], mamba_chunk_size=8), CACHE, False),
    "GraniteMoeHybrid": (
        SIZES | MAMBA | EXPERTS | dict(layer_types=["mamba", "attention"], mamba_chunk_size=8),
        CACHE,
        False,
    ),
    "Jamba": (
        SIZES | EXPERTS | dict(attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
        CACHE,
        False,
    ),
    "NemotronH": (
        SIZES
        | HEADS
        | EXPERTS
        | dict(n_groups=1, ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16)
        | dict(layers_block_type=["mamba", "attention"], chunk_size=8),
        CACHE,
        False,
    ),
    "Lfm2": (SIZES | dict(layer_types=["conv", "full_attention"]), None, None),
    "RecurrentGemma": (
        SIZES | HEADS | dict(lru_width=32, attention_window_size=12, num_hidden_layers=3),
        NO_CACHE,
        False,
    ),
    "Mamba": (dict(hidden_size=32, num_hidden_layers=2, state_size=8), NO_CACHE, False),
}


def random_model(kind, options, std=0.2):
    config_class = getattr(transformers, kind + "Config")
    ends = dict(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    if kind == "Gemma3":
        vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        config = config_class(text_config=options | ends | dict(vocab_size=60), vision_config=vision, **ends)
        config.image_token_id = config.boi_token_id = config.eoi_token_id = 59
    else:
        config = config_class(**options | ends | dict(vocab_size=60))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=1)
    return model.eval()


class Numbers:
    """A tokenizer whose texts are ids: "3 14 15"."""

    pad_token_id = eos_token_id = None
    all_special_ids = []

    def __call__(self, texts, **_):
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


INTRO = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 46, 2]
PROMPTS = [INTRO + [40], INTRO + [31, 17, 25, 49], INTRO + [11] * 7, [50, 2, 7]]


def right_log_probs(model, prompt, response):
    """By one plain full forward pass of this row alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_sampled_and_scored_as_by_a_full_forward_pass(kind):
    options, decoder, shares = ARCHITECTURES[kind]
    model = random_model(kind, options)
    sampler, texts = TransformersSampler(model, Numbers()), [" ".join(map(str, p)) for p in PROMPTS]
    groups = sampler.generate(texts, SamplingParams(max_tokens=10, seed=1), n=3)
    assert decoder is None or type(sampler._decoder) is decoder
    rows = [(c.prompt_token_ids, c.token_ids) for group in groups for c in group]
    right = [right_log_probs(model, *row) for row in rows]
    for row, c in zip(right, (c for group in groups for c in group)):
        torch.testing.assert_close(torch.tensor(c.log_probs), row, atol=3e-4, rtol=0)
    batch = batch_of_ids(*zip(*rows))
    assert shares is None or can_share_prefix(model, batch.labels) is shares
    scores = response_log_probs(model, batch)
    for row, got, mask in zip(right, scores, batch.response_mask):
        torch.testing.assert_close(got[mask], row, atol=3e-4, rtol=0)
    greedy = sampler.generate(texts, SamplingParams(max_tokens=10, temperature=0))
    for prompt, (completion,) in zip(PROMPTS, greedy):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


def test_what_is_slower_is_said_once(capsys):
    probes.say_once.cache_clear()
    model = random_model("Mistral", SIZES | dict(sliding_window=20))
    for _ in range(2):
        assert type(make_decoder(model, longest=30)) is PlainDecoder
        assert type(make_decoder(model, longest=20)) is SharedPrefixDecoder  # the window cannot bind
    printed = capsys.readouterr().out
    assert printed.count("sampling: MistralForCausalLM by transformers' own cache") == 1


def test_a_window_too_long_to_try_takes_the_plain_way(capsys):
    probes.say_once.cache_clear()
    model = random_model("Mistral", SIZES | dict(sliding_window=600, max_position_embeddings=900))
    assert type(make_decoder(model, longest=600)) is SharedPrefixDecoder
    assert can_share_prefix(model, torch.zeros(1, 599))
    assert type(make_decoder(model, longest=601)) is PlainDecoder
    assert not can_share_prefix(model, torch.zeros(1, 600))
    printed = capsys.readouterr().out
    assert "(an attention window shorter than the rows)" in printed and "scoring: Mistral" in printed


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_encoders_are_refused_by_name(kind):
    model = random_model(kind, {name: SIZES[name] for name in SIZES if "key_value" not in name})
    with pytest.raises(ValueError, match=f"^model: got {model.__class__.__name__}, in which later tokens"):
        TransformersSampler(model, Numbers()).generate(["3 4"], SamplingParams(max_tokens=2))


def test_lengths_that_change_every_position_are_refused():
    """Long RoPE: beyond the original length the whole row has other frequencies; below it all is exact."""
    model = random_model("Phi3", SIZES | LONGROPE)
    sampler = TransformersSampler(model, Numbers())
    (group,) = sampler.generate(["3 14 15"], SamplingParams(max_tokens=37, seed=1), n=2)
    for c in group:
        expected = right_log_probs(model, c.prompt_token_ids, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.log_probs), expected, atol=3e-4, rtol=0)
    with pytest.raises(ValueError, match=r"prompts\[0\]: got 3 tokens.*expected at most 40"):
        sampler.generate(["3 14 15"], SamplingParams(max_tokens=38))
    assert can_share_prefix(model, torch.zeros(1, 39)) and not can_share_prefix(model, torch.zeros(1, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind, right", [("Llama", FAST), ("Mistral", CACHE), ("Mixtral", FAST), ("Phimoe", CACHE)]
)
def test_the_judge_is_as_sure_in_bfloat16_and_where_numbers_are_large(kind, right, dtype):
    """One large number in all hidden states, as in trained models, where an absolute tolerance stops all."""
    model = random_model(kind, ARCHITECTURES[kind][0])
    embeddings = model.get_input_embeddings().weight.data
    embeddings *= 5
    embeddings[:, 5] = 43
    assert type(make_decoder(model.to(dtype), longest=30)) is right
    assert can_share_prefix(model, torch.zeros(1, 30)) is (right is FAST)


def test_the_probe_draws_no_random_number_and_leaves_the_model_as_it_was():
    model = random_model("Llama", SIZES | dict(attention_dropout=0.5)).train()
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    make_decoder(model)
    can_share_prefix(model.eval())
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.config._attn_implementation == "sdpa"
