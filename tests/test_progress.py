"""Progress bars: one short line in a saved notebook, nothing where nobody watches."""

import json
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from rlkit.support.progress import progress


def run_cells(*sources):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, kernel_name="python3", timeout=60, allow_errors=True).execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.fixture(scope="module")
def outputs():
    return run_cells(
        "from rlkit.support.progress import progress\n"
        "for _ in progress(range(50), desc='train'):\n"
        "    for _ in progress(range(3), desc='sample'):\n"
        "        pass",
        "with progress(total=4, desc='steps') as bar:\n"
        "    for i in range(4):\n"
        "        bar.set_postfix(val=i / 4)\n"
        "        bar.update(1)",
        "for i in progress(range(9), desc='fails'):\n"
        "    for _ in progress(range(3)):\n"
        "        raise RuntimeError('x')",
        "bar = None\nfor i in progress(iter('ab'), desc='open end'):\n    pass",
        "list(progress(range(3), disable=True))",
    )


def lines(outputs):
    return [output["data"]["text/plain"] for output in outputs if output.output_type == "display_data"]


def test_saved_notebook_keeps_the_last_state_in_one_line(outputs):
    [line] = lines(outputs[0])
    assert line.startswith("train: 50/50 in 00:0") and "sample" not in line
    [line] = lines(outputs[1])
    assert line.startswith("steps: 4/4 in 00:0") and line.endswith("val=0.75")
    assert all(output.output_type != "stream" for cell in outputs for output in cell)


def test_a_failure_inside_leaves_the_next_bar_alone(outputs):
    assert len(lines(outputs[2])) == 1
    [line] = lines(outputs[3])
    assert line.startswith("open end: 2 in 00:0")
    assert lines(outputs[4]) == []


def test_nothing_is_written_where_nobody_watches():
    code = "from rlkit.support.progress import progress; print(sum(progress(range(5), desc='x')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("10\n", "")
    assert list(progress(range(3))) == [0, 1, 2]


def test_nbval_does_not_compare_progress(repo):
    import re

    from nbval.plugin import get_sanitize_patterns

    patterns = dict(get_sanitize_patterns((repo / "tests" / "nbval_sanitize.cfg").read_text()))

    def clean(text):
        for pattern, replacement in patterns.items():
            text = re.sub(pattern, replacement, text)
        return text

    live, done = "train:   0%|                    | 0/60 [00:00<?]", "train: 60/60 in 01:43, reward=0.72"
    assert clean(live) == clean(done) == "PROGRESS"
    assert clean("took 3.2 s at 0x7f12ab34cd, in /home/me/rlkit/runs") == "took TIME at ADDRESS, in FOLDER"
    for kept in ("accuracy 0.734 +- 0.020", "1/2 + 3/4", json.dumps({"steps": 3})):
        assert clean(kept) == kept
