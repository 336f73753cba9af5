"""Settings of localbatch on the command line: `NAME=VALUE` and `LABEL:NAME=VALUE,NAME=VALUE`."""

from __future__ import annotations

import argparse
from typing import Any


def setting(text: str) -> tuple[str, Any]:
    """Read `NAME=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value_of(value)


def variant(text: str) -> tuple[str, dict[str, Any]]:
    """Read `LABEL:NAME=VALUE,NAME=VALUE`."""
    label, colon, rest = text.partition(":")
    if not colon or not label or not rest:
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL:NAME=VALUE,NAME=VALUE")
    return label, dict(setting(part) for part in rest.split(","))


def server_settings(text: str) -> dict[str, Any]:
    """Read the settings of llama-server: `slots=NUMBER,unified=true|false,flash=true|false`."""
    settings = dict(setting(part) for part in text.split(","))
    if set(settings) != {"slots", "unified", "flash"}:
        raise argparse.ArgumentTypeError(f"{text!r} is not slots=N,unified=BOOL,flash=BOOL")
    return settings


def value_of(text: str) -> Any:
    """Read a whole number, a number, true, false or none; anything else is text."""
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def positive(text: str) -> int:
    """Read a whole number from 1 up."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number
