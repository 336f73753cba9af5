"""Several workers, one for each GPU, fed from one queue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from localbatch import Completion, Request, SamplingParams
from localbatch.data.config import EngineConfig, SplitMode
from localbatch.data.errors import EngineError
from localbatch.data.request import Later, failed_completion
from localbatch.engine.engine import EngineStats, TextPiece
from localbatch.engine.pool import Pool, merged

pytestmark = pytest.mark.timeout(120)

ONE = EngineConfig("fake", backend="fake", ctx=256, threads=1, fake_dies_on="poison")
TWO = replace(ONE, fake_gpus=2)
THREE = replace(ONE, fake_gpus=3)


def row(index: int, prompt: str = "hello", tokens: int = 3) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(f"row-{index}", index, prompt=f"{prompt} {index}", params=params)


def texts(config: EngineConfig, rows: list[Request]) -> dict[int, str]:
    with contextlib.closing(Pool(config)) as pool:
        done = [event for event in pool.run(rows) if isinstance(event, Completion)]
    assert len({c.index for c in done}) == len(done)
    return {completion.index: completion.text for completion in done}


def test_without_a_gpu_there_is_one_worker() -> None:
    """As ever."""
    with contextlib.closing(Pool(ONE)) as pool:
        assert len(pool.members) == 1


def test_there_is_a_worker_for_each_gpu() -> None:
    """In processes of their own, each on its own GPU."""
    with contextlib.closing(Pool(THREE)) as pool:
        assert [member.gpus for member in pool.members] == [("FAKE0",), ("FAKE1",), ("FAKE2",)]
        assert len({member.pid for member in pool.members}) == 3
        # Whatever memory is free when another worker takes over.
        assert [member.config.devices for member in pool.members] == [
            ("FAKE0",), ("FAKE1",), ("FAKE2",),
        ]  # fmt: skip
        assert {member.config.split_mode for member in pool.members} == {SplitMode.NONE}


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 100, 1500])
def test_answers_are_those_of_one_worker(rows: int) -> None:
    """Each row has one, the same as ever."""
    requests = [row(i) for i in range(rows)]
    assert texts(TWO, requests) == texts(ONE, requests)


def test_all_workers_compute() -> None:
    """Each takes about its share of rows of one size."""
    with contextlib.closing(Pool(replace(TWO, fake_step_s=0.001, parallel=16))) as pool:
        assert sum(1 for _ in pool.run([row(i, tokens=8) for i in range(2000)])) == 2000
        counts = [member.stats.completion_tokens for member in pool.members]
        assert pool.stats.completion_tokens == sum(counts) == 16000
    assert min(counts) > 0.3 * sum(counts)


def test_rows_are_read_in_the_callers_thread() -> None:
    """They may come from a database that no other thread may use."""
    threads = set()

    def rows() -> Iterator[Request]:
        for i in range(50):
            threads.add(threading.current_thread())
            yield row(i)

    with contextlib.closing(Pool(TWO)) as pool:
        assert sum(1 for _ in pool.run(rows())) == 50
    assert threads == {threading.current_thread()}


def test_rows_made_of_answers() -> None:
    """`Later` holds the source back until completions were taken, whichever worker has them."""
    answers: list[Completion] = []

    def rows() -> Iterator[Request | Later]:
        for i in range(5):
            yield row(i)
        while len(answers) < 5:
            yield Later.LATER
        yield row(5, "".join(sorted(c.text for c in answers)))

    with contextlib.closing(Pool(TWO)) as pool:
        for event in pool.run(rows()):
            assert isinstance(event, Completion)
            answers.append(event)
    assert [c.index for c in answers][-1] == 5
    assert len(answers) == 6


def test_rows_that_wait_for_nothing() -> None:
    """Are an error, not an endless wait."""

    def rows() -> Iterator[Request | Later]:
        while True:
            yield Later.LATER

    with contextlib.closing(Pool(TWO)) as pool, pytest.raises(EngineError, match="rows wait"):
        list(pool.run(rows()))


def test_rows_that_failed_before_pass_through() -> None:
    """In any mixture."""
    rows = [row(i) if i % 3 else failed_completion(i, i, "bad", None) for i in range(90)]
    with contextlib.closing(Pool(TWO)) as pool:
        done = [event for event in pool.run(rows) if isinstance(event, Completion)]
    assert sorted(c.index for c in done) == list(range(90))
    assert {c.index for c in done if c.failed} == set(range(0, 90, 3))


def test_a_row_that_kills_its_worker() -> None:
    """Costs itself; the others are computed, and the worker stays on its GPU."""
    requests = [row(i, "poison" if i == 33 else "hello") for i in range(80)]
    with contextlib.closing(Pool(TWO)) as pool:
        done = [event for event in pool.run(requests) if isinstance(event, Completion)]
        assert [member.gpus for member in pool.members] == [("FAKE0",), ("FAKE1",)]
        assert pool.num_restarts >= 1
    assert {c.index for c in done if c.failed} == {33}
    assert sorted(c.index for c in done) == list(range(80))


def test_text_comes_as_it_is_made() -> None:
    """Each row's pieces are its text."""
    with contextlib.closing(Pool(TWO)) as pool:
        events = list(pool.run([row(i, tokens=6) for i in range(20)], streams_text=True))
    pieces: dict[int, str] = {}
    for event in events:
        if isinstance(event, TextPiece):
            pieces[event.row] = pieces.get(event.row, "") + event.text
    done = [event for event in events if isinstance(event, Completion)]
    assert len(done) == 20
    assert all(pieces.get(c.index, "") == c.text for c in done)


def test_a_run_that_is_called_off() -> None:
    """Ends soon, and the next one has nothing of it."""
    with contextlib.closing(Pool(replace(TWO, fake_step_s=0.01))) as pool:
        events = pool.run([row(i, tokens=1 + 100 * (i > 0)) for i in range(500)])
        assert isinstance(next(events), Completion)
        started = time.monotonic()
        events.close()
        assert time.monotonic() - started < 5
        assert sorted(c.index for c in pool.run([row(i) for i in range(9)])) == list(range(9))


def test_counts_are_added_up() -> None:
    """Times are means, since the workers compute side by side."""
    both = merged([EngineStats(steps=3, decode_s=1.0, slots=8, threads=2),
                   EngineStats(steps=4, decode_s=3.0, slots=8, threads=2)])  # fmt: skip
    assert (both.steps, both.decode_s, both.slots, both.threads) == (7, 2.0, 16, 2)
