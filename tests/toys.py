"""Small things the component tests share: the toy tokenizer, tiny models, a bigram table that is a policy."""

import copy
from types import SimpleNamespace

import torch

WORDS = {
    "<pad>": 0,
    "<eos>": 1,
    "<unk>": 2,
    "Hello": 3,
    "world": 4,
    "This": 5,
    "is": 6,
    "a": 7,
    "test": 8,
    "another": 9,
}


def toy_tokenizer(pad_token="<pad>", bos_and_eos=False):
    """One id per word. ``bos_and_eos`` adds a post-processor that puts 50 in front and 51 behind."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = dict(WORDS) | (
        {f"w{i}": i for i in range(10, 50)} | {"<bos>": 50, "<end>": 51} if bos_and_eos else {}
    )
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos_and_eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A <end>", special_tokens=[("<bos>", 50), ("<end>", 51)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad_token, eos_token="<eos>", unk_token="<unk>"
    )


class IdsOnly:
    """A tokenizer for tests that pass ids."""

    pad_token_id, eos_token_id = 0, 1


class Bigram(torch.nn.Module):
    """A policy in one table: the next token's logits are the current token's row."""

    def __init__(self, vocabulary=10, seed=0, scale=1.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(vocabulary, vocabulary, generator=generator) * scale)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.table[input_ids])


def tiny_model(kind="olmo2", seed=0, std=0.3, **changes):
    """A random two-layer model, its weights large enough for positions and attention to matter."""
    import transformers as tf

    torch.manual_seed(seed)
    common = dict(vocab_size=60, pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=std)
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config, model = {
        "olmo2": (tf.Olmo2Config, tf.Olmo2ForCausalLM),
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM),
        "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM),
        "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM),
        "gpt2": (tf.GPT2Config, tf.GPT2LMHeadModel),
        "gemma2": (tf.Gemma2Config, tf.Gemma2ForCausalLM),
        "mistral": (tf.MistralConfig, tf.MistralForCausalLM),
        "cohere": (tf.CohereConfig, tf.CohereForCausalLM),
        "granite": (tf.GraniteConfig, tf.GraniteForCausalLM),
    }[kind]
    if kind == "gpt2":
        sizes = dict(
            n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    if kind in ("qwen3", "gemma2"):
        sizes["head_dim"] = 8
    return model(config(**(common | sizes | changes)))


def rollouts(n_groups=4, group_size=4, vocabulary=60, longest=9, seed=1, common=3):
    """(prompt ids, response ids): prompts share their first ids, groups all; uneven lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(2, vocabulary, (n,), generator=generator).tolist()

    start, prompts, responses = draw(common), [], []
    for group in range(n_groups):
        prompt = start + draw(2 + group % 3)
        for _ in range(group_size):
            prompts.append(prompt)
            responses.append(draw(int(torch.randint(1, longest + 1, (1,), generator=generator))))
    return prompts, responses


def batch_of_ids(prompts, responses, **columns):
    """A RolloutBatch from ids; each column is beside the labels, or one row of values per response."""
    from rlkit.batch import RolloutBatch, beside_labels
    from rlkit.tokenization import join_and_shift

    batch = RolloutBatch(**join_and_shift(prompts, responses, 0))
    for name, values in columns.items():
        setattr(batch, name, None if values is None else beside_labels(name, values, batch.response_mask))
    return batch


def scored_rows(model, prompts, responses, **options):
    """``response_log_probs`` as a list with one row per response, one value per token."""
    from rlkit.grpo import response_log_probs

    batch = batch_of_ids(prompts, responses)
    scores = response_log_probs(model, batch, **options)
    return [row[mask] for row, mask in zip(scores, batch.response_mask)]


def step_on_ids(
    model,
    optimizer,
    prompt_token_ids,
    response_token_ids,
    repeated_ground_truths=None,
    reward_fn=None,
    group_size=4,
    baseline="mean",
    advantage_eps=1e-6,
    advantage_normalizer="std",
    importance_reweighting_method="none",
    loss_normalization="sequence",
    advantages=None,
    old_log_probs=None,
    tis_weights=None,
    sampler_log_probs=None,
    entropies=None,
    shared_prefix=True,
    cliprange=None,
    **options,
):
    """The handout's step from ids in place of text: (loss, metadata)."""
    from unittest import mock

    from rlkit import compute_group_normalized_rewards, compute_rollout_rewards, get_response_log_probs
    from rlkit.algorithms import Algorithm
    from rlkit.grpo import train_step
    from rlkit.support.arguments import as_tensor

    means = groups = {}
    if advantages is None:
        truths = ["0"] * len(response_token_ids) if repeated_ground_truths is None else repeated_ground_truths
        responses = [""] * len(response_token_ids)
        rewards, means = compute_rollout_rewards(reward_fn or by_truth, responses, truths)
        advantages, groups = compute_group_normalized_rewards(
            rewards, group_size, baseline, advantage_eps, advantage_normalizer
        )
    batch = batch_of_ids(
        prompt_token_ids,
        response_token_ids,
        old_log_probs=old_log_probs,
        tis_weights=tis_weights,
        sampler_log_probs=sampler_log_probs,
        entropies=entropies,
    )
    batch.advantages = as_tensor("advantages", advantages, "numbers", dtype=torch.float32)
    algorithm = Algorithm(
        "", baseline, advantage_normalizer, loss_normalization, importance_reweighting_method, cliprange
    )
    patch = {} if shared_prefix else {"get_shared_prefix_log_probs": get_response_log_probs}
    with mock.patch.multiple("rlkit.grpo", **patch) if patch else mock.MagicMock():
        loss, metadata = train_step(model, optimizer, batch, algorithm, **options)
    return loss, means | groups | metadata


def grads_of_step(model, **arguments):
    """(loss, metadata, {name: gradient}) of one step on a copy: SGD with lr 1 shows the gradient."""
    model = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss, metadata = step_on_ids(model, torch.optim.SGD(model.parameters(), lr=1.0), **arguments)
    assert all(p.grad is None for p in model.parameters())
    return loss, metadata, {name: before[name] - p.detach() for name, p in model.named_parameters()}


def by_truth(response, truth):
    """A reward function whose reward is the "ground truth" itself."""
    return {"reward": float(truth), "format_reward": 1.0, "answer_reward": float(truth)}


def largest_difference(grads, others):
    """The largest |difference| of two gradient dicts, relative to the largest gradient."""
    scale = max(g.abs().max().item() for g in others.values())
    return max((grads[name] - others[name]).abs().max().item() for name in others) / max(scale, 1e-30)
