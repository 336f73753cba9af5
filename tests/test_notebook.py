"""The notebook runs from top to bottom, and is kept with its outputs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from run_notebook import DEFAULT, execute


@pytest.fixture(scope="module")
def kept() -> nbformat.NotebookNode:
    return nbformat.read(DEFAULT, as_version=4)


class TestKept:
    def test_is_valid(self, kept: nbformat.NotebookNode) -> None:
        """By the format's own schema; any Python 3 kernel will do."""
        nbformat.validate(kept)
        assert kept.metadata.kernelspec.name == "python3"

    def test_was_run_in_order(self, kept: nbformat.NotebookNode) -> None:
        """Cells are numbered from 1, and none of them shows an error or a warning."""
        cells = [cell for cell in kept.cells if cell.cell_type == "code"]
        outputs = [output for cell in cells for output in cell.outputs]

        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        assert {output.output_type for output in outputs} == {"display_data", "execute_result"}
        assert sum("image/png" in output.data for output in outputs) >= 5

    def test_names_no_folder_of_a_machine(self, kept: nbformat.NotebookNode) -> None:
        """Neither in its source nor in its outputs."""
        texts = [cell.source for cell in kept.cells]
        for cell in kept.cells:
            for output in cell.get("outputs", []):
                texts += [v for k, v in output.data.items() if k != "image/png"]

        found = re.findall(
            r"/(?:home|root|tmp|work|Users|usr|mnt)/\S*|[A-Z]:\\\S*", "\n".join(texts)
        )
        assert found == []

    def test_exercises_have_answers(self, kept: nbformat.NotebookNode) -> None:
        """Each is hidden until it is asked for."""
        text = "\n".join(cell.source for cell in kept.cells if cell.cell_type == "markdown")

        assert text.count("**Exercise ") == text.count("<details><summary>Answer</summary>\n") == 9
        assert text.count("</details>") == 9


@pytest.mark.model
@pytest.mark.timeout(1200)
def test_runs(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs to its end with the real model, on four rows, and prints no warning."""
    del smollm2
    monkeypatch.setenv("LOCALBATCH_NOTEBOOK_ROWS", "4")
    done = execute(DEFAULT)

    for cell in done.cells:
        if cell.cell_type == "code":
            kinds = [output.output_type for output in cell.outputs]
            assert "error" not in kinds
            assert "stream" not in kinds, cell.outputs
