"""Which of a row's values are its id and its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import RowId
from localbatch.formats.lines import check_value
from localbatch.formats.template import PromptTemplate, name_list

_PROMPT_NAMES = ("prompt", "text")
_ID_NAME = "id"


class RowForm:
    """Makes an id and a prompt of a row's values.

    `columns` are those that every row has, `None` if each has its own. Raises `ConfigError`, with
    the columns, if one that is asked for is not there.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str] | None,
        *,
        prompt_column: str | None = None,
        id_column: str | None = None,
        template: PromptTemplate | None = None,
    ) -> None:
        self._name, self._columns, self._template = name, columns, template
        self._prompt = prompt_column
        self._id = _ID_NAME if id_column is None else id_column
        if columns is None:
            return
        if id_column:
            self._check(id_column, "--id-column")
        elif self._id not in columns:
            self._id = ""
        if template is None:
            self._prompt = self._prompt or self._default_prompt(columns)
            self._check(self._prompt, "--prompt-column")
        else:
            for lacking in template.missing(columns):
                self._check(lacking, "--template")
            for used in template.names & set(columns):
                self._check(used, "--template")

    @property
    def needed(self) -> list[str]:
        """The columns that are looked at; a name twice in a table is the first of them."""
        columns = dict.fromkeys(self._columns or [])
        if self._template is not None and self._template.uses_row:
            return list(columns)
        used = self._template.names if self._template is not None else {self._prompt}
        return [name for name in columns if name in used or name == self._id]

    @property
    def prompt_field(self) -> str | None:
        """What is wrong if a prompt is."""
        return "--template" if self._template is not None else self._prompt

    def own_id(self, values: Mapping[str, Any]) -> RowId | None:
        """Return a row's own id, `None` if it has none; raises `InputError` if it is no id."""
        row_id = values.get(self._id) if self._id else None
        if row_id is None or row_id == "":
            return None
        if self._columns is None and (
            isinstance(row_id, bool) or not isinstance(row_id, (str, int))
        ):
            kind = type(row_id).__name__
            raise InputError(f"must be a string or a whole number, not {kind}", field=self._id)
        check_value(row_id, self._id)
        return row_id if isinstance(row_id, int) and not isinstance(row_id, bool) else str(row_id)

    def prompt(self, values: Mapping[str, Any]) -> str:
        """Return a row's prompt; raises `InputError` if it has none."""
        if self._template is not None:
            return self._template.render(values)
        name = self._prompt or ""
        if name not in values:
            raise InputError(f"is not there; the row has {name_list(values)}", field=name)
        text = values[name]
        if text is None:
            raise InputError("is null", field=name)
        if not isinstance(text, str):
            kind = type(text).__name__
            raise InputError(f"must be text, not {kind}; --template takes any type", field=name)
        return text

    def _default_prompt(self, columns: Sequence[str]) -> str:
        for name in _PROMPT_NAMES:
            if name in columns:
                return name
        if len(columns) == 1:
            return columns[0]
        raise ConfigError(
            f"{self._name}: has the columns {name_list(columns)}; "
            "say which is the prompt with --prompt-column, or write a --template"
        )

    def _check(self, column: str, option: str) -> None:
        columns = self._columns or []
        if column not in columns:
            raise ConfigError(
                f"{option}: {self._name} has no column {column!r}; it has {name_list(columns)}"
            )
        if columns.count(column) > 1:
            raise ConfigError(f"{option}: {self._name} has the column {column!r} twice; rename one")
