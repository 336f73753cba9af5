"""The ids of an input's rows."""

from __future__ import annotations

from localbatch.data.errors import InputError
from localbatch.data.request import RowId


class SeenIds:
    """The ids of the rows so far, as text, and their numbers."""

    def __init__(self) -> None:
        self.unit, self.hint = "line", ""
        self._lines: dict[str, int] = {}
        self._unnamed = bytearray()  # 1 at the lines of rows without an id: a byte, not a string

    def add(self, own_id: RowId | None, line: int) -> None:
        """Note a row's id, or that it has none; raises `InputError` if the id is taken."""
        text = str(line if own_id is None else own_id)
        first = self._lines.get(text)
        if own_id is None:
            self._unnamed.extend(bytes(line - len(self._unnamed)) + b"\1")
        elif first is None:
            number = int(text) if len(text) < 16 and text.isdecimal() else 0
            if str(number) == text and self._unnamed[number : number + 1] == b"\1":
                first = number
            self._lines[text] = first or line
        if first is not None:
            hint = (
                f"; a row without an id has its {self.unit} number" if own_id is None else self.hint
            )
            raise InputError(f"{text!r} is the id of {self.unit} {first} already{hint}", field="id")
