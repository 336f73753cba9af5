"""Splits what a reasoning model writes before its answer from the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from localbatch.data.request import Request
from localbatch.engine.backend import Backend
from localbatch.engine.text import TextStream


class Tags(NamedTuple):
    """What a model writes around its reasoning."""

    open: str
    close: str


_KNOWN = (
    Tags("<think>", "</think>"),
    Tags("<thinking>", "</thinking>"),
    Tags("[THINK]", "[/THINK]"),
)
_BLANKS = " \t\r\n"
_PROMPT_END = 32
"""Tokens at a prompt's end that may hold an opening tag and blanks."""


def tags_of(template: str | None) -> Tags | None:
    """Return the tags that a chat template knows; others are text like any other."""
    template = template or ""
    return next((tags for tags in _KNOWN if tags.open in template or tags.close in template), None)


class _State(Enum):
    BEFORE = "before"
    """Nothing but blanks and what may become the opening tag."""
    INSIDE = "inside"
    BETWEEN = "between"
    """After the closing tag, where line ends don't count."""
    ANSWER = "answer"


class Splitter:
    """Splits a text that comes in pieces at the tags around its beginning.

    `is_open`: the prompt ended in the opening tag. A model that writes it once more is not taken
    at its word.
    """

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        self._tags, self._is_open = tags, is_open
        self._state = _State.BEFORE
        self._held = ""
        self._reasoning: list[str] = []

    @property
    def is_inside(self) -> bool:
        """Whether the reasoning has begun and not ended."""
        begun = self._state is _State.BEFORE and self._is_open
        return begun or self._state is _State.INSIDE

    @property
    def reasoning(self) -> str:
        """The reasoning so far, without blanks around it."""
        return "".join(self._reasoning).strip()

    def push(self, text: str) -> str:
        """Take in text; returns what is certain to be of the answer."""
        self._held += text
        if self._state is _State.BEFORE:
            self._look_for_open()
        if self._state is _State.INSIDE:
            self._look_for_close()
        if self._state is _State.BETWEEN:
            self._held = self._held.lstrip("\r\n")
            self._state = _State.ANSWER if self._held else _State.BETWEEN
        if self._state is not _State.ANSWER:
            return ""
        answer, self._held = self._held, ""
        return answer

    def finish(self) -> str:
        """End the text; returns what was held back of the answer."""
        rest, self._held = self._held, ""
        if not self.is_inside:
            return rest
        self._reasoning.append(rest)
        return ""

    def _look_for_open(self) -> None:
        text = self._held.lstrip(_BLANKS)
        if text.startswith(self._tags.open):
            self._held = text[len(self._tags.open) :]
            self._state = _State.INSIDE
        elif not self._tags.open.startswith(text):
            self._state = _State.INSIDE if self._is_open else _State.ANSWER

    def _look_for_close(self) -> None:
        before, close, after = self._held.partition(self._tags.close)
        certain = len(before) if close else max(0, len(before) - len(self._tags.close) + 1)
        self._reasoning.append(before[:certain])
        self._held = after if close else before[certain:]
        if close:
            self._state = _State.BETWEEN


class ReasoningText(TextStream):
    """The text of an answer that may begin with reasoning; `finish` and `take` have the rest.

    Stop strings count everywhere, within the reasoning too.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop: tuple[str, ...],
        tags: Tags,
        *,
        is_open: bool,
        most_tokens: int | None,
        closing: Sequence[int],
    ) -> None:
        self._tags, self._is_open = tags, is_open
        self._most_tokens, self._closing = most_tokens, closing
        super().__init__(token_bytes, stop)

    def clear(self) -> None:
        """Begin anew."""
        super().clear()
        self._splitter = Splitter(self._tags, is_open=self._is_open)
        self._answer: list[str] = []
        self._num_taken = 0  # parts handed out by take()
        # Token by token, without what is held back for stop strings.
        self._watcher = Splitter(self._tags, is_open=self._is_open)
        self._num_tokens = self._num_reasoning = 0
        self._is_closed = False

    @property
    def reasoning(self) -> str | None:
        """What came before the answer, up to a stop string."""
        return self._splitter.reasoning or None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the closing tag, itself included."""
        return self._num_reasoning

    @property
    def ended_in_reasoning(self) -> bool:
        """Whether no answer came after the reasoning; for texts that are finished."""
        return self._splitter.is_inside

    def push(self, token: int) -> None:
        """Add a token."""
        was_inside = self._watcher.is_inside
        self._watcher.push(self._token_bytes(token).decode("latin-1"))  # the tags are ASCII
        self._num_tokens += 1
        if was_inside or self._watcher.is_inside:
            self._num_reasoning = self._num_tokens
        super().push(token)

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next, once, where the reasoning gets too long."""
        limit = self._most_tokens
        if limit is None or self._is_closed or not self._watcher.is_inside:
            return ()
        self._is_closed = self._num_tokens >= limit
        return self._closing if self._is_closed else ()

    def finish(self) -> str:
        """End the text and return the answer."""
        super().finish()
        self._split()
        self._answer.append(self._splitter.finish())
        return "".join(self._answer)

    def take(self) -> str:
        """Return the answer's text that is certain and was not returned before."""
        self._split()
        new = "".join(self._answer[self._num_taken :])
        self._num_taken = len(self._answer)
        return new

    def _split(self) -> None:
        self._answer.append(self._splitter.push(super().take()))


class ReasoningTexts:
    """Makes the text streams of one model's answers."""

    def __init__(self, backend: Backend, chat_template: str | None = None) -> None:
        self._backend = backend
        self._tags = tags_of(chat_template or backend.card.chat_template)
        self._closing: list[int] | None = None
        written = backend.card.special_texts
        tags = self._tags or ()
        self._tag_bytes = {t: text.encode() for t, text in written.items() if text in tags}

    def make(self, request: Request, prompt: list[int]) -> TextStream:
        """Return the text stream of an answer; only chats of reasoning models have reasoning."""
        stop, tags = request.params.stop, self._tags
        if tags is None or request.messages is None:
            return TextStream(self._backend.token_bytes, stop)
        return ReasoningText(
            self._token_bytes, stop, tags, is_open=self._is_open(tags, prompt),
            most_tokens=request.params.max_reasoning_tokens, closing=self._closing_tokens(tags),
        )  # fmt: skip

    def _token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, also where a tag is a control token."""
        return self._tag_bytes.get(token) or self._backend.token_bytes(token)

    def _is_open(self, tags: Tags, prompt: list[int]) -> bool:
        end = b"".join(map(self._token_bytes, prompt[-_PROMPT_END:]))
        return end.decode("latin-1").rstrip(_BLANKS).endswith(tags.open)

    def _closing_tokens(self, tags: Tags) -> list[int]:
        if self._closing is None:
            self._closing = self._backend.tokenize(
                f"{tags.close}\n\n", add_special=False, parse_special=True
            )
        return self._closing
