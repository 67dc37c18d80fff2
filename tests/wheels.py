"""Asks pip whether every pin has a wheel for each Python and platform, and writes tests/data/wheels.json.

    python tests/wheels.py      # after a pin has changed; a minute or more, nothing is installed

vLLM's pins are left out: the server runs on Linux alone.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TABLE = REPO / "tests" / "data" / "wheels.json"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = {
    f"linux {arch}": [f"manylinux_2_{glibc}_{arch}" for glibc in (28, 27, 26, 24, 17, 12, 5)]
    + [f"manylinux{year}_{arch}" for year in (2014, 2010, 1)]
    for arch in ("x86_64", "aarch64")
} | {"macos arm64": ["macosx_14_0_arm64"], "windows amd64": ["win_amd64"]}


def pins() -> dict[str, str]:
    """{name: version} of constraints.txt, and of what pyproject.toml pins besides."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    lines = [*project["dependencies"], *extras, *(REPO / "constraints.txt").read_text().splitlines()]
    found = dict(
        re.fullmatch(r"([\w.-]+)(?:\[.*\])?==([\w.]+)", line).groups() for line in lines if "==" in line
    )
    return {name: version for name, version in sorted(found.items()) if not name.startswith("vllm")}


def lacks(python: str, platform: str) -> str:
    """ "" if every pin has a wheel, else pip's complaint."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--no-deps",
            "--ignore-installed",
            "-q",
        ]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        command += ["--target", folder, *(f"--platform={tag}" for tag in PLATFORMS[platform])]
        done = subprocess.run(
            [*command, *(f"{n}=={v}" for n, v in pins().items())], capture_output=True, text=True
        )
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR: No matching")]
    return "" if done.returncode == 0 else " ".join(lines or done.stderr.splitlines()[-1:])


if __name__ == "__main__":
    asked = {f"{python} {platform}": lacks(python, platform) for python in PYTHONS for platform in PLATFORMS}
    TABLE.write_text(
        json.dumps({"lacks": asked, "pins": pins()}, indent=1) + "\n", encoding="utf-8", newline="\n"
    )
    sys.exit("\n".join(f"{where}: {what}" for where, what in asked.items() if what))
