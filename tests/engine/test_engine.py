"""The sampler against a real vLLM engine (CPU build): what it computes, new weights, life and death, a training run.

Run by ``make test-vllm``. Skipped where no vLLM is found (see `rlkit.environment.find_vllm`). Starting a server takes
half a minute on two idle cores, so tests share two of them.
"""
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rlkit.environment import find_vllm
from rlkit.samplers import SamplingParams, VLLMSampler, VLLMServer

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))
from tiny_model import byte_tokenizer  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800),
              pytest.mark.skipif(find_vllm() is None or not find_vllm().on_cpu, reason="no vLLM for the CPU here")]
LONG = "Tom_has_3_apples_and_Ann_has_4_apples._" * 6               # over the 128 tokens of one cache block on a CPU
PROMPTS = ["How_many_apples?", LONG + "How_many_apples?", LONG + "Why?", "2+2="]
FP32 = 1e-4                                                        # largest |log-prob difference| between engines


def random_model(kind, **changes):
    """Its vocabulary are the byte tokenizer's first ids, the characters ! to ~: any tokens make a text."""
    import transformers as tf
    sizes = dict(vocab_size=96, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=192, max_position_embeddings=1024, initializer_range=0.15, eos_token_id=1,
                 pad_token_id=0, bos_token_id=None)
    config, model = {"olmo2": (tf.Olmo2Config, tf.Olmo2ForCausalLM),
                     "llama": (tf.LlamaConfig, tf.LlamaForCausalLM)}[kind]
    torch.manual_seed(0)
    return model(config(**sizes | changes)).eval()


def change(model, seed):
    """Weights noticeably different everywhere, as after many updates."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * p.std().nan_to_num(0.1).clamp(min=0.03) * torch.randn(p.shape, generator=generator)


@torch.no_grad()
def rescored(model, completion, temperature=1.0):
    """(log-probs of the completion's tokens under the model, likeliest tokens there)."""
    n = len(completion.token_ids)
    logits = model(torch.tensor([completion.prompt_token_ids + completion.token_ids])).logits[0, -n - 1:-1].float()
    logits = logits.log_softmax(-1) if temperature == 1 else (logits / temperature).log_softmax(-1)
    return logits.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0], logits.argmax(-1).tolist()


def greedy(sampler):
    params = SamplingParams(max_tokens=24, temperature=0.0)
    return [group[0] for group in sampler.generate(PROMPTS, params)]


def assert_is(completions, model):
    """These greedy completions are this model's, token by token, and so are their log-probs."""
    for completion in completions:
        log_probs, likeliest = rescored(model, completion)
        assert completion.token_ids == likeliest
        assert (torch.tensor(completion.log_probs) - log_probs).abs().max() < FP32


def assert_is_not(completions, model):
    agree, gaps = [], []
    for completion in completions:
        log_probs, likeliest = rescored(model, completion)
        agree += [a == b for a, b in zip(completion.token_ids, likeliest)]
        gaps.append((torch.tensor(completion.log_probs) - log_probs).abs().max().item())
    assert sum(agree) < 0.7 * len(agree) and max(gaps) > 0.5


@pytest.fixture(scope="module", params=["olmo2", "tied llama"])
def served(request):
    model = random_model("llama", tie_word_embeddings=True) if "llama" in request.param else random_model("olmo2")
    sampler = VLLMSampler(model, byte_tokenizer(), weight_sync="gloo")
    yield sampler, model
    sampler.close()


def members(group):
    """{pid: name} of the live processes of a process group."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (entry / "stat").read_text().rpartition(")")
            if int(rest.split()[2]) == group and rest.split()[0] != "Z":
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = f"{name.partition('(')[2]} {command}"
        except (OSError, ValueError):
            continue
    return found


def test_greedy_tokens_and_log_probs_before_and_after_each_kind_of_sync(served):
    """Old weights never show: neither in the engine, nor in a tied output layer, nor through the prefix cache."""
    sampler, model = served
    assert sampler.server.way == "gloo"
    before = greedy(sampler)
    assert_is(before, model)
    for seed, way in enumerate(["gloo", "gloo", "shm", "shm"]):
        if way != sampler.server.way:                               # by files any server can be reached
            sampler.server.weight_sync = way
            assert sampler.server.init_weight_sync("cpu", sampler.folder) == way
        change(model, seed)
        assert_is_not(before, model)
        sampler.sync_weights(model, seed)
        after = greedy(sampler)
        assert_is(after, model)
        assert [c.token_ids for c in after] != [c.token_ids for c in before]
        before = after


def test_sampled_log_probs_are_those_of_the_distribution_drawn_from(served):
    sampler, model = served
    sampler.sync_weights(model)
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=5)
    for group in sampler.generate(PROMPTS[:2], params, 3):
        for completion in group:
            gap = torch.tensor(completion.log_probs) - rescored(model, completion, 0.7)[0]
            assert gap.abs().max() < FP32
    [[cut]] = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=24, top_k=1, seed=1))
    assert max(abs(lp) for lp in cut.log_probs) < 1e-6              # one token is left, with probability 1


def test_samples_differ_within_a_group_between_equal_prompts_and_seeds_and_repeat(served):
    sampler, _ = served
    def texts(prompts, seed):
        """Token ids of the responses that did not end at once, which any two may share."""
        groups = sampler.generate(prompts, SamplingParams(max_tokens=16, seed=seed), 8)
        return [tuple(c.token_ids) for group in groups for c in group if len(c.token_ids) > 4]
    first = texts(["Why?", "Why?"], 11)
    assert len(set(first)) == len(first) > 8
    assert texts(["Why?", "Why?"], 11) == first
    assert not set(first) & set(texts(["Why?"], 12))


def test_stop_strings_end_of_text_and_length(served):
    sampler, model = served
    tokenizer = sampler.tokenizer
    greedily = greedy(sampler)[0]
    prefix = tokenizer.decode(greedily.token_ids[:6])
    stop = prefix[-2:]                                              # spans two tokens of the byte vocabulary
    [[c]] = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=24, temperature=0.0, stop=(stop,)))
    assert c.finish_reason == "stop" and c.text.endswith(stop) and c.text.count(stop) == 1
    assert c.token_ids == greedily.token_ids[:len(c.token_ids)] and tokenizer.decode(c.token_ids) == c.text
    [[c]] = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=3, temperature=0.0))
    assert c.finish_reason == "length" and c.token_ids == greedily.token_ids[:3] and len(c.log_probs) == 3
    sampler.eos_token_ids, sampler._visible_ends = [1, greedily.token_ids[3]], {greedily.token_ids[3]}
    first = greedily.token_ids.index(greedily.token_ids[3])
    [[c]] = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=24, temperature=0.0))
    sampler.eos_token_ids, sampler._visible_ends = [1], set()
    assert c.finish_reason == "stop" and c.token_ids == greedily.token_ids[:first + 1]
    assert c.text == tokenizer.decode(greedily.token_ids[:first])


def test_sleep_and_wake_keep_the_weights(served):
    """The dialogue of one shared GPU; the CPU build only holds requests back meanwhile."""
    sampler, model = served
    sampler.sleeps = True
    try:
        assert_is(greedy(sampler), model)
        assert sampler.server.get("is_sleeping")["is_sleeping"]
        change(model, 9)
        sampler.sync_weights(model)
        assert_is(greedy(sampler), model)
    finally:
        sampler.sleeps = False
        sampler._wake()


@pytest.mark.parametrize("victim", ["api_server", "EngineCore"])
def test_killed_server_is_replaced_and_has_the_last_weights(served, victim):
    sampler, model = served
    if model.config.tie_word_embeddings:
        pytest.skip("once is enough: starts another server")
    change(model, 20)
    sampler.sync_weights(model)
    group = sampler.server._process.pid
    old = members(group)
    [pid] = [pid for pid, name in old.items() if victim in name and "guard.py" not in name]
    os.kill(pid, signal.SIGKILL)
    restarts = sampler.restarts
    assert_is(greedy(sampler), model)
    assert sampler.restarts == restarts + 1 and not members(group)
    change(model, 21)
    sampler.sync_weights(model)
    assert_is(greedy(sampler), model)


PARENT = """
import sys, time
sys.path[:0] = [{tests!r}, {here!r}]
from test_engine import random_model, byte_tokenizer, VLLMSampler, SamplingParams
if __name__ == "__main__":
    sampler = VLLMSampler(random_model("olmo2"), byte_tokenizer())
    sampler.generate(["a"], SamplingParams(max_tokens=4))
    print("group", sampler.server._process.pid, sampler.server.folder, sampler.folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def parent():
    code = PARENT.format(tests=str(REPOSITORY / "tests"), here=str(Path(__file__).parent))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    yield process
    process.kill()
    process.wait()


def test_nothing_is_left_after_the_parent_is_killed(parent):
    memory = {p.name for p in Path("/dev/shm").iterdir()}
    line = next(line for line in parent.stdout if line.startswith("group")).split()
    group, folders = int(line[1]), line[2:]
    assert len(members(group)) >= 4 and all(map(os.path.isdir, folders))
    parent.kill()
    deadline = time.monotonic() + 60
    while (members(group) or any(map(os.path.exists, folders))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not members(group) and not any(map(os.path.exists, folders))
    left = {p.name for p in Path("/dev/shm").iterdir()} - memory
    assert not [name for name in left if name.startswith(("psm_", "rlkit"))]


def test_engine_that_cannot_serve_the_model_says_why(tmp_path):
    random_model("olmo2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    server = VLLMServer(str(tmp_path), max_model_len=5000)              # the model has 1024 positions
    with pytest.raises(RuntimeError, match="ended while starting(.|\n)*max_model_len"):
        server.start()
    assert server._process is None


def test_engine_that_loads_the_model_but_cannot_run_it_says_why():
    model = random_model("olmo2", num_attention_heads=8)            # head size 16: the CPU build has no kernel for it
    with pytest.raises(RuntimeError, match="started and cannot generate(.|\n)*head_dim=16"):
        VLLMSampler(model, byte_tokenizer())


def test_port_that_is_taken_too_late_to_notice(tmp_path, monkeypatch):
    """Another program takes the port between our look and the server's: its own message is shown."""
    from rlkit.samplers import vllm_server
    random_model("olmo2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(vllm_server, "port_is_free", lambda port: True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = VLLMServer(str(tmp_path), port=taken.getsockname()[1])
        with pytest.raises(RuntimeError, match="ended while starting(.|\n)*[Aa]ddress already in use"):
            server.start()


def test_training_learns_through_a_server_that_is_killed_once(tmp_path):
    """The laptop model, 16 steps: rewards rise, engine and trainer agree on every token, one death goes unnoticed."""
    from rlkit import Config, load_model, load_prompt, train
    model, tokenizer = load_model("laptop", "float32", "cpu")
    sampler = VLLMSampler(model, tokenizer)
    config = Config.preset("laptop", sampler="vllm", n_steps=16, n_val=128, n_val_final=128, eval_every=16,
                           n_train=1600, lr=3e-4, run_dir=str(tmp_path / "run"))
    graded = []

    def reward_fn(response, ground_truth):
        graded.append(response)
        if len(graded) == 3 * config.rollout_batch_size:
            [pid] = [pid for pid, name in members(sampler.server._process.pid).items()
                     if "api_server" in name and "guard.py" not in name]
            os.kill(pid, signal.SIGKILL)
        return load_prompt(config.prompt).reward_fn(response, ground_truth)

    try:
        run = train(config, sampler=sampler, model=model, tokenizer=tokenizer, reward_fn=reward_fn)
    finally:
        sampler.close()
    metrics = run.metrics.set_index("step")
    rewards = metrics["reward"].dropna()
    assert len(rewards) == 16 and sampler.restarts == 1
    assert metrics["logprob_gap_max"].max() < 1e-3
    print(metrics[["reward", "val_reward", "time_sample", "time_train", "time_sync", "logprob_gap_max"]])
    assert rewards[-4:].mean() > rewards[:4].mean() + 0.05
    assert metrics["val_reward"].dropna().iloc[-1] > metrics["val_reward"].dropna().iloc[0]
