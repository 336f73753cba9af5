"""From a request to token ids: the model's chat template, and one BOS whatever it writes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Message, Request
from localbatch.engine.backend import Backend


class PromptEncoder:
    """Renders and tokenizes the requests of one model."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._card = backend.card
        self._template: ChatTemplate | None = None
        if self._card.special_texts:
            longest_first = sorted(self._card.special_texts.values(), key=len, reverse=True)
            self._special = re.compile("|".join(map(re.escape, longest_first)))
        else:
            self._special = re.compile(r"(?!)")

    def encode(self, request: Request) -> list[int]:
        """Return the prompt's token ids.

        Raises `InputError` if the row can't be rendered, `ConfigError` if the model has no chat
        template.
        """
        if request.prompt is not None:
            tokens = self._backend.tokenize(request.prompt, add_special=True, parse_special=False)
        else:
            assert request.messages is not None
            tokens = self._encode_chat(request.messages)
        if not tokens:
            raise InputError("gives no tokens", field="prompt")
        return tokens

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            self._template = self._compile()
        mark = _Mark(self._special)
        text = self._template.render([mark.guard(message) for message in messages])
        tokens: list[int] = []
        for part, from_row in mark.split(text):
            tokens += self._backend.tokenize(part, add_special=False, parse_special=not from_row)
        return self._with_one_bos(tokens)

    def _with_one_bos(self, tokens: list[int]) -> list[int]:
        """Templates may or may not write BOS; a model that wants one gets exactly one."""
        bos = self._card.bos_token
        if bos is None or not self._card.adds_bos:
            return tokens
        start = 0
        while start < len(tokens) and tokens[start] == bos:
            start += 1
        return [bos, *tokens[start:]]

    def _compile(self) -> ChatTemplate:
        if self._card.chat_template is None:
            raise ConfigError(
                "the model has no chat template (a base model?); --raw takes prompts as they are"
            )
        return ChatTemplate(
            self._card.chat_template,
            bos_token=self._text(self._card.bos_token),
            eos_token=self._text(self._card.eos_token),
        )

    def _text(self, token: int | None) -> str:
        return "" if token is None else self._card.special_texts.get(token, "")


_TEMPLATE_FAULTS = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
    RecursionError, MemoryError,
)  # fmt: skip
"""What a template that does not fit its messages may raise."""


class ChatTemplate:
    """A GGUF's Jinja template, in a sandbox.

    The environment is that of Hugging Face transformers, for which these templates are written
    (`_compile_jinja_template` in transformers' utils/chat_template_utils.py).
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        # Some templates ask whether tools and documents are None, not whether they are there.
        self._constants = {
            "bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None,
        }  # fmt: skip
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt; raises `InputError` with the template's reason if it refuses."""
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, **self._constants
            )
            text.encode()  # half a surrogate pair in a message's further fields is no text
            return text
        except _TEMPLATE_FAULTS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"the chat template refuses them: {reason}", field="messages"
            ) from error


class _Mark:
    """Keeps control tokens that are written in a row's own text from becoming control tokens.

    They are marked before the template runs and tokenized as plain text after it. Only they are
    cut out: elsewhere the tokenizer sees the text as a whole.
    """

    def __init__(self, special: re.Pattern[str]) -> None:
        # Digits only: a template may change the case, or write values as Python or JSON does.
        nonce = f"{secrets.randbelow(10**20):020}"
        self._special = special
        self._open, self._close = f"{nonce}1", f"{nonce}2"
        self._used = False

    def guard(self, message: Message) -> dict[str, Any]:
        """Return a copy of a message with the control tokens in all its strings marked."""
        return {key: self._guarded(value) for key, value in message.items()}

    def _guarded(self, value: Any) -> Any:
        if isinstance(value, str):
            marked = self._special.sub(lambda m: f"{self._open}{m[0]}{self._close}", value)
            self._used = self._used or marked != value
            return marked
        if isinstance(value, dict):
            return {key: self._guarded(item) for key, item in value.items()}
        return (
            [self._guarded(item) for item in value] if isinstance(value, (list, tuple)) else value
        )

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Return the parts of a rendered prompt and whether each is a marked one."""
        if not self._used:
            return [(text, False)]
        pattern = f"{re.escape(self._open)}(.*?){re.escape(self._close)}"
        parts = re.split(pattern, text, flags=re.DOTALL)
        return [(part, bool(i % 2)) for i, part in enumerate(parts) if part]


class _Generation(Extension):
    """`{% generation %}` marks the model's own text, for training; here it stands for that text."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's filter, which would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
