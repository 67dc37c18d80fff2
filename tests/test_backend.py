"""MPLBACKEND=Agg, as servers set it: executed notebooks still have their pictures."""

import os
import subprocess
import sys

import nbformat
import pytest


def pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


OURS = """
from rlkit.jobs import plots
fig, axes = plots.figure()
axes[0].plot([1, 2])
fig"""
YOURS = "import matplotlib.pyplot as plt\nplt.plot([1, 2]);"


@pytest.mark.parametrize("backend", ["Agg", "agg", None])
def test_figures_of_a_cell_are_shown(repo, tmp_path, backend):
    new = nbformat.v4
    nbformat.write(
        new.new_notebook(cells=[new.new_code_cell(c) for c in (OURS, YOURS)]), tmp_path / "a.ipynb"
    )
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    environment |= {"MPLBACKEND": backend} if backend else {}
    command = [sys.executable, str(repo / "notebooks" / "execute.py"), str(tmp_path / "a.ipynb")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert pictures(nbformat.read(tmp_path / "a.ipynb", as_version=4)) == 2


def test_papermill_keeps_the_pictures_of_a_job(repo, tmp_path):
    saved = pictures(nbformat.read(repo / "notebooks" / "train.ipynb", as_version=4))
    values = "n_steps 1 n_train 16 n_val 4 n_val_final 4 rollout_batch_size 8".split() + [
        "run_dir",
        str(tmp_path / "run"),
    ]
    given = [part for pair in zip(values[::2], values[1::2]) for part in ("-p", *pair)]
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(repo / "notebooks" / "train.ipynb"),
        str(tmp_path / "out.ipynb"),
    ]
    environment = os.environ | {"MPLBACKEND": "Agg", "JUPYTER_PREFER_ENV_PATH": "1"}
    subprocess.run([*command, *given], env=environment, check=True, capture_output=True, cwd=repo)
    assert pictures(nbformat.read(tmp_path / "out.ipynb", as_version=4)) == saved > 0


def test_a_script_keeps_its_backend():
    code = "import matplotlib; import rlkit.jobs.plots; print(matplotlib.get_backend())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"MPLBACKEND": "Agg"}, capture_output=True, text=True
    )
    assert done.stdout.strip().lower() == "agg"
