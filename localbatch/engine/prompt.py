"""From a request to token ids: the model's chat template, and one BOS whatever it writes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from localbatch.data.config import Overlength
from localbatch.data.errors import ConfigError, InputError
from localbatch.data.request import Message, Request
from localbatch.data.sandbox import Sandbox
from localbatch.engine.backend import Backend
from localbatch.engine.overlength import room_for_prompt, shortened


class PromptEncoder:
    """Renders and tokenizes the requests of one model.

    `chat_template` is the source of a Jinja template to use in place of the model's own.
    """

    def __init__(self, backend: Backend, chat_template: str | None = None) -> None:
        self._backend = backend
        self._own_template = chat_template
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
            tokens = self._encode_chat(request)
        if not tokens:
            raise InputError("gives no tokens", field="prompt")
        return tokens

    def encode_fitting(
        self, request: Request, longest: int, overlength: Overlength = Overlength.ERROR
    ) -> tuple[list[int], int]:
        """Return the prompt's token ids, and how many were cut out to fit a context of `longest`.

        Raises as `encode` does, and `InputError` for a prompt that does not fit.
        """
        tokens = self.encode(request)
        if overlength is not Overlength.ERROR:
            room = room_for_prompt(longest, request.params.max_tokens)
            if len(tokens) > room:
                kept = shortened(
                    request, room, overlength,
                    encode=self.encode, tokenize=self._plain, detokenize=self._text_of,
                )  # fmt: skip
                return kept, len(tokens) - len(kept)
        if len(tokens) > longest:
            raise InputError(
                f"has {len(tokens)} tokens, more than the context of {longest} "
                "(see --ctx and --overlength)",
                field="prompt",
                code="context_length_exceeded",
            )
        return tokens, 0

    def _plain(self, text: str) -> list[int]:
        return self._backend.tokenize(text, add_special=False, parse_special=False)

    def _text_of(self, tokens: list[int]) -> str:
        return b"".join(map(self._backend.token_bytes, tokens)).decode(errors="ignore")

    def render(self, request: Request) -> str:
        """Return the text that is tokenized; raises as `encode` does.

        Control tokens that are written in a row's own text look like real ones here.
        """
        if request.prompt is not None:
            return request.prompt
        return "".join(part for part, _ in self._parts(request))

    def _encode_chat(self, request: Request) -> list[int]:
        tokens: list[int] = []
        for part, from_row in self._parts(request):
            tokens += self._backend.tokenize(part, add_special=False, parse_special=not from_row)
        return self._with_one_bos(tokens)

    def _parts(self, request: Request) -> list[tuple[str, bool]]:
        """Return the parts of the rendered prompt.

        With each, whether it is the name of a control token that is written in the row itself.
        """
        if self._template is None:
            self._template = self._compile()
        mark = _Mark(self._special)
        text = self._template.render(
            [mark.guard(message) for message in request.messages or ()],
            None if request.tools is None else [mark.guard(tool) for tool in request.tools],
            mark.guard(request.template_args),
        )
        return mark.split(text)

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
        source = self._own_template or self._card.chat_template
        if source is None:
            raise ConfigError(
                "the model has no chat template (a base model?); --raw takes prompts as they are, "
                "--chat-template FILE gives it one"
            )
        return ChatTemplate(
            source,
            bos_token=self._text(self._card.bos_token),
            eos_token=self._text(self._card.eos_token),
        )

    def _text(self, token: int | None) -> str:
        return "" if token is None else self._card.special_texts.get(token, "")


_NO_ARGS: Mapping[str, Any] = {}
_RESERVED = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
_TEMPLATE_FAULTS = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
    RecursionError, MemoryError,
)  # fmt: skip
"""What a template that does not fit its messages may raise."""


def check_template_args(source: str | None, names: Iterable[str]) -> None:
    """Raise `ConfigError` for variables that a chat template has no use for."""
    if source is None:
        return
    template = ChatTemplate(source, bos_token="", eos_token="")
    for name in names:
        if (reason := template.reason_against(name)) is not None:
            raise ConfigError(f"--template-arg: {reason}")


class ChatTemplate:
    """A GGUF's Jinja template, in a sandbox.

    The environment is that of Hugging Face transformers, for which these templates are written
    (`_compile_jinja_template` in transformers' utils/chat_template_utils.py).
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        # Some templates ask whether documents are None, not whether they are there.
        self._constants = {"bos_token": bos_token, "eos_token": eos_token, "documents": None}
        try:
            self._template = environment.from_string(source)
            self._source = source
            self._variables = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error

    def _check_fields(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages):
            for name, value in message.items():
                if name not in ("role", "content") and value and name not in self._source:
                    raise InputError(
                        "the chat template has no use for it", field=f"messages[{number}].{name}"
                    )

    def reason_against(self, name: str) -> str | None:
        """Return why a variable can't be given to the template, `None` if it can."""
        if name in _RESERVED:
            return f"{name!r} is set by other means"
        return None if name in self._variables else f"the chat template has no variable {name!r}"

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        args: Mapping[str, Any] = _NO_ARGS,
    ) -> str:
        """Return the prompt; raises `InputError` with the template's reason if it refuses.

        So do tools and further variables that the template would pass over without a word.
        """
        if tools is not None and "tools" not in self._variables:
            raise InputError("the model's chat template takes none", field="tools")
        for name in args:
            if (reason := self.reason_against(name)) is not None:
                raise InputError(reason, field="chat_template_kwargs")
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=True,
                tools=tools,
                **{**self._constants, **args},
            )
            text.encode()  # half a surrogate pair in a message's further fields is no text
        except _TEMPLATE_FAULTS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"the chat template refuses them: {reason}", field="messages"
            ) from error
        self._check_fields(messages)
        return text


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

    def guard(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a message, or the like, with control tokens in its strings marked."""
        return {key: self._guarded(value) for key, value in values.items()}

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
