"""The Python API: a model, and prompts in any number."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import TypeAlias, TypeVar

from localbatch.data.config import (
    EngineConfig,
    FlashAttention,
    KVLayout,
    Order,
    Overlength,
    SplitMode,
)
from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import (
    Completion,
    Later,
    Message,
    Request,
    RowId,
    failed_completion,
)
from localbatch.data.sampling_params import SamplingParams
from localbatch.engine.backend import ModelCard
from localbatch.engine.engine import EngineStats, TextPiece
from localbatch.engine.pool import Pool
from localbatch.engine.preview import Preview
from localbatch.engine.prompt import check_template_args
from localbatch.models.catalog import resolve_model
from localbatch.models.gguf import check_gguf

_Choice = TypeVar("_Choice", bound=Enum)

Prompt: TypeAlias = str | Sequence[Message]
"""Text, or a list of messages with `role` and `content`."""


class LLM:
    """A GGUF model in a worker process; use it as a context manager, or call `close`.

    `model` is a path or a name from the model list. All sizes left out are chosen from the model,
    the machine and the rows. On the CPU, in the default layout, a row's answer does not depend on
    the rows beside it.

    Raises `ModelError` if the model can't be had or loaded, `ConfigError` if a setting is out of
    range, `WorkerError` if the worker dies whatever it computes.

        with LLM("smollm2-135m") as llm:
            for completion in llm.generate(["Why is the sky blue?", "Name three rivers."]):
                print(completion.text)
    """

    def __init__(
        self,
        model: str,
        *,
        ctx: int | None = None,
        parallel: int | None = None,
        threads: int | None = None,
        lanes: int | None = None,
        gpu_layers: int | None = None,
        devices: str | Sequence[str] | None = None,
        split_mode: SplitMode | str = SplitMode.AUTO,
        tensor_split: Sequence[float] | None = None,
        kv_layout: KVLayout | str = KVLayout.STREAMS,
        kv_cells: int | None = None,
        flash_attention: FlashAttention | str = FlashAttention.AUTO,
        ubatch: int | None = None,
        share_prefixes: bool = True,
        order: Order | str = Order.AUTO,
        any_numerics: bool = False,
        overlength: Overlength | str = Overlength.ERROR,
        chat_template: str | None = None,
        metadata_only: bool = False,
        backend: str = "llama",
        debug: bool = False,
    ) -> None:
        layout = _choice("kv_layout", KVLayout, kv_layout)
        flash = _choice("flash_attention", FlashAttention, flash_attention)
        order = _choice("order", Order, order)
        path = model
        if backend == "llama":
            path = str(resolve_model(model))
            check_gguf(path)
        self.config = EngineConfig(
            model=path, backend=backend, ctx=ctx, parallel=parallel, threads=threads, lanes=lanes,
            gpu_layers=gpu_layers,
            devices=_names(devices),
            split_mode=_choice("split_mode", SplitMode, split_mode),
            tensor_split=None if tensor_split is None else tuple(tensor_split),
            kv_layout=layout, kv_cells=kv_cells, flash_attention=flash,
            ubatch=ubatch, share_prefixes=share_prefixes, order=order, any_numerics=any_numerics,
            overlength=_choice("overlength", Overlength, overlength), chat_template=chat_template,
            metadata_only=metadata_only,
        )  # fmt: skip
        self._client = Pool(self.config, debug=debug)

    @property
    def card(self) -> ModelCard:
        """What the model says of itself."""
        return self._client.card

    @property
    def stats(self) -> EngineStats:
        """Counts since the model was loaded, as of the last report."""
        return self._client.stats

    @property
    def num_restarts(self) -> int:
        """How often the worker died and another one took over."""
        return self._client.num_restarts

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        system: str | None = None,
    ) -> list[Completion]:
        """Return the completions of all prompts, in their order.

        A prompt that is text becomes a user's message in the model's chat template, or is taken as
        it is with `raw`. `params` is one for all, or one for each prompt. A row that can't be
        computed has `error` set instead of raising.
        """
        completions = self.iter_completions(prompts, params, raw=raw, system=system)
        return sorted(completions, key=lambda completion: completion.index)

    def iter_completions(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        system: str | None = None,
    ) -> Iterator[Completion]:
        """Yield each completion as it ends; `index` says whose it is."""
        return self._completions(make_requests(prompts, params, raw=raw, system=system))

    def _completions(self, rows: Iterable[Request | Completion]) -> Iterator[Completion]:
        with contextlib.closing(self.run(rows)) as events:
            for event in events:
                if isinstance(event, Completion):
                    yield event

    def stream(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        system: str | None = None,
    ) -> Iterator[TextPiece | Completion]:
        """Yield pieces of text as they are generated, and each row's completion at its end."""
        rows = make_requests(prompts, params, raw=raw, system=system)
        return self.run(rows, streams_text=True)

    def run(
        self, rows: Iterable[Request | Completion | Later], *, streams_text: bool = False
    ) -> Generator[Completion | TextPiece, None, None]:
        """Yield the completion of each request as it ends; completions among `rows` pass through.

        `rows` is read as there is room, so it may be longer than memory. Rows may be made of the
        answers of others: while none is ready, `rows` yields `Later`, and is asked again when the
        next completions were taken.
        """
        return self._client.run(rows, streams_text=streams_text)

    def prepare(self, rows: Iterable[Request]) -> list[Completion]:
        """Plan for rows without computing them; `stats` then has the plan and its memory.

        Returns the records of rows that can't be computed.
        """
        return self._client.prepare(list(rows))

    def check_template_args(self, names: Iterable[str]) -> None:
        """Raise `ConfigError` for variables that the chat template has no use for."""
        check_template_args(self.config.chat_template or self.card.chat_template, names)

    def preview(self, rows: Iterable[Request], *, whole: bool = False) -> list[Preview]:
        """Return what would become of rows: tokens, errors; with `whole`, text and token ids."""
        return self._client.preview(list(rows), whole=whole)

    def close(self) -> None:
        """End the worker process."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _choice(name: str, kind: type[_Choice], value: str) -> _Choice:
    """Return a setting that has a few values by name."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{name}: must be one of {allowed}, not {value!r}") from None


def _names(devices: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of GPUs, also from one text with commas."""
    if isinstance(devices, str):
        devices = [name.strip() for name in devices.split(",")]
    return None if devices is None else tuple(devices)


def make_requests(
    prompts: Iterable[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    raw: bool = False,
    system: str | None = None,
) -> Iterator[Request | Completion]:
    """Return a request for each prompt, its place as its id; a failed completion for a bad one."""
    if isinstance(prompts, str):
        raise ConfigError("prompts: must be a list of prompts, not one string")
    if raw and system is not None:
        raise ConfigError("system: goes with the chat template, not with raw")
    return _requests(prompts, params, raw, system)


def _requests(
    prompts: Iterable[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    raw: bool,
    system: str | None,
) -> Iterator[Request | Completion]:
    for index, prompt in enumerate(prompts):
        own = params_of(params, index)
        try:
            yield make_request(index, index, prompt, own, raw=raw, system=system)
        except InputError as error:
            yield failed_completion(index, index, str(error), None)


def make_request(
    row_id: RowId,
    index: int,
    prompt: Prompt,
    params: SamplingParams,
    *,
    raw: bool,
    system: str | None,
) -> Request:
    """Return the request of one prompt; raises `InputError` if it is unusable."""
    if isinstance(prompt, str):
        if raw or not prompt.strip():
            return Request(row_id, index, prompt=prompt, params=params)
        messages: list[Message] = [{"role": "user", "content": prompt}]
    elif not isinstance(prompt, (list, tuple)) or not all(isinstance(m, Mapping) for m in prompt):
        return Request(row_id, index, messages=prompt, params=params)  # refuses it in words
    else:
        messages = list(prompt)
    if system is not None and not any(message.get("role") == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return Request(row_id, index, messages=messages, params=params)


def params_of(
    params: SamplingParams | Sequence[SamplingParams] | None, index: int
) -> SamplingParams:
    """Return the parameters of one prompt."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    if index >= len(params):
        raise ConfigError(f"params: {len(params)} of them, fewer than prompts")
    return params[index]
