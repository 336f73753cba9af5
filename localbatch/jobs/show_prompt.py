"""One row of a job as the model would get it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from localbatch.data.errors import ConfigError
from localbatch.data.request import Completion, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.llm import LLM
from localbatch.engine.preview import Preview
from localbatch.formats.inputs import InputOptions, read_requests
from localbatch.jobs.source import open_source


def show_prompt(
    model: str,
    source: str,
    row_id: str | None,
    params: SamplingParams,
    *,
    inputs: InputOptions,
    engine: Mapping[str, Any],
) -> tuple[Request, Preview]:
    """Return a row and what becomes of it; without an id, the first row.

    No weights are loaded. Raises `ConfigError` if there is no such row or it has no prompt.
    """
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_source(source, has_batches=not inputs.is_free_form))
        row = _find(read_requests(opened.input, params, inputs), row_id, source)
        if isinstance(row, Completion):
            raise ConfigError(f"{source}:{row.line}: {row.error}")
        llm = stack.enter_context(LLM(model, **engine, metadata_only=True))
        llm.check_template_args(inputs.template_args)
        (preview,) = llm.preview([row], whole=True)
        if preview.error is not None:
            where = source if row.line is None else f"{source}:{row.line}"
            raise ConfigError(f"{where}: {preview.error}")
        return row, preview


def _find(
    rows: Iterable[Request | Completion], row_id: str | None, source: str
) -> Request | Completion:
    for row in rows:
        if row_id is None or str(row.id) == row_id:
            return row
    if row_id is None:
        raise ConfigError(f"{source}: has no rows")
    raise ConfigError(f"{source}: has no row with the id {row_id!r}")
