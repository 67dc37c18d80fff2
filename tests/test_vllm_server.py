"""The vLLM server and its sampler against a stand-in for vLLM: life and death, requests, weight sync,
restarts.

What the real engine computes is tested in tests/engine.
"""

import gc
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toys import tiny_model, toy_tokenizer

from rlkit.samplers import Sampler, SamplingParams, VLLMSampler, VLLMServer
from rlkit.samplers.vllm import checkpoint, client, guard, log, weight_sync
from rlkit.samplers.vllm import sampler as vllm_sampler
from rlkit.samplers.vllm import server as vllm_server
from rlkit.samplers.vllm.find import VLLMInstall

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """RLKIT_VLLM_PYTHON is the stand-in; what it was asked is ``fake()``."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {REPOSITORY}/tests/fake_vllm.py "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "asked.jsonl"
    monkeypatch.setenv("RLKIT_VLLM_PYTHON", str(python))
    monkeypatch.setenv("FAKE_VLLM_LOG", str(log))
    made = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *a, **k: MADE.append(made(*a, **k)) or MADE[-1])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    yield lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for pid in processes_of(log):  # a failed test leaves nothing either
        if running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def model_folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    return str(tmp_path / "model")


def processes_of(log):
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [entry[name] for entry in entries if "argv" in entry for name in ("pid", "engine")]


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids, seconds=20):
    deadline = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(running, pids))


MADE = []  # every temporary folder of this process


def own_folders():
    """Those that are there, also under the name that `memory_folder` gives them."""
    names = {name for path in MADE for name in (path, path.replace("/.rlkit-", "/rlkit-weights-"))}
    return {name for name in names if os.path.exists(name)}


# ---- the server's life


def test_start_and_stop_leave_nothing(fake, model_folder):
    before = own_folders()
    server = VLLMServer(model_folder, seed=4, max_model_len=77)
    server.start()
    server.start()  # a second time does nothing
    [entry] = fake()
    options = dict(zip(entry["argv"][4::2], entry["argv"][5::2]))
    assert entry["argv"][:4] == ["-m", "vllm.entrypoints.cli.main", "serve", model_folder]
    assert options["--host"] == "127.0.0.1" and options["--seed"] == "4"
    assert options["--max-model-len"] == "77" and options["--logprobs-mode"] == "processed_logprobs"
    assert options["--generation-config"] == "vllm" and "--enforce-eager" in entry["argv"]
    assert "--weight-transfer-config" not in options
    environment = entry["environment"]
    assert environment["VLLM_SERVER_DEV_MODE"] == environment["TORCHDYNAMO_DISABLE"] == "1"
    assert environment["PYTHONSAFEPATH"] == environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "OMP_NUM_THREADS" not in environment
    assert Path(environment["PYTHONPATH"], "rlkit_vllm_worker.py").is_file()
    assert Path(environment["PYTHONPATH"], "rlkit_vllm_key.py").is_file()
    assert environment["RLKIT_VLLM_KEY"] == server.key and server.key not in " ".join(entry["argv"])
    for path in ("health", "v1/models", "sleep"):  # a stranger on this machine
        assert client.request("get", f"{server.url}/{path}").status_code == 401
    [named] = distributions(
        name="vllm", path=[environment["PYTHONPATH"]]
    )  # the command looks for a package "vllm",
    assert named.version == "0.32.0+cpu"  # and the platform for "cpu" in its version
    pids = [entry["pid"], entry["engine"], server._process.pid]
    assert all(map(running, pids)) and server.alive() and os.getpgid(entry["engine"]) == server._process.pid
    server.stop()
    server.stop()
    assert not any(map(running, pids)) and not server.alive() and own_folders() <= before


def test_forgotten_server_ends(fake, model_folder):
    server = VLLMServer(model_folder)
    server.start()
    pids = [fake()[0][name] for name in ("pid", "engine")]
    del server
    gc.collect()
    assert wait_until_gone(pids)


def test_exception_in_a_with_block_ends_it(fake, model_folder):
    with pytest.raises(KeyError), VLLMServer(model_folder):
        raise KeyError("x")
    assert not any(running(fake()[0][name]) for name in ("pid", "engine"))


PARENT = """
import sys, threading, time
from rlkit.samplers import VLLMServer
server = VLLMServer(sys.argv[1])
thread = threading.Thread(target=server.start)
thread.start(); thread.join()
time.sleep(0.5)
print("alive" if server.alive() else "dead", server.folder, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_parent(fake, model_folder, number):
    """Started from a thread that has ended, which is not the parent's end; its death by a signal is."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, model_folder], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    state, folder = parent.stdout.readline().split()
    assert state == "alive" and os.path.isdir(folder)
    pids = [fake()[0][name] for name in ("pid", "engine")]
    assert all(map(running, pids))
    parent.send_signal(number)
    parent.wait()
    assert wait_until_gone(pids)
    deadline = time.monotonic() + 10
    while os.path.exists(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(folder)


def test_server_killed_alone_takes_its_engine_along_and_nothing_else(fake, model_folder):
    bystander = subprocess.Popen(["sleep", "100"])
    try:
        server = VLLMServer(model_folder)
        server.start()
        os.kill(fake()[0]["pid"], signal.SIGKILL)
        assert wait_until_gone([fake()[0]["engine"]]) and not server.alive()
        with pytest.raises(client.ServerDied, match="it is gone"):
            server.generate_completions(["a"], {"max_tokens": 3})
        server.stop()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


SHARES_MEMORY = """
import mmap, os, signal, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
if os.fork():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
"""


def test_guard_removes_the_shared_memory_of_killed_processes_and_no_other(tmp_path):
    ours, other = (Path(f"/dev/shm/psm_rlkit_test_{os.getpid()}_{i}") for i in range(2))
    other.write_bytes(b"x")
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                REPOSITORY / "rlkit/samplers/vllm/guard.py",
                str(os.getpid()),
                str(tmp_path / "none"),
                "--",
                sys.executable,
                "-c",
                SHARES_MEMORY,
                str(ours),
            ],
            start_new_session=True,
        )
        assert done.returncode == 128 + signal.SIGKILL and not ours.exists() and other.exists()
    finally:
        other.unlink()
        ours.unlink(missing_ok=True)


def test_a_process_that_ended_is_no_member_of_its_group():
    """Nobody has reaped it; a stop would wait for it in vain."""
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    assert [process.pid for process in guard.others(child.pid)] == [child.pid]
    child.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while not guard.ended(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert guard.others(child.pid) == [] and child.returncode is None
    assert child.wait() == -signal.SIGKILL and guard.ended(child)


def test_server_that_dies_while_starting_says_why(fake, model_folder, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_DIES", "start")
    with pytest.raises(RuntimeError) as error:
        VLLMServer(model_folder).start()
    text = str(error.value)
    assert "ended while starting" in text and "ValueError: the model's head size is not supported" in text
    assert text.endswith("last line") and not running(fake()[0]["engine"])


def test_server_that_starts_and_cannot_generate_is_stopped(fake, model_folder, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_DIES", "generate")
    with pytest.raises(RuntimeError, match="it started and cannot generate"):
        VLLMServer(model_folder).start()
    assert not any(running(fake()[0][name]) for name in ("pid", "engine"))


def test_an_engine_that_crashes_says_by_which_signal_and_what_to_do(fake, model_folder, monkeypatch):
    """The engine itself only answers "cancelled"."""
    monkeypatch.setenv("FAKE_VLLM_DIES", "illegal bfloat16")
    with pytest.raises(RuntimeError, match="cannot generate.*SIGILL .illegal instruction.*use float32"):
        VLLMServer(model_folder, dtype="bfloat16").start()
    assert not any(running(fake()[0][name]) for name in ("pid", "engine"))


def test_a_cpu_that_cannot_do_bfloat16_samples_in_float32(fake, monkeypatch, capsys):
    """Known before any training, by the first request; said in one line."""
    monkeypatch.setenv("FAKE_VLLM_DIES", "illegal bfloat16")
    sampler = VLLMSampler(tiny_model().bfloat16(), toy_tokenizer())
    printed = capsys.readouterr().out
    assert printed.count("SIGILL (illegal instruction) in bfloat16") == 1 and "sampling in float32" in printed
    assert len(printed.splitlines()) == 2  # this one, and that the server is ready
    starts = [e["argv"] for e in fake() if "argv" in e]
    assert [argv[argv.index("--dtype") + 1] for argv in starts] == ["bfloat16", "float32"]
    assert sampler.server.alive() and sampler.restarts == 0
    assert len(sampler.generate(["Hello"], SamplingParams(max_tokens=5))[0]) == 1
    sampler.close()
    monkeypatch.setenv("FAKE_VLLM_DIES", "illegal float32")  # nothing is left to fall back to
    with pytest.raises(RuntimeError, match="cannot generate.*SIGILL"):
        VLLMSampler(tiny_model(), toy_tokenizer())
    assert len([e for e in fake() if "argv" in e]) == 3


def test_what_ended_the_engine_by_its_log():
    died = (
        "(EngineCore pid=7) ERROR [x.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: {}), shut"
    )
    found = {code: log.ended_by(died.format(code)) for code in (-4, -9, 1, None, 0, -15)}
    assert found == {-4: "SIGILL", -9: "SIGKILL", 1: "exit code 1", None: "", 0: "", -15: ""}
    assert log.ended_by("Fatal Python error: Segmentation fault\n" + died.format(None)) == "SIGSEGV"
    assert log.ended_by("Fatal Python error: init_import_site: Failed") == log.Report().cause == ""
    assert log.Report("", "exit code 1").cause == "; the engine's process ended by exit code 1"
    assert log.Report("", "SIGKILL").cause.endswith(
        "SIGKILL (killed from outside, often because memory ran out)"
    )


def test_what_cannot_work_is_refused_before_a_server_starts(fake, model_folder, monkeypatch, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=f"port: {taken.getsockname()[1]} of 127.0.0.1 is in use"):
            VLLMServer(model_folder, port=taken.getsockname()[1]).start()
    with pytest.raises(ValueError, match="model: no folder"):
        VLLMServer(str(tmp_path / "nowhere")).start()
    with pytest.raises(ValueError, match="has no config.json"):
        VLLMServer(str(tmp_path)).start()
    with pytest.raises(ValueError, match="weight_sync: got 'pigeon'"):
        VLLMServer(model_folder, weight_sync="pigeon")
    with pytest.raises(ValueError, match="gpu_memory_utilization: got 2"):
        VLLMServer(model_folder, gpu_memory_utilization=2)
    with pytest.raises(ValueError, match="python: got '/bin/false'"):
        VLLMServer(model_folder, python="/bin/false").start()
    with pytest.raises(RuntimeError, match="not running"):
        VLLMServer(model_folder).generate_completions(["a"], {"max_tokens": 1})
    monkeypatch.setattr(vllm_server, "find_vllm", lambda python: None)
    monkeypatch.setattr(vllm_sampler, "find_vllm", lambda python: None)
    with pytest.raises(ValueError, match="no vLLM found.*RLKIT_VLLM_PYTHON"):
        VLLMServer(model_folder).start()
    with pytest.raises(ValueError, match="no vLLM found"):
        VLLMSampler(None, None)
    assert fake() == []


def test_gpu_command_line_and_device(model_folder, monkeypatch):
    server = VLLMServer(model_folder, gpu=1, gpu_memory_utilization=0.4, sleep_mode=True, weight_sync="nccl")
    server.install, server.name = VLLMInstall("/venv/bin/python", "vllm", "0.32.0", False), "x"
    monkeypatch.setattr(vllm_server, "vllm_importable", lambda: True)
    words = server.command("folder", 5)
    assert words[:5] == ["/venv/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "folder"]
    assert "--enable-sleep-mode" in words and "--enforce-eager" not in words
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.4"
    assert words[words.index("--weight-transfer-config") + 1] == '{"backend": "nccl"}'
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5f")
    assert server.environment("folder", "/f")["CUDA_VISIBLE_DEVICES"] == "GPU-5f"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert server.environment("folder", "/f")["CUDA_VISIBLE_DEVICES"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in server.environment("folder", "/f")
    monkeypatch.setattr(vllm_server, "vllm_importable", lambda: False)
    assert "--weight-transfer-config" not in server.command("folder", 5)


# ---- requests


def test_one_explicit_request_per_prompt(fake, model_folder):
    with VLLMServer(model_folder) as server:
        found = server.generate_completions(
            ["a", "a", [5, 6]], {"max_tokens": 9, "n": 2, "stop": ["x"], "seed": 3}
        )
        again = server.generate_completions(["a"], {"max_tokens": 9, "seed": 3})
        other = server.generate_completions(["a"], {"max_tokens": 9, "seed": 4})
        free = [server.generate_completions(["a"], {"max_tokens": 9})[0].text for _ in range(2)]
        assert server.generate_completions([], {"max_tokens": 9}) == []
    bodies = sorted(
        (e["body"] for e in fake() if e.get("path") == "/v1/completions" and e["body"]["n"] == 2),
        key=lambda body: str(body["prompt"]),
    )
    assert [body["prompt"] for body in bodies] == [[5, 6], "a", "a"]
    assert len({body["seed"] for body in bodies}) == 3
    assert [c.text.partition("/")[2] for c in found] == ["0", "1"] * 3  # in order, though they came reversed
    assert found[0].text != found[2].text  # equal prompts, different seeds
    assert (again[0].text == found[0].text) and other[0].text != again[0].text and free[0] != free[1]
    assert found[0].token_ids == [7, 8, 1] and found[0].log_probs == [-1.0, -2.0, -0.5]
    assert found[0].finish_reason == "stop" and found[0].prompt_token_ids == [3]
    explicit = {
        "n": 2,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 9,
        "stop": ["x"],
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    assert explicit.items() <= bodies[0].items()


def test_sampling_parameters_are_checked():
    with pytest.raises(ValueError, match="max_tokens is missing"):
        client.request_body({})
    with pytest.raises(ValueError, match="'temprature'.*did you mean 'temperature'"):
        client.request_body({"max_tokens": 1, "temprature": 0.5})
    choice = {
        "index": 0,
        "text": "",
        "token_ids": [1],
        "finish_reason": "abort",
        "logprobs": {"token_logprobs": []},
    }
    with pytest.raises(RuntimeError, match="expected 1 finished"):
        client.completions_of({"choices": [choice]}, 1)
    with pytest.raises(RuntimeError, match="0 log-probs for 1 tokens"):
        client.completions_of({"choices": [choice | {"finish_reason": "stop"}]}, 1)


def test_seeds_of_copies_never_meet():
    """vLLM adds the copy's index to the request's seed: seeds of different prompts must lie far apart."""
    seeds = sorted(client.request_seed(s, i) for s in range(50) for i in range(100))
    assert len(set(seeds)) == 5000 and min(b - a for a, b in zip(seeds, seeds[1:])) > 1000
    assert seeds[-1] < 2**48


def test_a_refusal_shows_the_servers_message(fake, model_folder):
    with VLLMServer(model_folder) as server, pytest.raises(RuntimeError, match="500.*no such method"):
        server.post("collective_rpc", {"method": "no_such_method"})


# ---- weights


def asked(fake):
    return [
        e["path"].lstrip("/") + (":" + e["body"]["method"] if "rpc" in e["path"] else "")
        for e in fake()
        if "path" in e
    ]


@pytest.mark.parametrize("kind", ["olmo2", "llama"])
def test_sampler_sends_weights_and_drops_the_cache(fake, kind):
    before = own_folders()
    model = tiny_model(kind, tie_word_embeddings=kind == "llama")
    sampler = VLLMSampler(model, toy_tokenizer())
    assert isinstance(sampler, Sampler) and sampler.server.way == "shm"
    with torch.no_grad():
        model.model.norm.weight += 1
    sampler.sync_weights(model, 1)
    repack = ["collective_rpc:repack_tied_embeddings"] * (kind == "llama")
    assert asked(fake) == [
        "pause?mode=wait",
        "collective_rpc:reload_weights",
        *repack,
        "reset_prefix_cache",
        "resume",
    ]
    folder = next(e["body"]["kwargs"]["weights_path"] for e in fake() if "rpc" in e.get("path", ""))
    assert torch.equal(load_file(f"{folder}/model.safetensors")["model.norm.weight"], model.model.norm.weight)
    found = sampler.generate(["Hello world"], SamplingParams(max_tokens=5, stop=("x",), seed=1), 3)
    assert [len(group) for group in found] == [3] and {c.text for c in found[0]} == {"a test"}
    body = next(e["body"] for e in fake() if e.get("path") == "/v1/completions")
    assert body["prompt"] == [3, 4] and body["stop_token_ids"] == [1] and body["n"] == 3
    assert not body["skip_special_tokens"]  # a stop string may be one
    with pytest.raises(ValueError, match="prompts.0.*no tokens"):
        sampler.generate([""], SamplingParams(max_tokens=5))
    with pytest.raises(ValueError, match="do not fit"):
        sampler.generate(["Hello"], SamplingParams(max_tokens=10**6))
    with pytest.raises(ValueError, match="max_tokens: got 0"):
        sampler.generate(["Hello"], SamplingParams(max_tokens=0))
    sampler.close()
    sampler.close()
    assert own_folders() <= before


def test_an_end_of_text_id_is_never_part_of_the_text(fake):
    """Token 8 is a word to the tokenizer; a model may end with it nevertheless, and vLLM would print it."""
    sampler = VLLMSampler(tiny_model(), toy_tokenizer(), eos_token_ids=[8, 1])
    [[c]] = sampler.generate(["Hello"], SamplingParams(max_tokens=5))
    assert c.token_ids == [7, 8, 1] and c.text == "a"
    body = next(e["body"] for e in fake() if e.get("path") == "/v1/completions")
    assert body["stop_token_ids"] == [1, 8] and body["ignore_eos"]  # these ids end a text, and no other
    [[c]] = sampler.generate(["Hello"], SamplingParams(max_tokens=5, stop=("test",)))
    assert c.text == "a test"  # what was asked for as a stop string stays
    sampler.close()


def test_a_server_killed_mid_run_is_started_again_with_the_last_weights(fake, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_VLLM_DIES", "first")
    model = tiny_model()
    sampler = VLLMSampler(model, toy_tokenizer())
    with torch.no_grad():
        model.model.norm.weight += 1
    sampler.sync_weights(model, 1)
    [first], [second] = sampler.generate(["Hello", "world"], SamplingParams(max_tokens=5, seed=1))
    served = [e["argv"][3] for e in fake() if "argv" in e]
    assert len(served) == 2 and served[0] == served[1] and sampler.restarts == 1
    assert torch.equal(
        load_file(f"{served[1]}/model.safetensors")["model.norm.weight"], model.model.norm.weight
    )
    assert first.token_ids == second.token_ids == [7, 8, 1]
    seeds = [e["body"]["seed"] for e in fake() if e.get("path") == "/v1/completions"]
    assert {client.request_seed(1, 0), client.request_seed(1, 1)} == set(seeds)
    assert "it is gone (at v1/completions); starting it again (1 of 2)" in capsys.readouterr().out
    sampler.close()
    assert not any(running(e[name]) for e in fake() if "argv" in e for name in ("pid", "engine"))


def test_a_server_that_keeps_dying_ends_the_run(fake, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_DIES", "always")
    sampler = VLLMSampler(tiny_model(), toy_tokenizer(), max_restarts=1)
    with pytest.raises(RuntimeError, match="died 2 times in a row.*resume=True"):
        sampler.generate(["Hello"], SamplingParams(max_tokens=5))
    sampler.close()
    assert sampler.server.report().last_words.startswith("Its last lines:")  # also when its log is gone


def test_a_sync_that_fails_stops_the_server_and_the_next_call_starts_it_with_the_last_good_weights(
    fake, monkeypatch
):
    model = tiny_model()
    sampler = VLLMSampler(model, toy_tokenizer())
    sampler.sync_weights(model)
    good = load_file(sampler.folder / "model.safetensors")["model.norm.weight"]
    with torch.no_grad():
        model.model.norm.weight += 1
    for error in (KeyboardInterrupt, RuntimeError):
        with monkeypatch.context() as patch:

            def fails(*_, error=error):
                raise error("in the middle")

            patch.setattr(weight_sync, "write_weights", fails)
            with pytest.raises(error):
                sampler.sync_weights(model)
        assert not sampler.server.running
        assert torch.equal(load_file(sampler.folder / "model.safetensors")["model.norm.weight"], good)
        sampler.generate(["Hello"], SamplingParams(max_tokens=5))
        assert sampler.server.alive() and sampler.restarts == 0  # nobody died
    sampler.sync_weights(model)
    assert torch.equal(load_file(sampler.folder / "model.safetensors")["model.norm.weight"], good + 1)
    sampler.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        sampler.generate(["Hello"], SamplingParams(max_tokens=5))
    assert not any(running(e[name]) for e in fake() if "argv" in e for name in ("pid", "engine"))


def test_models_that_a_server_would_read_as_another_one(fake):
    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(
        ValueError, match="tie_word_embeddings is False, but input and output embedding are one tensor"
    ):
        VLLMSampler(model, toy_tokenizer())
    with pytest.raises(ValueError, match="weights of type float64"):
        VLLMSampler(tiny_model().double(), toy_tokenizer())
    model = tiny_model()
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match="'model.layers.0.mlp._orig_mod' is compiled by itself"):
        VLLMSampler(model, toy_tokenizer())
    assert fake() == []
    sampler = VLLMSampler(tiny_model(), toy_tokenizer())
    with pytest.raises(ValueError, match="other parameters than the server was started with, .* expected .*"):
        sampler.sync_weights(tiny_model(intermediate_size=20))
    assert sampler.server.alive() and asked(fake) == []  # found before anything was sent
    with pytest.raises(ValueError, match="temperature: got 0.005, expected 0 .greedy. or at least 0.01"):
        sampler.generate(["Hello"], SamplingParams(max_tokens=5, temperature=0.005))
    sampler.close()


DIES_EARLY = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from toys import tiny_model, toy_tokenizer
from rlkit.samplers import VLLMSampler
from rlkit.samplers.vllm import server as vllm_server
def wait(self):
    print(self._process.pid, *map(str, self._orphans), flush=True)
    os.kill(os.getpid(), signal.{signal})
vllm_server.VLLMServer._wait_until_healthy = wait
VLLMSampler(tiny_model(), toy_tokenizer())
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
def test_killed_while_the_server_starts_leaves_no_weights(fake, number):
    code = DIES_EARLY.format(tests=str(REPOSITORY / "tests"), signal=number)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    leader, folder = done.stdout.split()
    assert done.returncode == -getattr(signal, number) and folder.startswith(
        ("/dev/shm/rlkit-weights-", "/tmp/rlkit-")
    )
    assert wait_until_gone([int(leader)]) and not os.path.exists(folder)


def test_weights_of_a_process_that_was_killed_before_it_had_a_server_are_removed_by_the_next_one():
    code = (
        "import os, sys; sys.path.insert(0, 'tests'); from toys import tiny_model\n"
        "from rlkit.samplers.vllm import checkpoint\n"
        "print(checkpoint.memory_folder(tiny_model()), flush=True); os.kill(os.getpid(), 9)"
    )
    stale = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY
    ).stdout.strip()
    assert "/rlkit-weights-" in stale  # tests beside this one may have removed it
    first = checkpoint.memory_folder(tiny_model())
    second = checkpoint.memory_folder(tiny_model())  # a living process's folder stays
    assert not os.path.exists(stale) and first.is_dir()
    checkpoint.release(first)
    checkpoint.release(second)
    assert not first.exists() and not second.exists()


def test_sleep_between_rollouts(fake):
    """One shared GPU's dialogue: asleep after each call, awake before weights or prompts arrive."""
    model = tiny_model()
    sampler = VLLMSampler(model, toy_tokenizer(), sleep=True)
    sampler.sync_weights(model)
    sampler.generate(["Hello"], SamplingParams(max_tokens=5))
    sampler.generate(["Hello"], SamplingParams(max_tokens=5))
    sampler.sync_weights(model)
    sampler.close()
    paths = [
        path for path in asked(fake) if path in ("v1/completions", "wake_up", "resume") or "sleep" in path
    ]
    sleep = "sleep?level=1&mode=wait"
    assert paths == [
        "resume",
        "v1/completions",
        sleep,
        "wake_up",
        "v1/completions",
        sleep,
        "wake_up",
        "resume",
    ]


def test_way_of_the_weights():
    def way(wanted, on_cpu, policy, server, importable):
        return weight_sync.choose_way(
            wanted, server_on_cpu=on_cpu, policy_gpu=policy, server_gpu=server, vllm_importable=importable
        )

    assert way("auto", True, None, 0, False) == ("shm", "")
    assert way("auto", False, 0, 1, True) == way("nccl", False, 0, 1, True) == ("nccl", "")
    assert way("auto", False, 0, 1, False) == way("auto", False, 0, 0, True) == ("shm", "")
    assert way("gloo", True, None, 0, False) == ("gloo", "")
    assert "two different GPUs" in way("nccl", False, 0, 0, True)[1]
    assert (
        "trainer's Python" in way("nccl", False, 0, 1, False)[1]
        and "two" in way("nccl", True, None, 0, False)[1]
    )
    assert way("gloo", False, 0, 1, True)[0] == "shm"
    with pytest.raises(ValueError, match="weight_sync"):
        way("pigeon", True, None, 0, False)


def test_a_server_started_for_another_way_is_started_again(fake, model_folder, monkeypatch, capsys):
    """Where a test, or a reader, changes weight_sync of a running server, and after a restart in between."""
    made = []
    monkeypatch.setattr(vllm_server, "make_sync", lambda way, *_: made.append(way))
    server = VLLMServer(model_folder, weight_sync="gloo")
    with pytest.raises(RuntimeError, match="not running"):
        server.init_weight_sync()
    with server:
        for way in ("gloo", "shm", "gloo"):  # by files any server can be reached
            server.weight_sync = way
            assert server.init_weight_sync() == server.way == way
        server.weight_sync = "shm"
        server.stop()
        server.start()
        server.weight_sync = "gloo"
        assert server.init_weight_sync() == "gloo" and server.alive()
    assert made == ["gloo", "shm", "gloo", "gloo"]
    configs = ["--weight-transfer-config" in e["argv"] for e in fake() if "argv" in e]
    assert configs == [True, False, True]
    assert capsys.readouterr().out == "weight sync: server started for shm, now started again for gloo\n"


def test_what_plans_a_job_does_not_need_fcntl():
    """Windows has none; a server could not run there, but a job with the other sampler can."""
    code = (
        "import sys; sys.modules['fcntl'] = None; from rlkit import Config, train; import rlkit.jobs.planning"
    )
    code += "; import rlkit.samplers.vllm.sampler; print(Config().weight_sync)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout == "auto\n", done.stderr


def test_broadcast_dialogue():
    """Order of requests and broadcasts with a stand-in server: join, start, receive while sending, finish."""
    events = []

    class Server:
        def get(self, path):
            return {"world_size": 1}

        def post(self, path, body=None):
            if path == "update_weights":
                names.extend(body["update_info"]["names"])
                shapes.extend(body["update_info"]["shapes"])
                assert set(body["update_info"]["dtype_names"]) == {"float32"}
                sent.wait(10)  # answers only when everything has arrived
            events.append(path)
            return {}

    names, shapes, sent, model = [], [], threading.Event(), tiny_model("llama", tie_word_embeddings=True)
    sync = weight_sync.BroadcastSync.__new__(weight_sync.BroadcastSync)
    sync.server, sync.way, sync.device, received = Server(), "gloo", "cpu", []

    def broadcast(tensor):
        received.append(tensor)
        events.append("tensor")
        if len(received) == len(list(model.parameters())):
            sent.set()

    sync.broadcast = broadcast
    sync.send(model)
    count = len(received)
    assert events == ["start_weight_update", *["tensor"] * count, "update_weights", "finish_weight_update"]
    assert names == [name for name, _ in model.named_parameters()] and "lm_head.weight" not in names
    assert shapes == [list(t.shape) for t in received]


def test_an_update_the_server_refuses_does_not_hang():
    class Server:
        def post(self, path, body=None):
            if path == "update_weights":
                raise RuntimeError("refused")
            return {}

    sync = weight_sync.BroadcastSync.__new__(weight_sync.BroadcastSync)
    sync.server, sync.way, sync.device, sync.broadcast = (
        Server(),
        "gloo",
        "cpu",
        lambda tensor: time.sleep(0.01),
    )
    with pytest.raises(RuntimeError, match="refused"):
        sync.send(tiny_model())


def test_a_server_that_dies_in_a_broadcast_is_known_to_be_dead():
    """The transport only tells that its connection broke; the request tells why, for a restart."""

    class Server:
        def post(self, path, body=None):
            if path == "update_weights":
                time.sleep(0.3)
                raise client.ServerDied("gone")
            return {}

    def broadcast(tensor):
        raise RuntimeError("Connection closed by peer")

    left = []
    broadcast.leave = lambda: left.append(True)
    sync = weight_sync.BroadcastSync.__new__(weight_sync.BroadcastSync)
    sync.server, sync.way, sync.device, sync.broadcast = Server(), "gloo", "cpu", broadcast
    with pytest.raises(client.ServerDied, match="gone"):
        sync.send(tiny_model())
    sync.close()
    sync.close()
    assert left == [True]


def test_a_group_that_the_server_refuses_is_known_at_once():
    class Server:
        def get(self, path):
            return {"world_size": 1}

        def post(self, path, body=None):
            raise RuntimeError("500: Weight transfer not configured")

    began = time.monotonic()
    with pytest.raises(RuntimeError, match="not configured"):
        weight_sync.BroadcastSync(Server(), "gloo")
    assert time.monotonic() - began < 60  # not the 300 s it would wait for a member
