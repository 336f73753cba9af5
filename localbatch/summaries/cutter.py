"""Cuts documents into chunks by the model's own tokens.

semantic-text-splitter looks for the highest border (of Markdown blocks, of paragraphs, sentences,
words) at which a chunk fits. Tokens are counted in a process that has the model's vocabulary but
not its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from localbatch.data.errors import ConfigError
from localbatch.data.request import Request
from localbatch.engine.llm import LLM
from localbatch.engine.reasoning import tags_of
from localbatch.formats.inputs import InputOptions
from localbatch.summaries.prompts import Prompts, Task

CHUNK_TOKENS = 1000
"""Tokens of a chunk, if nothing else is said: longer ones are slower to attend to, shorter ones
make more merges."""

_LEAST_TOKENS = 16
_MOST_TINY = 32
"""A model that is given a heading alone, or the end of a table, makes the rest up."""

_JOINT = 4
"""Tokens that putting text beside other text may add."""


class Span(NamedTuple):
    """A chunk of a text: `text[start:end]`."""

    start: int
    end: int
    tokens: int


@dataclass(frozen=True)
class Sizes:
    """Room in the prompts of a job, in tokens."""

    chunk: int
    """Most of a document's text in one prompt."""
    part: int
    """Most of a summary among those that are merged."""

    @property
    def fan_in(self) -> int:
        """How many summaries are merged at one time."""
        return self.chunk // (self.part + _JOINT)


class Cutter:
    """Counts tokens and cuts texts so that each request fits the context with its answer.

    `ctx` is the most tokens of a row, left out: what the model was made for. Raises `ConfigError`
    if the context has no room for chunks and the merging of two summaries.
    """

    def __init__(
        self,
        model: str,
        prompts: Prompts,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        ctx: int | None = None,
        chat_template: str | None = None,
        backend: str = "llama",
    ) -> None:
        self._llm = LLM(
            model, metadata_only=True, share_prefixes=False, ctx=ctx, backend=backend,
            chat_template=chat_template,
        )  # fmt: skip
        try:
            template = chat_template or self._llm.card.chat_template
            self.prompts = replace(prompts, reasons=_reasons(prompts.inputs, template))
            """With what the model is known to do."""
            self.longest = ctx or self._llm.card.max_ctx
            self.sizes = self._sizes(chunk_tokens)
        except BaseException:
            self.close()
            raise

    def count(self, text: str) -> int:
        """Return how many tokens a text has by itself."""
        if not text:
            return 0
        # A word in front, for the tokenizer takes no blank text, and a BOS does not count.
        return self._counts([Request(0, 0, prompt="." + text)])[0] - self._dot

    def fits(self, request: Request) -> bool:
        """Return whether a request has room for all of its answer."""
        return self._counts([request])[0] + request.params.max_tokens <= self.longest

    def cut(self, text: str, *, markdown: bool = False) -> list[Span]:
        """Return chunks that are all of the text, none of it twice, each fitting a prompt."""
        room = self.sizes.chunk
        spans = self._evened(text, self._cut(text, room, markdown), markdown)
        while room > _LEAST_TOKENS and not self._all_fit(text, spans):
            room = max(_LEAST_TOKENS, room * 9 // 10)
            spans = self._cut(text, room, markdown)
        return spans

    def head(self, text: str, tokens: int) -> str:
        """Return the beginning of a text that has no more tokens."""
        if self.count(text) <= tokens:
            return text
        spans = self._cut(text, tokens, markdown=False)
        return text[: spans[0].end]

    def close(self) -> None:
        """End the process that counts."""
        self._llm.close()

    def __enter__(self) -> Cutter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _cut(self, text: str, room: int, markdown: bool) -> list[Span]:
        kind = MarkdownSplitter if markdown else TextSplitter
        usual = room - _tiny(room)
        splitter = kind.from_callback(self.count, usual, trim=False)
        pieces = splitter.chunk_indices(text)
        counts = self._counts([Request(i, i, prompt="." + p) for i, (_, p) in enumerate(pieces)])
        spans = [
            Span(start, start + len(piece), count - self._dot)
            for (start, piece), count in zip(pieces, counts, strict=True)
        ]
        return _joined(_joined(spans, usual), room, at_most=_tiny(room))

    def _evened(self, text: str, spans: list[Span], markdown: bool) -> list[Span]:
        """Return chunks of more even sizes, if there are no more of them.

        Of a text that is a little longer than a chunk the rest would be asked for a summary that is
        longer than itself.
        """
        if len(spans) < 2 or min(span.tokens for span in spans) * 2 > self.sizes.chunk:
            return spans
        mean = sum(span.tokens for span in spans) // len(spans)
        for room in (mean * 9 // 8, mean * 5 // 4):
            evener = self._cut(text, room, markdown) if room < self.sizes.chunk else []
            if 0 < len(evener) <= len(spans):
                return evener
        return spans

    def _all_fit(self, text: str, spans: Sequence[Span]) -> bool:
        task = Task.WHOLE if len(spans) == 1 else Task.PART
        requests = [
            self.prompts.request(task, "", i, text[span.start : span.end])
            for i, span in enumerate(spans)
        ]
        most = self.longest - self.prompts.max_tokens(task)
        return max(self._counts(requests), default=0) <= most

    def _counts(self, requests: Sequence[Request]) -> list[int]:
        return [seen.num_tokens or self.longest + 1 for seen in self._llm.preview(requests)]

    def _sizes(self, chunk_tokens: int) -> Sizes:
        tasks = list(Task)
        empty = [self.prompts.request(task, "", i, ".") for i, task in enumerate(tasks)]
        for seen in self._llm.preview(empty):
            if seen.error is not None:
                raise ConfigError(f"the instruction alone can't be computed: {seen.error}")
        frames = self._counts(empty)
        self._dot = self._counts([Request(0, 0, prompt=".")])[0]
        room = min(
            self.longest - frame - self.prompts.max_tokens(task) - _JOINT
            for task, frame in zip(tasks, frames, strict=True)
        )
        sizes = Sizes(min(chunk_tokens, room), self.prompts.summary_tokens(Task.PART))
        if sizes.fan_in < 2:
            need = 2 * (sizes.part + _JOINT)
            if room < need:
                raise ConfigError(
                    f"the context of {self.longest:,} tokens has no room for two summaries of "
                    f"{sizes.part} tokens each; it must be {self.longest + need - room:,} (--ctx)"
                )
            raise ConfigError(f"chunk_tokens: must be at least {need} for summaries of this length")
        return sizes


def _reasons(inputs: InputOptions, template: str | None) -> bool:
    """Return whether a model's answers begin with a reasoning."""
    is_off = inputs.template_args.get("enable_thinking") is False
    return inputs.chat and not is_off and tags_of(template) is not None


def _tiny(room: int) -> int:
    """Return how many tokens are too few to be summarized by themselves."""
    return min(_MOST_TINY, room // 8)


def _joined(spans: Sequence[Span], room: int, at_most: int | None = None) -> list[Span]:
    """Return spans with neighbours put together that have room.

    With `at_most`, only if one of the two has no more tokens.
    """
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None:
            is_small = at_most is None or min(last.tokens, span.tokens) <= at_most
            if is_small and last.tokens + span.tokens <= room:
                joined[-1] = Span(last.start, span.end, last.tokens + span.tokens)
                continue
        joined.append(span)
    return joined
