"""The regression over notebooks bites: with one constant changed, nbval fails on a real notebook."""

import os
import re
import shutil
import subprocess
import sys

import pytest

NOTEBOOK = "compare.ipynb"  # quick, and its numbers depend on nothing but recorded runs and the library


@pytest.fixture
def copy(repo, tmp_path):
    """A copy of library, notebook and its data, importable before the installed one."""
    shutil.copytree(
        repo / "rlkit", tmp_path / "rlkit", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
    )
    shutil.copytree(repo / "figures", tmp_path / "figures")
    (tmp_path / "notebooks").mkdir()
    shutil.copy(repo / "notebooks" / NOTEBOOK, tmp_path / "notebooks")
    for name in ("conftest.py", "pyproject.toml", "tests/nbval_sanitize.cfg"):
        shutil.copy(repo / name, tmp_path / os.path.basename(name))
    return tmp_path


def nbval(folder):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--nbval",
            "--nbval-current-env",
            "--nbval-sanitize-with",
            "nbval_sanitize.cfg",
            f"notebooks/{NOTEBOOK}",
        ],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )


def test_one_changed_constant_is_found(copy):
    done = nbval(copy)
    assert done.returncode == 0, done.stdout[-3000:]
    source = copy / "rlkit" / "support" / "stats.py"
    changed, n = re.subn(
        r"(def mean_interval\(values, confidence: float = )0\.95", r"\g<1>0.90", source.read_text()
    )
    assert n == 1
    source.write_text(changed)
    done = nbval(copy)
    assert done.returncode == 1 and "Cell outputs differ" in done.stdout
