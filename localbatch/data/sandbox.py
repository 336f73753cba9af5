"""Jinja for templates that come with files: no way to Python, and no way to all of the memory."""

from __future__ import annotations

from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_REPEATED = 10_000_000
"""Longest text or list that `*` may make."""
_MOST_BITS = 4096


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a short template can't make a text of gigabytes by `*` and `**`."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute; raises `SecurityError` for what is too large."""
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                is_sized = isinstance(many, (str, bytes, list, tuple))
                if is_sized and isinstance(times, int) and len(many) * times > MOST_REPEATED:
                    raise SecurityError(f"makes a text of more than {MOST_REPEATED:,} characters")
        elif isinstance(left, int) and isinstance(right, int) and _bits(left, right) > _MOST_BITS:
            raise SecurityError("makes a number that is too large")
        return super().call_binop(context, operator, left, right)


def _bits(base: int, exponent: int) -> int:
    return abs(base).bit_length() * exponent
