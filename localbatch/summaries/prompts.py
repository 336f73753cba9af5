"""What the model is asked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from localbatch.data.errors import ConfigError
from localbatch.data.request import Message, Request
from localbatch.data.sampling_params import SamplingParams
from localbatch.formats.inputs import InputOptions


class SummaryStyle(str, Enum):
    """The form of a summary."""

    BULLETS = "bullets"
    PARAGRAPH = "paragraph"
    HEADLINE = "headline"
    ABSTRACT = "abstract"


class Task(Enum):
    """What a request is for."""

    WHOLE = "whole"
    """A document in one piece."""
    PART = "part"
    MERGE = "merge"
    """Some of a document's parts."""
    FINAL = "final"
    """All of a document's parts."""


_FORMS = {
    SummaryStyle.BULLETS: "as a list of bullet points, each a short line that begins with '- '",
    SummaryStyle.PARAGRAPH: "in one paragraph",
    SummaryStyle.HEADLINE: "in a single headline, one line and nothing else",
    SummaryStyle.ABSTRACT: "as an abstract: what it is about, what was done or found, what follows",
}
_LENGTHS = {
    SummaryStyle.BULLETS: 120,
    SummaryStyle.PARAGRAPH: 100,
    SummaryStyle.HEADLINE: 15,
    SummaryStyle.ABSTRACT: 180,
}
_MERGED = "The text below consists of the summaries of consecutive parts of one longer text. "
_LEAST_PART_WORDS, _MOST_PART_WORDS = 80, 160
_MAX_WORDS = 4000
_REASONING_TOKENS = 512
_CLOSING_TOKENS = 8
"""What the tag after a reasoning may have."""


@dataclass(frozen=True)
class SummaryOptions:
    """How summaries are to be. Raises `ConfigError` if `style` or `length` is none."""

    style: SummaryStyle = SummaryStyle.PARAGRAPH
    length: int | None = None
    """Words, roughly; left out: what is usual for the style."""
    language: str | None = None
    """Left out: that of the document."""
    instruction: str | None = None
    """Takes the place of what the model is told, for documents, parts and merges alike. The text
    is put after it, or where it says `{text}`."""
    focus: str | None = None
    """What matters most."""

    def __post_init__(self) -> None:
        styles = [style.value for style in SummaryStyle]
        if self.style not in styles:
            raise ConfigError(f"style: must be one of {', '.join(styles)}, not {self.style!r}")
        object.__setattr__(self, "style", SummaryStyle(self.style))
        if self.length is not None and not 1 <= self.length <= _MAX_WORDS:
            raise ConfigError(f"length: must be from 1 to {_MAX_WORDS} words, not {self.length}")
        if self.instruction is not None and not self.instruction.strip():
            raise ConfigError("instruction: is empty")

    def words(self, task: Task) -> int:
        """Return how long an answer should be."""
        length = self.length or _LENGTHS[self.style]
        if task in (Task.PART, Task.MERGE):
            return min(max(length, _LEAST_PART_WORDS), _MOST_PART_WORDS)
        return length


@dataclass(frozen=True)
class Prompts:
    """Makes the requests of a job: the instruction first, which all of a kind have in common."""

    options: SummaryOptions = field(default_factory=SummaryOptions)
    inputs: InputOptions = field(default_factory=InputOptions)
    params: SamplingParams = field(default_factory=SamplingParams)
    """`max_tokens` is set by the length of the summary."""
    reasons: bool = False
    """Whether the model writes a reasoning before its answers; it has tokens of its own."""

    def summary_tokens(self, task: Task) -> int:
        """Return the most tokens of a summary; a word may have two."""
        return 2 * self.options.words(task) + 16

    def max_tokens(self, task: Task) -> int:
        """Return the most tokens of an answer, its reasoning included."""
        return self.summary_tokens(task) + self._reasoning_tokens * self.reasons

    @property
    def _reasoning_tokens(self) -> int:
        most = self.params.max_reasoning_tokens
        return (_REASONING_TOKENS if most is None else most) + _CLOSING_TOKENS

    def request(self, task: Task, row_id: str, index: int, text: str) -> Request:
        """Return the request for the summary of a text."""
        prompt = self._prompt(task, text.strip())
        params = replace(self.params, max_tokens=self.max_tokens(task))
        if self.reasons:
            most = self._reasoning_tokens - _CLOSING_TOKENS
            params = replace(params, max_reasoning_tokens=most)
        if not self.inputs.chat:
            return Request(row_id, index, prompt=f"{prompt}\n", params=params)
        messages: list[Message] = [{"role": "user", "content": prompt}]
        if self.inputs.system is not None:
            messages.insert(0, {"role": "system", "content": self.inputs.system})
        return Request(
            row_id, index, messages=messages, params=params,
            template_args=self.inputs.template_args,
        )  # fmt: skip

    def _prompt(self, task: Task, text: str) -> str:
        """Return what is asked: the instruction first, to be shared, and its gist after the text.

        Small models go on with a text that has nothing after it.
        """
        own = self.options.instruction
        if own is None:
            return f"{self._instruction(task)}\n\nText:\n{text}\n\n{self._gist(task)}"
        return own.replace("{text}", text) if "{text}" in own else f"{own.strip()}\n\n{text}"

    def _gist(self, task: Task) -> str:
        language = f", in {self.options.language}" if self.options.language else ""
        return f"Summary of this text {self._form(task)}{language}:"

    def _form(self, task: Task) -> str:
        last = task in (Task.WHOLE, Task.FINAL)
        form = _FORMS[self.options.style] if last else "in a few sentences"
        return f"{form}, of about {self.options.words(task)} words"

    def _instruction(self, task: Task) -> str:
        options = self.options
        intro = _MERGED if task in (Task.MERGE, Task.FINAL) else ""
        parts = [f"{intro}Summarize the text below {self._form(task)}."]
        if options.focus:
            parts.append(f"What matters most is this: {options.focus.strip()}.")
        if options.language:
            parts.append(f"Write in {options.language}.")
        else:
            parts.append("Write in the language of the text.")
        parts.append("Use only what the text says, and add no facts, names or numbers.")
        return " ".join(parts)
