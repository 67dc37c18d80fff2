"""The sampler against a real vLLM engine (CPU build): what it computes, new weights, life and death, a
training run.

Run by ``make test-vllm``. Skipped where no vLLM is found (see `rlkit.samplers.vllm.find.find_vllm`). Starting
a server takes 20 s on two idle cores, so tests share two of them.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import requests
import torch

from rlkit.samplers import SamplingParams, VLLMSampler, VLLMServer
from rlkit.samplers.vllm import log
from rlkit.samplers.vllm.find import find_vllm

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests"))
from tiny_model import byte_tokenizer  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_vllm() is None or not find_vllm().on_cpu, reason="no vLLM for the CPU here"),
]
LONG = "Tom_has_3_apples_and_Ann_has_4_apples._" * 6  # over the 128 tokens of one cache block on a CPU
PROMPTS = ["How_many_apples?", LONG + "How_many_apples?", LONG + "Why?", "2+2="]
FP32 = 1e-4  # largest |log-prob difference| between engines


def random_model(kind, **changes):
    """Its vocabulary are the byte tokenizer's first ids, the characters ! to ~: any tokens make a text."""
    import transformers as tf

    sizes = dict(
        vocab_size=96,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        max_position_embeddings=1024,
        initializer_range=0.15,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    config, model = {
        "olmo2": (tf.Olmo2Config, tf.Olmo2ForCausalLM),
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM),
    }[kind]
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
    logits = (
        model(torch.tensor([completion.prompt_token_ids + completion.token_ids]))
        .logits[0, -n - 1 : -1]
        .float()
    )
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


with_one_server = pytest.mark.xdist_group("served")  # one worker's, which starts it once


@pytest.fixture(scope="module", params=["olmo2", "tied llama"])
def one_server(request):
    tied = {"tie_word_embeddings": True} if "tied" in request.param else {}
    model = random_model(request.param.split()[-1], **tied)
    sampler = VLLMSampler(model, byte_tokenizer(), weight_sync="gloo")
    yield sampler, model
    sampler.close()


@pytest.fixture
def served(one_server):
    """A sampler and its model, whichever test was before: weights by gloo, those of the model."""
    sampler, model = one_server
    sampler.server.weight_sync = "gloo"
    if sampler.server.running and sampler.server.way != "gloo":
        assert sampler.server.init_weight_sync("cpu", sampler.folder) == "gloo"
    sampler.sync_weights(model)
    return sampler, model


def members(group):
    """{pid: name} of the live processes of a process group."""
    found = {}
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join([process.name(), *process.cmdline()])
        except (psutil.Error, OSError):
            continue
    return found


@with_one_server
def test_no_route_answers_without_the_key(served):
    """vLLM's own key guards /v1 alone; ours also what makes it sleep, loads weights or calls its workers."""
    server = served[0].server
    routes = (
        "health v1/models v1/completions collective_rpc sleep wake_up metrics docs abort_requests".split()
    )
    routes += "reset_prefix_cache pause get_world_size openapi.json nowhere".split()
    for route in routes:
        for method in ("get", "post", "options"):
            for headers in ({}, {"Authorization": f"Bearer {server.key}x"}):
                url = f"{server.url}/{route}"
                answer = requests.request(method, url, json={}, headers=headers, timeout=30)
                assert answer.status_code == 401, (method, route)
    assert server.alive() and server.get("v1/models")["data"]


@with_one_server
def test_greedy_tokens_and_log_probs_before_and_after_each_kind_of_sync(served):
    """Old weights never show: not in the engine, not in a tied output layer, not through the prefix cache."""
    sampler, model = served
    assert sampler.server.way == "gloo"
    before = greedy(sampler)
    assert_is(before, model)
    for seed, way in enumerate(["gloo", "gloo", "shm", "shm"]):
        if way != sampler.server.way:  # by files any server can be reached
            sampler.server.weight_sync = way
            assert sampler.server.init_weight_sync("cpu", sampler.folder) == way
        change(model, seed)
        assert_is_not(before, model)
        sampler.sync_weights(model, seed)
        after = greedy(sampler)
        assert_is(after, model)
        assert [c.token_ids for c in after] != [c.token_ids for c in before]
        before = after


@with_one_server
def test_sampled_log_probs_are_those_of_the_distribution_drawn_from(served):
    sampler, model = served
    sampler.sync_weights(model)
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=5)
    for group in sampler.generate(PROMPTS[:2], params, 3):
        for completion in group:
            gap = torch.tensor(completion.log_probs) - rescored(model, completion, 0.7)[0]
            assert gap.abs().max() < FP32
    [[cut]] = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=24, top_k=1, seed=1))
    assert max(abs(lp) for lp in cut.log_probs) < 1e-6  # one token is left, with probability 1


@with_one_server
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


@with_one_server
def test_stop_strings_end_of_text_and_length(served):
    sampler, model = served
    tokenizer = sampler.tokenizer
    greedily = greedy(sampler)[0]
    prefix = tokenizer.decode(greedily.token_ids[:6])
    stop = prefix[-2:]  # spans two tokens of the byte vocabulary
    [[c]] = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=24, temperature=0.0, stop=(stop,)))
    assert c.finish_reason == "stop" and c.text.endswith(stop) and c.text.count(stop) == 1
    assert c.token_ids == greedily.token_ids[: len(c.token_ids)] and tokenizer.decode(c.token_ids) == c.text
    [[c]] = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=3, temperature=0.0))
    assert c.finish_reason == "length" and c.token_ids == greedily.token_ids[:3] and len(c.log_probs) == 3
    sampler.eos_token_ids, sampler._visible_ends = [1, greedily.token_ids[3]], {greedily.token_ids[3]}
    first = greedily.token_ids.index(greedily.token_ids[3])
    [[c]] = sampler.generate(PROMPTS[:1], SamplingParams(max_tokens=24, temperature=0.0))
    sampler.eos_token_ids, sampler._visible_ends = [1], set()
    assert c.finish_reason == "stop" and c.token_ids == greedily.token_ids[: first + 1]
    assert c.text == tokenizer.decode(greedily.token_ids[:first])


@with_one_server
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


def pid_of(sampler, name):
    """The process of the sampler's server with this in its command line."""
    [pid] = [
        pid
        for pid, line in members(sampler.server._process.pid).items()
        if name in line and "guard.py" not in line
    ]
    return pid


@with_one_server
@pytest.mark.parametrize(
    ("victim", "number", "way"),
    [
        ("cli.main serve", signal.SIGKILL, "shm"),
        ("EngineCore", signal.SIGKILL, "gloo"),
        ("VLLM::Worker", signal.SIGILL, "gloo"),
        ("guard", signal.SIGKILL, "shm"),
    ],
)
def test_killed_server_is_replaced_and_has_the_last_weights(served, victim, number, way, capsys):
    sampler, model = served
    if model.config.tie_word_embeddings:
        pytest.skip("once is enough: starts another server")
    sampler.server.weight_sync = way
    assert sampler.server.init_weight_sync("cpu", sampler.folder) == way
    change(model, 20)
    sampler.sync_weights(model)
    group = sampler.server._process.pid
    segments = shared_memory(group)
    os.kill(group if victim == "guard" else pid_of(sampler, victim), number)
    restarts = sampler.restarts
    assert_is(greedy(sampler), model)
    assert sampler.restarts == restarts + 1 and not members(group)
    assert segments and not any(map(os.path.exists, segments))
    crash = "the engine's process ended by SIGILL (illegal instruction): the CPU refuses"
    assert (crash in capsys.readouterr().out) == (number == signal.SIGILL)
    change(model, 21)
    sampler.sync_weights(model)
    assert_is(greedy(sampler), model)


@with_one_server
def test_server_that_dies_while_it_receives_weights_gets_them_all_the_same_and_so_after_an_interrupt(served):
    """Over gloo, also when the server was last started without a transfer (see the fixture)."""
    sampler, model = served
    if model.config.tie_word_embeddings:
        pytest.skip("once is enough: starts another server")
    change(model, 30)
    broadcast, sent, restarts = sampler.server.sync.broadcast, [], sampler.restarts

    def deadly(tensor):
        sent.append(tensor)
        if len(sent) == 3:
            os.kill(pid_of(sampler, "VLLM::Worker"), signal.SIGKILL)
            time.sleep(0.5)
        return broadcast(tensor)

    sampler.server.sync.broadcast = deadly
    sampler.sync_weights(model)
    assert len(sent) >= 3 and sampler.restarts == restarts + 1
    assert_is(greedy(sampler), model)

    def interrupted(tensor):  # the worker waits for the rest, which will not come
        raise KeyboardInterrupt

    change(model, 31)
    sampler.server.sync.broadcast, began = interrupted, time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sampler.sync_weights(model)
    assert time.monotonic() - began < 60
    assert_is(greedy(sampler), model)  # by a server that was started for this call


def shared_memory(group):
    """The files in /dev/shm that a process group has mapped: vLLM's processes talk through some."""
    lines = [line for pid in members(group) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    found = {
        line[line.index("/dev/shm/") :].removesuffix(" (deleted)") for line in lines if "/dev/shm/" in line
    }
    return sorted(path for path in found if os.path.exists(path))


PARENT = """
import sys, threading, time
sys.path[:0] = [{tests!r}, {here!r}]
from test_engine import random_model, byte_tokenizer, VLLMSampler, VLLMServer, SamplingParams
if __name__ == "__main__":
    made = []
    start = lambda: made.append(VLLMSampler(random_model("olmo2"), byte_tokenizer()))
    thread = threading.Thread(target=start)  # its end, once the server runs, is no reason to end the server
    thread.start(); thread.join()
    [sampler] = made
    sampler.generate(["a"], SamplingParams(max_tokens=4))
    print("group", sampler.server._process.pid, sampler.server.folder, sampler.folder, flush=True)
    if "{end}" == "exception":
        sys.stdin.readline()
        with sampler.server:
            raise KeyError("an exception in a with block, and no close()")
    time.sleep(600)
"""


def test_nothing_is_left_however_the_parent_ends():
    """Killed, terminated, or by an exception; three parents at once."""
    parents, ends = [], {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "exception": None}
    try:
        for end in ends:
            code = PARENT.format(tests=str(REPOSITORY / "tests"), here=str(Path(__file__).parent), end=end)
            parents.append(
                subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=REPOSITORY,
                )
            )
        lines = [
            next(line for line in parent.stdout if line.startswith("group")).split() for parent in parents
        ]
        for parent, number, (_, group, *folders) in zip(parents, ends.values(), lines):
            group = int(group)
            assert len(members(group)) >= 4 and all(map(os.path.isdir, folders))
            folders += shared_memory(group)
            if number is None:
                parent.communicate("\n")
                assert parent.returncode == 1
            else:
                parent.send_signal(number)
                assert parent.wait(60) == -number
            deadline = time.monotonic() + 60
            while (members(group) or any(map(os.path.exists, folders))) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not members(group) and not any(map(os.path.exists, folders))
    finally:
        for parent in parents:
            parent.kill()
            parent.wait()


def test_a_bfloat16_policy_is_sampled_in_float32_where_the_cpu_refuses_bfloat16(monkeypatch):
    """The crash is a stand-in, as this CPU may not refuse; the float32 engine takes bfloat16 weights."""
    start = VLLMServer.start

    def crashes(server):
        if server.dtype == "bfloat16":
            server.install, server._said = find_vllm(), log.Report("", "SIGILL")
            raise RuntimeError("vLLM server: it started and cannot generate")
        start(server)

    monkeypatch.setattr(VLLMServer, "start", crashes)
    model, wide = random_model("olmo2").bfloat16(), random_model("olmo2")
    sampler = VLLMSampler(model, byte_tokenizer(), weight_sync="gloo")
    try:
        assert sampler.server.dtype == "float32"
        for seed, way in enumerate(["gloo", "shm"]):
            sampler.server.weight_sync = way
            assert sampler.server.init_weight_sync("cpu", sampler.folder) == way
            change(model, seed)
            sampler.sync_weights(model)
            wide.load_state_dict(model.state_dict())
            assert_is(greedy(sampler), wide)
    finally:
        sampler.close()


def test_in_a_kernel_that_is_interrupted_and_restarted(monkeypatch):
    """Interrupt ends the call and not the server, and the next call is answered; restart leaves nothing."""
    from jupyter_client.manager import start_new_kernel

    monkeypatch.chdir(REPOSITORY)
    manager, client = start_new_kernel(kernel_name="python3")

    def run(code, interrupt=False):
        """Its output, and the name of the exception it ended with."""
        printed = []
        if interrupt:
            threading.Timer(5, manager.interrupt_kernel).start()
        reply = client.execute_interactive(
            code, timeout=600, output_hook=lambda message: printed.append(message["content"].get("text", ""))
        )
        return "".join(printed), reply["content"].get("ename")

    try:
        setup = PARENT.format(tests=str(REPOSITORY / "tests"), here=str(Path(__file__).parent), end="")
        printed, failed = run(setup.replace("time.sleep(600)", ""))
        assert failed is None
        _, group, *folders = next(line for line in printed.splitlines() if line.startswith("group")).split()
        printed, failed = run(
            "sampler.generate(['a', 'b'] * 40, SamplingParams(max_tokens=900, top_k=1, stop=('!!',)), 32)",
            interrupt=True,
        )
        assert failed == "KeyboardInterrupt"
        printed, failed = run(
            "import time; began = time.monotonic(); sampler.generate(['a'], SamplingParams("
            "max_tokens=4)); print(time.monotonic() - began < 60, sampler.restarts)"
        )
        assert failed is None and printed == "True 0\n"
        client.stop_channels()
        manager.restart_kernel(now=False)
        deadline = time.monotonic() + 60
        while (members(int(group)) or any(map(os.path.exists, folders))) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not members(int(group)) and not any(map(os.path.exists, folders))
    finally:
        manager.shutdown_kernel(now=True)


def test_engine_that_cannot_serve_the_model_says_why(tmp_path):
    random_model("olmo2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    server = VLLMServer(str(tmp_path), max_model_len=5000)  # the model has 1024 positions
    with pytest.raises(RuntimeError, match="ended while starting(.|\n)*max_model_len"):
        server.start()
    assert server._process is None


def test_engine_that_loads_the_model_but_cannot_run_it_says_why():
    model = random_model("olmo2", num_attention_heads=8)  # head size 16: the CPU build has no kernel for it
    with pytest.raises(RuntimeError, match="started and cannot generate(.|\n)*head_dim=16"):
        VLLMSampler(model, byte_tokenizer())


def test_model_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="model: no folder"):
        VLLMServer(str(tmp_path / "nowhere")).start()
    with pytest.raises(ValueError, match="model: could not find 'nobody/no-such-model'"):
        VLLMServer("nobody/no-such-model").start()
    random_model("olmo2").config.save_pretrained(tmp_path)  # a folder without weights: vLLM's own words
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ended while starting(.|\n)*Cannot find any model weights"):
        VLLMServer(str(tmp_path)).start()


def test_port_that_is_taken_too_late_to_notice(tmp_path, monkeypatch):
    """Another program takes the port between our look and the server's: its own message is shown."""
    from rlkit.samplers.vllm import server as vllm_server

    random_model("olmo2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(vllm_server, "free_port", lambda port: port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = VLLMServer(str(tmp_path), port=taken.getsockname()[1])
        with pytest.raises(RuntimeError, match="ended while starting(.|\n)*[Aa]ddress already in use"):
            server.start()


def deadly(sampler, config, step):
    """The prompt's reward function; grading this step's last response kills the sampler's server."""
    from rlkit import load_prompt

    graded, reward = [], load_prompt(config.prompt).reward_fn

    def reward_fn(response, ground_truth):
        graded.append(response)
        if len(graded) == step * config.rollout_batch_size:
            os.kill(pid_of(sampler, "cli.main serve"), signal.SIGKILL)
        return reward(response, ground_truth)

    return reward_fn


def test_training_learns_through_a_server_that_is_killed_once(tmp_path):
    """Laptop model, 16 steps: rewards rise, engine and trainer agree on each token, one death is harmless."""
    from rlkit import Config, load_model, train

    model, tokenizer = load_model("laptop", "float32", "cpu")
    sampler = VLLMSampler(model, tokenizer)
    config = Config.preset(
        "laptop",
        sampler="vllm",
        n_steps=16,
        n_val=128,
        n_val_final=128,
        eval_every=16,
        n_train=1600,
        lr=3e-4,
        run_dir=str(tmp_path / "run"),
    )
    try:
        run = train(
            config, sampler=sampler, model=model, tokenizer=tokenizer, reward_fn=deadly(sampler, config, 3)
        )
    finally:
        sampler.close()
    metrics = run.metrics.set_index("step")
    rewards = metrics["reward"].dropna()
    assert len(rewards) == 16 and sampler.restarts == 1
    assert metrics["logprob_gap_max"].max() < 1e-3
    print(metrics[["reward", "val_reward", "time_sample", "time_train", "time_sync", "logprob_gap_max"]])
    assert rewards[-4:].mean() > rewards[:4].mean() + 0.05
    assert metrics["val_reward"].dropna().iloc[-1] > metrics["val_reward"].dropna().iloc[0]


@pytest.mark.parametrize("way", ["shm", "gloo"])
def test_a_lora_is_sampled_merged(tmp_path, way):
    """Two steps after the first update: log-probs of the server and of the trainer's adapter still agree."""
    from rlkit import Config, train

    small = dict(n_train=64, n_val=8, n_val_final=8, n_steps=3, rollout_batch_size=32, lr=3e-3, eval_every=0)
    config = Config(sampler="vllm", weight_sync=way, lora_rank=8, run_dir=str(tmp_path / "run"), **small)
    run = train(config, reward_fn=lambda response, gold: {"reward": float(len(response) % 2)})
    assert run.metrics.logprob_gap_max.dropna().max() < 1e-3 and (run.path / "adapter").is_dir()


def test_training_that_cannot_restart_its_server_stops_with_everything_saved_and_goes_on(tmp_path):
    """The server dies in step 4 and may not be replaced; the run, resumed, ends. In bfloat16 autocast."""
    from rlkit import Config, load_model, train

    config = Config.preset(
        "laptop",
        sampler="vllm",
        n_steps=6,
        n_val=32,
        n_val_final=32,
        eval_every=3,
        n_train=320,
        checkpoint_every=2,
        autocast=True,
        run_dir=str(tmp_path / "run"),
    )
    model, tokenizer = load_model("laptop", "float32", "cpu")
    sampler = VLLMSampler(model, tokenizer, dtype="bfloat16", max_restarts=0)
    try:
        if sampler.server.dtype != "bfloat16":  # its start was the probe
            pytest.skip("vLLM cannot compute in bfloat16 on this CPU: its engine ends by SIGILL")
        with pytest.raises(
            RuntimeError, match="sampler: the vLLM server died 1 times? .*resume=True goes on"
        ):
            train(
                config,
                sampler=sampler,
                model=model,
                tokenizer=tokenizer,
                reward_fn=deadly(sampler, config, 4),
            )
    finally:
        sampler.close()
    steps = [
        row["step"] for row in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    ]
    assert steps == [0, 1, 2, 3, 4]
    again = dataclasses.replace(config, resume=True, allow_changes=True)  # another reward function
    run = train(again)  # makes its own sampler, by the config
    assert run.finished and run.metrics.step.tolist() == list(range(7))
    gaps = run.metrics.logprob_gap_mean.dropna()
    assert (
        len(gaps) == 6 and 1e-5 < gaps.min() and gaps.max() < 0.05
    )  # two bfloat16 computations of the same model
    assert run.metrics.ratio_min.min() > 0.5 and run.metrics.ratio_max.max() < 2


def smollm2_folder(folder, questions):
    """A random Llama with the sizes of SmolLM2-135M (134.5 M parameters, tied) and a BPE tokenizer of these
    texts.

    Its 131,072 positions would need 6 GB of keys and values for one sequence; a job asks for what its
    problems need. Token strings that the texts do not give are filled up, so that every id the model can
    sample means something.
    """
    import transformers as tf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.train_from_iterator(
        questions, trainers.BpeTrainer(vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False)
    )
    data = json.loads(backend.to_str())
    size, vocabulary = 49152, data["model"]["vocab"]
    vocabulary |= {f"filled{i}": i for i in range(len(vocabulary), size)}
    tf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        pad_token=None,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=size,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def test_a_135_m_llama_takes_two_steps_on_gsm8k(tmp_path, gsm8k_dir):
    """A real size from a local folder: tied, pad missing, synced by tens of megabytes, below 24 GiB."""
    from tiny_model import share_of_lower_case

    from rlkit import Config, load_problems, train

    problems = load_problems(str(gsm8k_dir), "train", 2000)
    assert smollm2_folder(tmp_path / "model", [p.question for p in problems]) == 134_515_008
    config = Config.preset(
        "olmo",
        model=str(tmp_path / "model"),
        dataset=str(gsm8k_dir),
        n_train=64,
        n_val=0,
        threads=2,
        n_steps=2,
        rollout_batch_size=16,
        group_size=4,
        max_tokens=48,
        dtype="float32",
        run_dir=str(tmp_path / "run"),
    )
    peak, done = [0], threading.Event()

    def watch():
        while not done.wait(0.5):
            family = [psutil.Process(), *psutil.Process().children(recursive=True)]
            peak[0] = max(peak[0], sum(p.memory_info().rss for p in family if p.is_running()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    run = train(config, reward_fn=share_of_lower_case)
    done.set()
    watcher.join()
    print(
        run.metrics[
            [
                "step",
                "reward",
                "grad_norm",
                "time_sample",
                "time_train",
                "time_sync",
                "logprob_gap_mean",
                "logprob_gap_max",
            ]
        ],
        f"peak {peak[0] / 1e9:.1f} GB",
    )
    assert run.finished and run.metrics.step.tolist() == [1, 2] and (run.metrics.grad_norm > 0).all()
    assert run.metrics.logprob_gap_max.max() < 1e-3 and peak[0] < 24 * 2**30


def test_our_side_of_the_nccl_transfer_speaks_vllms_language():
    """NCCL needs GPUs, but its messages do not: checked with vLLM's own classes, in its Python."""
    subprocess.run(
        [find_vllm().python, Path(__file__).with_name("gpu_messages.py")],
        check=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
    )
