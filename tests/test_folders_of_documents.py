"""Which files of folders are taken, and what a run that is refused leaves behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from localbatch.data.errors import ConfigError, JournalError
from localbatch.formats.folder import find_files
from localbatch.summaries.documents import find_documents
from localbatch.summaries.job import SummaryConfig, SummaryResult, summarize
from localbatch.summaries.prompts import SummaryOptions, SummaryStyle


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a subfolder that can't be listed, whoever runs the tests."""
    folder = tmp_path / "in"
    for name in ("a.txt", "closed/b.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("A text of some words.")
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if os.path.basename(path) == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return folder


def test_a_folder_that_cannot_be_listed_is_refused(closed: Path) -> None:
    """Its documents would count as deleted, and their summaries would go."""
    said = r"closed: can't be read \(Permission denied\); make it readable, or leave it out"
    with pytest.raises(ConfigError, match=said):
        find_documents([str(closed)], str(closed.parent / "out"))
    with pytest.raises(ConfigError, match=said):
        find_files(str(closed))


def test_summaries_of_another_run_are_no_documents(tmp_path: Path) -> None:
    """Unless their folder is named itself."""
    for name in ("a.txt", "sums/index.journal", "sums/a.txt.md", "sums/sub/b.txt.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("A text.")
    found = find_documents([str(tmp_path)], str(tmp_path / "out"))
    assert [document.name for document in found] == ["a.txt"]
    named = find_documents([str(tmp_path / "sums")], str(tmp_path / "out"))
    assert "sub/b.txt.md" in [document.name for document in named]


def test_a_file_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    """As in a folder and by itself; but links to it are documents of their own."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("A text.")
    (folder / "link.txt").symlink_to(folder / "a.txt")
    paths = [str(folder), str(folder / "a.txt"), str(folder / "." / "*.txt")]
    found = find_documents(paths, str(tmp_path / "out"))
    assert [document.name for document in found] == ["in/a.txt", "in/link.txt"]


def test_a_run_that_could_not_start_binds_nobody(tmp_path: Path) -> None:
    """The same command with other settings is not refused for answers that there are not."""
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("A text of some words.")

    def run(length: int = 20, **engine: Any) -> SummaryResult:
        settings = {"backend": "fake", **engine}
        options = SummaryOptions(length=length)
        return summarize(SummaryConfig("tiny", [str(text)], str(out), options, engine=settings))

    with pytest.raises(ConfigError):
        run(ctx=8)
    assert not list(out.glob("index.journal*"))
    assert [document.error for document in run().documents] == [None]
    kept = sorted(path.name for path in out.iterdir())
    with pytest.raises(JournalError):
        run(length=30)
    assert sorted(path.name for path in out.iterdir()) == kept


def test_styles() -> None:
    assert SummaryOptions("bullets").style is SummaryStyle.BULLETS  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"style: must be one of .*bullets.*, not 'foo'"):
        SummaryOptions("foo")  # type: ignore[arg-type]
