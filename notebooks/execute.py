"""Executes notebooks in place and saves them as they are committed: real outputs, no run-time metadata.

    python notebooks/execute.py notebooks/train.ipynb notebooks/compare.ipynb

Each notebook runs from its first cell in a fresh kernel of this Python, with its own folder as working
directory. The outputs are what the tests compare with later, so they are kept; what changes from one
execution to the next and says nothing (times, widget state, the kernel's patch version) is not. A notebook
that fails is left as it was.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

_CELL_METADATA = ("tags", "jupyter", "slideshow", "editable", "deletable")


def execute(path: str | Path, timeout: int = 1800) -> NotebookNode:
    """The notebook of this file with fresh outputs, cleaned; the file itself is not touched.

    timeout: most seconds for one cell. Raises nbclient's CellExecutionError where a cell fails that is not
    tagged ``raises-exception``.
    """
    path = Path(path)
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.resolve().parent)}},
        store_widget_state=False,
    )
    client.execute()
    return clean(notebook)


def clean(notebook: NotebookNode) -> NotebookNode:
    """The same notebook without metadata that differs between executions; sources and outputs stay."""
    notebook.metadata = NotebookNode(
        kernelspec={"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        language_info={"name": "python"},
    )
    for cell in notebook.cells:
        cell.metadata = NotebookNode(
            {key: cell.metadata[key] for key in _CELL_METADATA if key in cell.metadata}
        )
        for output in cell.get("outputs", []):
            output.get("metadata", {}).pop("widgets", None)
    return notebook


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0 when every notebook ran, 1 when one failed (its error is printed)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", metavar="NOTEBOOK", help="notebooks to execute and save in place")
    parser.add_argument("--clean-only", action="store_true", help="only remove run-time metadata")
    options = parser.parse_args(arguments)
    failed = 0
    for path in options.paths:
        start = time.perf_counter()
        try:
            notebook = clean(nbformat.read(path, as_version=4)) if options.clean_only else execute(path)
        except (CellExecutionError, OSError, nbformat.reader.NotJSONError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            failed += 1
            continue
        nbformat.write(notebook, path)
        print(f"{path}: {time.perf_counter() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
