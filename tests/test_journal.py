"""The journal: what is in it stays, what is wrong with it is said."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localbatch.data.errors import JournalError, OutputError
from localbatch.data.request import Completion, FinishReason, failed_completion
from localbatch.formats.records import record
from localbatch.jobs.journal import Counts, Entry, Journal, RowKind
from localbatch.jobs.journal_files import JobLock, journal_path, remove_journal
from tests.test_outputs import file_size_limit


def entry(number: int, text: str = "text", kind: RowKind = RowKind.ANSWERED) -> Entry:
    if kind is RowKind.ANSWERED:
        completion = Completion(f"id {number}", number, text, FinishReason.STOP)
    else:
        completion = failed_completion(f"id {number}", number, text, number + 1)
    return Entry(completion, b"%016d" % number, kind)


def fill(path: Path, numbers: list[int]) -> list[str]:
    """Make a journal with these rows; returns its records in the order of the input."""
    with Journal(path) as journal:
        journal.update_manifest({"same": {}, "rows": len(numbers)})
        for number in numbers:
            journal.add(entry(number, "é" * (number % 70)))
        journal.flush()
        return list(journal.records())


def read(path: Path) -> tuple[list[str], str]:
    """Return the records of a journal, and what is wrong with it."""
    try:
        with Journal(path) as journal:
            return list(journal.records()), ""
    except JournalError as error:
        return [], str(error)


def add_large(journal: Journal, rows: int) -> None:
    for number in range(1, rows):
        journal.add(entry(number, "x" * 1000))
        time.sleep(0.001)
    journal.flush()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return journal_path(str(tmp_path / "out.jsonl"))


class TestRows:
    def test_they_come_back_in_the_order_of_the_input(self, path: Path) -> None:
        """As the records that the output has, whatever order they ended in."""
        records = fill(path, [3, 0, 2, 1])

        expected = [record(entry(n, "é" * n).completion) for n in range(4)]
        assert [json.loads(text) for text in records] == expected
        with Journal(path) as again:
            assert list(again.records()) == records
            assert again.counts() == Counts(4, 0, 0)
            assert again.last_number() == 3
            assert again.find(2) == (RowKind.ANSWERED, b"%016d" % 2)
            assert again.find(4) is None

    def test_a_row_is_durable_before_it_counts(self, path: Path) -> None:
        """Another connection finds each row that `take_durable` has given."""
        with Journal(path) as journal:
            for number in range(200):
                journal.add(entry(number))
                time.sleep(0.001)
                done = [completion.index for completion in journal.take_durable()]
                if done:
                    found = sqlite3.connect(path).execute("SELECT number FROM rows").fetchall()
                    assert set(done) <= {row[0] for row in found}
            journal.flush()
            assert journal.counts().total == 200

    def test_kinds_are_forgotten_apart(self, path: Path) -> None:
        """Rows that failed are taken again if asked for; unreadable ones always are read again."""
        with Journal(path) as journal:
            for number, kind in enumerate([RowKind.ANSWERED, RowKind.FAILED, RowKind.UNREADABLE]):
                journal.add(entry(number, kind=kind))
            journal.flush()
            assert journal.counts() == Counts(1, 1, 1)
            assert journal.forget([RowKind.UNREADABLE]) == 1
            assert journal.forget([RowKind.FAILED]) == 1
            assert [json.loads(text)["id"] for text in journal.records()] == ["id 0"]

    def test_half_a_surrogate_pair_survives(self, path: Path) -> None:
        """It is escaped, as in the output."""
        with Journal(path) as journal:
            journal.add(entry(0, "a\ud800b"))
            journal.flush()
            assert json.loads(next(journal.records()))["text"] == "a\ud800b"

    def test_it_can_be_read_while_it_is_written(self, path: Path) -> None:
        """By another process's eyes: read-only."""
        with Journal(path) as journal:
            journal.add(entry(0))
            journal.flush()
            with Journal(path, read_only=True) as reader:
                assert reader.counts().total == 1
                journal.add(entry(1))
                journal.flush()
                assert reader.counts().total == 2

    def test_there_is_none(self, path: Path) -> None:
        """To read one, it must be there."""
        with pytest.raises(JournalError, match="there is no such journal"):
            Journal(path, read_only=True)


class TestLock:
    def test_one_run_at_a_time(self, path: Path) -> None:
        """The second is refused; afterwards the next may."""
        assert not JobLock.is_held(path)
        with JobLock(path):
            assert JobLock.is_held(path)
            with pytest.raises(JournalError, match="another run is writing"), JobLock(path):
                pass
        assert not JobLock.is_held(path)
        with JobLock(path):
            pass

    def test_it_dies_with_its_process(self, path: Path) -> None:
        """Even if that is killed."""
        code = (
            "import sys, time; from pathlib import Path\n"
            "from localbatch.jobs.journal_files import JobLock\n"
            "with JobLock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
        )
        process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert JobLock.is_held(path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

        with JobLock(path):
            pass


class TestDamage:
    def test_a_foreign_file_is_refused(self, path: Path) -> None:
        """Text, or a database of something else; neither is touched."""
        path.write_text("these are my notes\n" * 100)
        with pytest.raises(JournalError, match="is no journal, or not any more; move it away"):
            Journal(path)
        assert path.read_text().startswith("these are my notes")
        path.unlink()
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE recipes (name TEXT)")
        with pytest.raises(JournalError, match="is no journal of localbatch"):
            Journal(path)

    def test_another_version_is_refused(self, path: Path) -> None:
        """With a word on what to do."""
        fill(path, [0])
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 7")
        with pytest.raises(JournalError, match=r"is of version 7, this localbatch writes 1"):
            Journal(path)

    def test_a_changed_record_is_noticed(self, path: Path) -> None:
        """Each has a checksum."""
        fill(path, [0, 1])
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE rows SET record = replace(record, 'id 1', 'id 2')")
        with (
            Journal(path) as journal,
            pytest.raises(JournalError, match=r"is damaged \(row 2 is not what it was\)"),
        ):
            list(journal.records())

    @pytest.mark.parametrize("with_wal", [False, True])
    def test_cut_anywhere(self, path: Path, tmp_path: Path, with_wal: bool) -> None:
        """What can be opened has rows of the job only, each whole; all else is refused in words."""
        records = set(fill(path, list(range(150))))
        if with_wal:  # as after a crash: the last rows are in the write-ahead log
            keep = sqlite3.connect(path)
            keep.execute("SELECT * FROM rows").fetchone()
            records |= set(fill(path, list(range(150, 300))))
        source = Path(f"{path}-wal") if with_wal else path
        size, cut = source.stat().st_size, tmp_path / "cut"
        assert size > 10_000
        for length in [*range(0, size, size // 150), size - 1]:
            cut.mkdir()
            for name in (path, Path(f"{path}-wal")):
                if name.exists():
                    shutil.copy(name, cut)
            os.truncate(cut / source.name, length)
            found, said = read(cut / path.name)
            assert str(cut / path.name) in (said or str(cut / path.name))
            assert set(found) <= records
            assert said or with_wal or length == 0 or len(found) == 150
            shutil.rmtree(cut)
        if with_wal:
            keep.close()

    def test_a_full_disk_keeps_what_is_finished(self, path: Path) -> None:
        """The message says so, and after making room the rest can be added."""
        with Journal(path) as journal:
            journal.add(entry(0))
            journal.flush()
            with file_size_limit(60_000), pytest.raises(OutputError) as caught:
                add_large(journal, 300)
        assert "what was finished before is safe" in str(caught.value)
        with Journal(path) as journal:
            kept = journal.counts().total
            assert 1 <= kept < 300
            for number in range(kept, 300):
                journal.add(entry(number))
            journal.flush()
            assert journal.counts().total == 300

    def test_an_empty_file_is_a_new_journal(self, path: Path) -> None:
        """As a power cut may leave it; a half-made one never has its name."""
        path.touch()
        assert len(fill(path, [0, 1])) == 2
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    def test_a_full_disk_at_the_start(self, path: Path) -> None:
        """It says so, and leaves nothing that is in the way of the next run."""
        with file_size_limit(6000), pytest.raises(OutputError, match="can't be made"):
            Journal(path)
        assert len(fill(path, [0])) == 1

    @pytest.mark.parametrize("replaced", [False, True])
    def test_deleted_while_it_is_written(self, path: Path, replaced: bool) -> None:
        """The run hears of it, and still can read what was finished."""
        with Journal(path) as journal:
            journal.add(entry(0))
            journal.flush()
            path.unlink()
            if replaced:
                path.write_text("")
            journal.add(entry(1))
            with pytest.raises(OutputError, match="was deleted or replaced during the run"):
                journal.flush()
            assert len(list(journal.records())) == 1

    def test_what_is_not_ours_is_not_deleted(self, path: Path) -> None:
        """Notes, or a database of something else."""
        path.write_text("notes" * 50)
        with pytest.raises(JournalError, match="move it away"):
            remove_journal(path)
        path.unlink()
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE recipes (name TEXT)")
        with pytest.raises(JournalError, match="move it away"):
            remove_journal(path)
        assert path.exists()

    def test_a_name_that_cannot_be(self, tmp_path: Path) -> None:
        """Too long for the file system, with what a journal adds."""
        with (
            pytest.raises(JournalError, match="choose a shorter name"),
            JobLock(tmp_path / ("x" * 250)),
        ):
            pass

    def test_to_start_over(self, path: Path) -> None:
        """Nothing of it stays; where none was, nothing happens."""
        fill(path, [0])
        remove_journal(path)
        remove_journal(path)

        assert list(path.parent.iterdir()) == []
