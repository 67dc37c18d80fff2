"""Rules for every notebook as it is saved: executed, readable without a kernel, no traces of a machine."""

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest

REPO = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
JOBS = {"train", "sweep", "evaluate", "compare"}

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell):
    return cell.metadata.get("tags", [])


def plain_source(cell):
    """The cell without magics, to be parsed."""
    return "\n".join(
        "" if line.lstrip().startswith(("%", "!")) else line for line in cell.source.splitlines()
    )


def test_was_executed_from_top_to_bottom(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells), "saved without outputs: nbval would compare nothing"
    for cell in cells:
        errors = [output for output in cell.outputs if output.output_type == "error"]
        assert not errors or "raises-exception" in tags(cell), cell.source


def test_shows_results_not_progress(path):
    for cell in code_cells(nbformat.read(path, as_version=4)):
        for output in cell.outputs:
            text = output.get("text", "") or output.get("data", {}).get("text/plain", "")
            assert "\r" not in text and not re.search(r"\d%\|", text), text[:200]
            assert output.get("name") != "stderr", text[:500]
            assert len(text.splitlines()) < 200, cell.source


def test_keeps_no_trace_of_the_machine(path):
    raw = path.read_text()
    assert str(REPO) not in raw and str(Path.home()) + "/" not in raw
    notebook = nbformat.read(path, as_version=4)
    assert (
        set(notebook.metadata) <= {"kernelspec", "language_info"}
        and notebook.metadata.kernelspec.name == "python3"
    )
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "jupyter", "slideshow", "editable", "deletable"}, cell.metadata


def test_cells_import_and_install_nothing_by_themselves(path):
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert not re.search(r"pip install|conda install|sys\.path|os\.chdir", cell.source), cell.source
        assert not cell.source.rstrip().endswith(";"), (
            "nbval does not know `;`: assign to _ or call plt.show()"
        )


def test_has_a_parameters_cell_if_it_is_a_job(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    tagged = [i for i, cell in enumerate(cells) if "parameters" in tags(cell)]
    assert len(tagged) == (1 if path.stem in JOBS else 0)
    if not tagged:
        return
    assert (
        tagged == [0] and "parameters(globals())" in cells[1].source
    )  # checked before anything else happens
    # plain constants, so that nothing derived goes stale; and no later cell gives the names other values
    names = set()
    for statement in ast.parse(cells[0].source).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)
        names |= {target.id for target in statement.targets}
    for cell in cells[1:]:
        stored = {
            node.id
            for node in ast.walk(ast.parse(plain_source(cell)))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        assert not stored & names, stored & names
    if path.stem == "train":
        from rlkit import Config

        assert names == set(Config.__dataclass_fields__)


def test_is_valid_json_with_stable_ids(path):
    cells = json.loads(path.read_text())["cells"]
    ids = [cell["id"] for cell in cells]
    assert len(set(ids)) == len(ids)
    nbformat.validate(nbformat.read(path, as_version=4))
