"""Reads what OpenAI's batches and vLLM's give back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from localbatch.data.errors import ConfigError, InputError
from localbatch.formats.lines import ObjectParser, read_lines


class Result(NamedTuple):
    """A line of an output: its text, or what went wrong."""

    custom_id: str
    text: str | None
    error: str | None


def read_results(path: str) -> Iterator[Result]:
    """Read an output or error file of OpenAI, or an output of `vllm run-batch`, old or new.

    A row with several answers gives the first. Raises `ConfigError` if the file can't be opened,
    `InputError`, with the line, for a line that is none of these.
    """
    parser = ObjectParser()
    try:
        file = open(path, "rb")  # noqa: SIM115 - errors of the caller's block are not for here
    except OSError as error:
        raise ConfigError(f"{path}: can't be opened ({error.strerror}); check the path") from None
    with file:
        for line in read_lines(file, path):
            try:
                if line.error is not None:
                    raise line.error
                yield _result(parser.parse(line.text)[0])
            except InputError as error:
                message = f"{path}:{line.number}: is no line of a batch output: {error}"
                raise InputError(message, line=line.number) from None


def _result(row: Mapping[str, Any]) -> Result:
    name, response, error = row.get("custom_id"), row.get("response"), row.get("error")
    if not isinstance(name, str):
        raise InputError("must be a string", field="custom_id")
    if error is not None:
        return Result(name, None, _error_text(error))
    if not isinstance(response, dict):
        raise InputError("has neither an answer nor an error", field="response")
    # In vLLM's first form the response was the completion itself.
    body = response.get("body") if "status_code" in response else response
    if isinstance(body, dict) and body.get("error") is not None:
        return Result(name, None, _error_text(body["error"]))
    try:
        choice = body["choices"][0]  # type: ignore[index]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (LookupError, TypeError):
        raise InputError("has no choices with a text", field="response") from None
    return Result(name, text if isinstance(text, str) else None, None)


def _error_text(error: object) -> str:
    """Return the message of an error: text, an error object, or one in an object."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return str(inner["message"])
    return str(error)
