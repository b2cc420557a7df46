"""Runs notebooks, each in an empty folder and, to be kept, with an empty profile store.

    python -m tests.notebooks.execute [NAME ...]     # run and keep what they print; default: all

Outputs are kept as they are shown; what differs without meaning (execution times, ids, counters) is not.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
TIMEOUT_S = 600
PLOTLY = re.compile(r'<script type="text/plain" class="tensoropt-plotly">.*?</script>', re.DOTALL)
"""The script that one output of a notebook carries for all plots."""


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("[0-9]*.ipynb"))


def executed(path: Path, store: Path | None = None) -> nbformat.NotebookNode:
    """The notebook with fresh outputs.

    Args:
        store: folder of the profile store; an empty one for None.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    kept = {k: os.environ.get(k) for k in ("TENSOROPT_CACHE", "PYTHONPATH", "OMP_NUM_THREADS")}
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        for helper in FOLDER.glob("*.py"):
            shutil.copy(helper, folder)
        (Path(folder) / "tensoropt_app").symlink_to(FOLDER.parent / "app")  # of this checkout
        paths = os.pathsep.join([str(FOLDER.parent), folder])
        os.environ |= {"TENSOROPT_CACHE": str(store or folder), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        try:
            place = {"metadata": {"path": folder}}
            times = {"timeout": TIMEOUT_S, "startup_timeout": TIMEOUT_S}
            NotebookClient(notebook, kernel_name="python3", resources=place, **times).execute()
        finally:
            for name, value in kept.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
    return plain(notebook)


def plain(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs from run to run and means nothing."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
            for output in cell.outputs:
                output.metadata = {}
                if "execution_count" in output:
                    output.execution_count = None
                if "image/svg+xml" in output.get("data", {}):
                    output.data.pop("text/plain", None)
                if "text/html" in output.get("data", {}):
                    # 0.5 MB that no one runs before running the cell, which brings them again.
                    output.data["text/html"] = PLOTLY.sub("", output.data["text/html"])
    return notebook


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for path in notebooks():
        if not wanted or any(name in path.name for name in wanted):
            print(path.name, flush=True)
            nbformat.write(executed(path), path)
