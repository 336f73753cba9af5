"""Run a notebook from top to bottom, in place.

    python bench/run_notebook.py [NOTEBOOK]

The outputs are put into the file; times of cells and the version of Python are left out, so that
another run changes results only. The first cell that fails ends it, and the file stays as it was.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DEFAULT = Path(__file__).parent / "comparison.ipynb"
CELL_TIMEOUT_S = 600


def main() -> None:
    """Run the notebook and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", nargs="?", type=Path, default=DEFAULT)
    path: Path = parser.parse_args().notebook
    started = time.perf_counter()
    notebook = execute(path)
    nbformat.write(notebook, path)
    print(f"{path}: {time.perf_counter() - started:.0f} s")


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the notebook with the outputs of a run; raises `CellExecutionError` if one fails."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", record_timing=False,
        resources={"metadata": {"path": str(path.resolve().parent)}},
    ).execute()  # fmt: skip
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


if __name__ == "__main__":
    main()
