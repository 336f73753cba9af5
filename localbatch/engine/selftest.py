"""Tests what works on this machine, each step in a process that may die."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from localbatch.data.errors import LocalbatchError, WorkerError
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import Numerics
from localbatch.engine.llm import LLM
from localbatch.engine.machine import available_memory, usable_threads

SELFTEST_MODEL = Path(__file__).with_name("selftest.gguf")
"""A tiny model of random Q4_0 weights, written by tests/tiny_gguf.py; Q4_0 takes the special
matrix kernels of every processor that has some."""

REBUILD = (
    'CFLAGS="-fno-dse -fno-tree-dse" CXXFLAGS="-fno-dse -fno-tree-dse" '
    "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python "
    "'llama-cpp-python==0.3.36'"
)
_BUILD_CODE = """\
import sys; sys.path[:] = {path!r}
from localbatch.engine import library
print(library.check_binding())
print(library.system_info())
from localbatch.engine.llama import found_gpus
print("; ".join(map(str, found_gpus())) if library.supports_gpu() else "no")
"""
_NUMERICS = {
    Numerics.SAME_AS_ALONE: "a row's logits are the same bits in any batch as alone",
    Numerics.SAME_IN_ANY_BATCH: "a row's logits are the same bits in any batch (padded batches)",
    Numerics.VARIES: "a row's logits may vary in the last bits with the batch",
}


@dataclass(frozen=True)
class Check:
    """One thing tested."""

    name: str
    passed: bool
    said: str
    advice: str = ""


def run_checks(model: str | None = None) -> list[Check]:
    """Return what was found; later checks are left out when an earlier one fails."""
    checks = _build_checks()
    if all(check.passed for check in checks):
        checks += [_machine_check(), *_decode_checks(model or str(SELFTEST_MODEL))]
    return checks


def _build_checks() -> list[Check]:
    """Load llama.cpp in a child, and let it say what it was built with."""
    child = subprocess.run(
        [sys.executable, "-c", _BUILD_CODE.format(path=sys.path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = child.stdout.strip().splitlines()
    if child.returncode != 0 or len(lines) < 3:
        said = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return [Check("binding", False, said, f"To rebuild: {REBUILD}")]
    version, features, gpu = lines[-3:]
    used = [part.split("=")[0].strip() for part in features.split("|") if "= 1" in part]
    return [
        Check("binding", True, f"llama-cpp-python {version}"),
        Check("features", True, " ".join(name.removeprefix("CPU :").strip() for name in used)),
        Check("gpu", True, _gpu_line(gpu)),
    ]


def _gpu_line(said: str) -> str:
    if said == "no":
        return "none (llama.cpp was built for the CPU alone, or finds no GPU)"
    return said


def _machine_check() -> Check:
    gib = available_memory() / 2**30
    return Check("machine", True, f"{usable_threads()} cores, {gib:.1f} GiB of memory available")


def _decode_checks(model: str) -> list[Check]:
    """Generate a few tokens for a few rows."""
    name = "built-in model" if model == str(SELFTEST_MODEL) else model
    try:
        with LLM(model) as llm:
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            rows = llm.generate(["one", "two", "three"], params, raw=True)
            numerics = llm.stats.numerics
            card = llm.card
    except WorkerError as error:
        advice = f"llama.cpp does not work on this processor as it was built. To rebuild: {REBUILD}"
        return [Check("decode", False, f"{name}: {error}", advice)]
    except LocalbatchError as error:
        return [Check("decode", False, str(error))]
    errors = [row.error for row in rows if row.error]
    if errors:
        return [Check("decode", False, f"{name}: {errors[0]}")]
    count = sum(row.usage.completion_tokens for row in rows)
    checks = [Check("decode", True, f"{name} ({card.description}): {count} tokens in 3 rows")]
    if numerics is not None and model != str(SELFTEST_MODEL):  # it depends on the weight types
        checks.append(Check("numerics", True, _NUMERICS[numerics]))
    return checks
