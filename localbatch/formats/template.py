"""Prompts from a Jinja template of the user's own, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta, nodes

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.sandbox import Sandbox

ROW = "row"
"""What templates call the whole row."""

_MOST_NAMES = 30  # in a message
_FAULTS = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
    RecursionError, MemoryError,
)  # fmt: skip


class PromptTemplate:
    """Makes the text of a prompt of a row's values, by their names and as `row`.

    A null is written as nothing, and a name that a row does not have is an error of that row.
    Raises `ConfigError` if it is no template.
    """

    def __init__(self, source: str) -> None:
        environment = Sandbox(
            undefined=StrictUndefined, finalize=lambda value: "" if value is None else value
        )
        environment.filters["tojson"] = _tojson
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f" (line {line})" if line else ""
            raise ConfigError(f"--template: is not valid Jinja: {_reason(error)}{where}") from None
        except RecursionError:
            raise ConfigError("--template: is nested too deep") from None
        for access in tree.find_all(nodes.Getattr):
            if access.attr.startswith("__"):
                raise ConfigError(f"--template: {access.attr!r} is not allowed in a template")
        undeclared = meta.find_undeclared_variables(tree) - set(environment.globals)
        self.uses_row = ROW in undeclared
        self.names = undeclared - {ROW} | _row_items(tree)
        """What it takes from a row."""
        self._may_lack = _guarded(tree)

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Return the names that no row of these columns has, and that it can't do without."""
        return sorted(self.names - set(columns) - self._may_lack)

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text; raises `InputError` if it can't be made."""
        try:
            return self._template.render({**values, ROW: dict(values)})
        except _FAULTS as error:
            message = _reason(error)
            if lacking := self.missing(values):
                message += f"; the row has {name_list(values)}, not {name_list(lacking)}"
            raise InputError(message, field="--template") from None


def name_list(names: Iterable[str]) -> str:
    """Return names for a message."""
    listed = [repr(name) for name in names]
    shown = ", ".join(listed[:_MOST_NAMES])
    more = f" and {len(listed) - _MOST_NAMES:,} more" if len(listed) > _MOST_NAMES else ""
    return shown + more or "nothing"


def _row_items(tree: nodes.Template) -> set[str]:
    """Return the names in `row['name']`."""
    return {
        access.arg.value
        for access in tree.find_all(nodes.Getitem)
        if isinstance(access.node, nodes.Name)
        and access.node.name == ROW
        and isinstance(access.arg, nodes.Const)
        and isinstance(access.arg.value, str)
    }


def _guarded(tree: nodes.Template) -> set[str]:
    """Return the names of which the template asks whether they are there."""
    tests = [test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    filters = [made for made in tree.find_all(nodes.Filter) if made.name in ("default", "d")]
    found = set()
    for node in (*tests, *filters):
        if isinstance(node.node, nodes.Name):
            found.add(node.node.name)
        elif isinstance(node.node, nodes.Getitem) and isinstance(node.node.arg, nodes.Const):
            found.add(node.node.arg.value)
    return found


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _tojson(value: object, indent: int | None = None) -> str:
    """Replace Jinja's filter, which would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)
