"""Imports point down only, and each foreign library has its one place.

The layers are, from the bottom: data, scheduler, engine, jobs, cli. `models` and `formats` stand
beside scheduler, `compare` and `summaries` between jobs and cli. What is checked is the source, so
imports inside functions and those for type checkers only count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "localbatch"
ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "data": {"data"},
    "scheduler": {"scheduler", "data"},
    "models": {"models", "data"},
    "formats": {"formats", "data"},
    "engine": {"engine", "models", "scheduler", "data"},
    "jobs": {"jobs", "engine", "formats", "models", "scheduler", "data"},
    "compare": {"compare", "jobs", "engine", "formats", "models", "scheduler", "data"},
    "summaries": {"summaries", "jobs", "engine", "formats", "models", "scheduler", "data"},
    "cli": {
        "cli",
        "compare",
        "summaries",
        "jobs",
        "engine",
        "formats",
        "models",
        "scheduler",
        "data",
    },
}
ROOT_MODULES = {"__init__", "__main__", "_version"}
ROOT_MAY_IMPORT = {"data", "engine", "summaries", "cli"}

PLACES = {
    "llama_cpp": ("engine/library.py",),
    "ctypes": ("engine/binding.py", "engine/library.py"),
    "click": ("cli/",),
    "tqdm": ("jobs/progress.py", "cli/"),
    "pyarrow": ("formats/parquet.py",),
}
"""Library -> the files and folders of the package that may import it."""


def imports(source: str, module: tuple[str, ...], *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute name of everything that `module` imports.

    `from a import b` is `a.b`: whether b is a module or a name in one makes no difference here.
    """
    package = module if is_package else module[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            path = [*base, *(node.module.split(".") if node.module else [])]
            yield from ((node.lineno, ".".join([*path, alias.name])) for alias in node.names)


def violations(root: Path) -> list[str]:
    """Return `file:line: problem` for each import of a module that is not allowed there."""
    found = []
    for file in sorted((root / PACKAGE).rglob("*.py")):
        path = file.relative_to(root / PACKAGE)
        module = (PACKAGE, *path.with_suffix("").parts)
        is_package = path.stem == "__init__"
        layer = path.parts[0] if len(path.parts) > 1 else None
        where = path.as_posix()
        if layer is None and path.stem not in ROOT_MODULES:
            found.append(f"{where}: belongs to no layer")
            continue
        if layer is not None and layer not in MAY_IMPORT:
            found.append(f"{where}: belongs to no layer")
            continue
        names = imports(
            file.read_text("utf-8"), module[:-1] if is_package else module, is_package=is_package
        )
        for line, name in names:
            problem = _problem(where, layer, name)
            if problem is not None:
                found.append(f"{where}:{line}: {problem}")
    return found


def _problem(where: str, layer: str | None, name: str) -> str | None:
    top, *rest = name.split(".")
    if top != PACKAGE:
        places = PLACES.get(top)
        allowed = places is None or any(
            where.startswith(place) if place.endswith("/") else where == place for place in places
        )
        return None if allowed else f"{top} is not for this module"
    target = rest[0] if rest else ""
    if target == "_version":
        return None
    if target not in MAY_IMPORT:  # a name from the package itself, which imports upper layers
        return f"imports {name}, which is at the top"
    allowed_layers = ROOT_MAY_IMPORT if layer is None else MAY_IMPORT[layer]
    return None if target in allowed_layers else f"{layer or 'the root'} imports {target}"


def importers(root: Path, library: str) -> list[str]:
    """Return the modules below `root`/localbatch that import `library`."""
    return [
        file.relative_to(root).as_posix()
        for file in sorted((root / PACKAGE).rglob("*.py"))
        if any(
            name.split(".")[0] == library
            for _, name in imports(file.read_text("utf-8"), (PACKAGE, "x"), is_package=False)
        )
    ]


class TestThisPackage:
    def test_imports_point_down(self) -> None:
        """No module imports from a layer above its own, or a library that has another place."""
        assert violations(ROOT) == []

    def test_every_layer_is_there(self) -> None:
        """The check does not pass for want of files."""
        folders = {file.parent.name for file in (ROOT / PACKAGE).glob("*/__init__.py")}
        assert set(MAY_IMPORT) == folders

    def test_one_module_loads_the_c_library(self) -> None:
        """Others get it from there, checked."""
        assert importers(ROOT, "llama_cpp") == ["localbatch/engine/library.py"]

    def test_two_modules_know_c(self) -> None:
        """Only they are to be changed when llama-cpp-python changes."""
        assert importers(ROOT, "ctypes") == [
            "localbatch/engine/binding.py", "localbatch/engine/library.py",
        ]  # fmt: skip


def write(root: Path, path: str, source: str) -> None:
    """Write one module of a made-up tree."""
    file = root / PACKAGE / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source, "utf-8")


class TestTheCheck:
    @pytest.mark.parametrize(
        ("path", "source", "expected"),
        [
            ("data/a.py", "from localbatch.engine.llm import LLM", ":1: data imports engine"),
            ("data/a.py", "\nimport localbatch.jobs.job", ":2: data imports jobs"),
            ("scheduler/a.py", "from localbatch import models", ":1: scheduler imports models"),
            ("models/a.py", "import localbatch.scheduler", ":1: models imports scheduler"),
            ("models/a.py", "from ..engine import b", ":1: models imports engine"),
            ("models/__init__.py", "from ..engine import b", ":1: models imports engine"),
            ("engine/a.py", "from .. import jobs", ":1: engine imports jobs"),
            ("engine/sub/a.py", "from ...cli import b", ":1: engine imports cli"),
            ("jobs/a.py", "def f():\n    from localbatch.cli import main", ":2: jobs imports cli"),
            (
                "jobs/a.py",
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import localbatch.cli",
                ":3: jobs imports cli",
            ),
            (
                "cli/a.py",
                "from localbatch import LLM",
                ":1: imports localbatch.LLM, which is at the top",
            ),
            ("cli/a.py", "import localbatch", ":1: imports localbatch, which is at the top"),
            ("__init__.py", "from localbatch.jobs import b", ":1: the root imports jobs"),
            ("__main__.py", "from .scheduler import b", ":1: the root imports scheduler"),
            ("helpers.py", "", ": belongs to no layer"),
            ("helpers/a.py", "", ": belongs to no layer"),
            ("engine/llama.py", "import llama_cpp", ":1: llama_cpp is not for this module"),
            ("engine/binding.py", "import llama_cpp", ":1: llama_cpp is not for this module"),
            ("engine/a.py", "from ctypes import util", ":1: ctypes is not for this module"),
            ("engine/sub/binding.py", "import ctypes", ":1: ctypes is not for this module"),
            ("jobs/a.py", "import click.testing", ":1: click is not for this module"),
            ("jobs/job.py", "from tqdm import tqdm", ":1: tqdm is not for this module"),
        ],
    )
    def test_finds(self, tmp_path: Path, path: str, source: str, expected: str) -> None:
        """A module that breaks a rule is named, with the line."""
        write(tmp_path, path, source)
        assert [path + expected] == violations(tmp_path)

    @pytest.mark.parametrize(
        ("path", "source"),
        [
            ("data/a.py", "import json, math\nfrom localbatch.data.errors import ConfigError"),
            ("data/sub/a.py", "from ..errors import ConfigError\nfrom . import b"),
            ("scheduler/a.py", "from localbatch.data import request"),
            ("models/a.py", "from ..data.errors import ModelError"),
            ("engine/a.py", "from localbatch import models\nimport localbatch.scheduler.plan"),
            ("engine/library.py", "import ctypes.util\nfrom llama_cpp import llama_cpp"),
            ("engine/binding.py", "import ctypes\nfrom localbatch.engine.library import lib"),
            ("jobs/progress.py", "from tqdm.auto import tqdm"),
            ("jobs/a.py", "from localbatch import engine\nfrom localbatch._version import x"),
            ("cli/a.py", "import click, tqdm\nfrom localbatch.models import catalog"),
            ("cli/sub/a.py", "import click"),
            ("__main__.py", "from localbatch.cli import main"),
            ("__init__.py", "from ._version import __version__\nfrom .engine.llm import LLM"),
        ],
    )
    def test_lets_pass(self, tmp_path: Path, path: str, source: str) -> None:
        """A module that keeps to the rules is not named."""
        write(tmp_path, path, source)
        assert violations(tmp_path) == []

    def test_finds_all_in_a_tree(self, tmp_path: Path) -> None:
        """Every violation is listed, by file and line, and only those."""
        write(tmp_path, "engine/__init__.py", "from localbatch.data import errors")
        write(tmp_path, "engine/a.py", "import click\nimport os\nimport localbatch.cli")
        write(tmp_path, "data/a.py", "def f():\n    import ctypes")
        assert violations(tmp_path) == [
            "data/a.py:2: ctypes is not for this module",
            "engine/a.py:1: click is not for this module",
            "engine/a.py:3: engine imports cli",
        ]

    def test_lists_importers(self, tmp_path: Path) -> None:
        """A second module that imports a library is found wherever it is."""
        write(tmp_path, "engine/binding.py", "import ctypes")
        write(tmp_path, "engine/a.py", "def f():\n    from ctypes import util")
        write(tmp_path, "engine/b.py", "import ctypes_extra")
        expected = ["localbatch/engine/a.py", "localbatch/engine/binding.py"]
        assert expected == importers(tmp_path, "ctypes")
