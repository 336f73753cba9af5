"""Turns tokens into text as they come: characters over several tokens, stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """The text of one answer, token by token.

    Bytes that do not make a whole character yet are held back; bytes that never will become
    U+FFFD, as in a decode of the whole. Text that may be the beginning of a stop string is held
    back too, so what `take` hands out never has to be taken back.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: tuple[str, ...] = ()) -> None:
        self._token_bytes = token_bytes
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.stopped = False
        """Whether a stop string came; text and later tokens end before it."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: list[str] = []
        self._tail = ""  # the end of the text, where a stop string may still begin
        self._taken = 0  # parts handed out by take()
        self._pending: list[int] = []  # tokens of which nobody asked for the text

    @property
    def reasoning(self) -> str | None:
        """What a reasoning model wrote before its answer; nothing here."""
        return None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning."""
        return 0

    @property
    def ended_in_reasoning(self) -> bool:
        """Whether no answer came after the reasoning; for texts that are finished."""
        return False

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next, whatever the model says."""
        return ()

    def push(self, token: int) -> None:
        """Add a token."""
        self._pending.append(token)
        if self._stop:
            self._decode()

    def finish(self) -> str:
        """End the text and return all of it."""
        if not self.stopped:
            self._decode(final=True)
        if not self.stopped:
            self._parts.append(self._tail)
        self._tail = ""
        return "".join(self._parts)

    def take(self) -> str:
        """Return the text that is certain and was not returned before."""
        self._decode()
        new = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return new

    def _decode(self, *, final: bool = False) -> None:
        """Make text of the pending tokens: of many at a time where nothing may end it early."""
        written = b"".join(map(self._token_bytes, self._pending))
        self._pending.clear()
        self._add(self._decoder.decode(written, final))

    def _add(self, text: str) -> None:
        if self.stopped or not text:
            return
        if not self._stop:
            self._parts.append(text)
            return
        tail = self._tail + text
        found = min((at for at in (tail.find(s) for s in self._stop) if at >= 0), default=None)
        if found is not None:
            self.stopped = True
            self._parts.append(tail[:found])
            self._tail = ""
            return
        certain = len(tail) - self._held_back(tail)
        self._parts.append(tail[:certain])
        self._tail = tail[certain:]

    def _held_back(self, tail: str) -> int:
        """Return the length of the longest end of `tail` that begins a stop string."""
        for length in range(min(self._longest - 1, len(tail)), 0, -1):
            end = tail[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
