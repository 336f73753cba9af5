"""From computed answers to completions: rows with several answers, and rows that ask the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from localbatch.data.request import Completion, Request, Timings, Usage
from localbatch.engine.rows import Event, Part, TextPiece


class Answers:
    """Knows what is computed for which rows.

    An answer that can't be another is computed once: greedy rows with the same prompt and
    parameters, and all answers of a greedy row.
    """

    def __init__(self) -> None:
        self._askers: dict[int, list[Request]] = {}  # by the index of the row that is computed
        self._unfinished: dict[bytes, int] = {}  # what greedy rows ask for: index
        self._keys: dict[int, bytes] = {}
        self._parts: dict[int, dict[int, Completion]] = {}

    def expect(self, request: Request, tokens: Sequence[int], *, once: bool) -> int:
        """Return how many answers are to be computed for a row.

        `once` allows to compute a greedy answer once for all who ask for it; then there may be
        none.
        """
        if request.params.temperature != 0 or not once:
            return request.params.n
        key = _digest(tokens, request)
        first = self._unfinished.setdefault(key, request.index)
        self._keys[first] = key
        self._askers.setdefault(first, []).append(request)
        return int(first == request.index)

    def collect(
        self, events: Iterable[Event], *, streams_text: bool
    ) -> list[Completion | TextPiece]:
        """Return the events of rows: a completion for each row all of whose answers are there."""
        found: list[Completion | TextPiece] = []
        for event in events:
            if isinstance(event, TextPiece):
                found.append(event)
            elif isinstance(event, Part):
                found += self._joined(event)
            elif event.index in self._askers:
                found += self._answered(event, streams_text)
            else:
                found.append(event)
        return found

    def _joined(self, part: Part) -> list[Completion]:
        index, num_parts = part.completion.index, part.num_parts
        parts = self._parts.setdefault(index, {})
        parts[part.choice] = part.completion
        if len(parts) < num_parts:
            return []
        del self._parts[index]
        return [joined([parts[choice] for choice in range(num_parts)])]

    def _answered(
        self, computed: Completion, streams_text: bool
    ) -> Iterable[Completion | TextPiece]:
        """Answer all the rows that ask for the very same."""
        self._unfinished.pop(self._keys.pop(computed.index), None)
        for request in self._askers.pop(computed.index):
            answer = replace(computed, id=request.id, index=request.index, line=request.line)
            if request.index != computed.index and streams_text and answer.text:
                yield TextPiece(request.index, answer.text)
            yield joined([answer] * request.params.n)


def joined(answers: Sequence[Completion]) -> Completion:
    """Return one completion of a row's answers; the error, if one has an error."""
    if len(answers) == 1:
        return answers[0]
    failed = next((answer for answer in answers if answer.failed), None)
    first = failed or answers[0]
    usage = Usage(
        first.usage.prompt_tokens,
        sum(answer.usage.completion_tokens for answer in answers),
        sum(answer.usage.reasoning_tokens for answer in answers),
        first.usage.cut_tokens,
    )
    more = () if failed else tuple(answer.choices[0] for answer in answers[1:])
    return replace(first, usage=usage, timings=_joined_timings(answers), more=more)


def _joined_timings(answers: Sequence[Completion]) -> Timings:
    """Return the times to the first answer's beginning, the first token of all, the last end."""
    times = [answer.timings for answer in answers]
    begun = min(t.queue_s for t in times)
    first = min(t.queue_s + t.prefill_s for t in times)
    return Timings(
        begun, first - begun, max(t.queue_s + t.prefill_s + t.decode_s for t in times) - first
    )


def _digest(tokens: Sequence[int], request: Request) -> bytes:
    """Return the same for greedy rows whose answers can't differ."""
    digest = blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=16)
    # A chat may have reasoning, which is split off.
    asked = (request.messages is None, replace(request.params, seed=0, n=1))
    digest.update(repr(asked).encode())
    return digest.digest()
