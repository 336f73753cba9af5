"""Tokens to text: characters over several tokens, stop strings.

Where a text ends is defined by what had arrived: the first token after which the text holds any
stop string ends it, before the earliest one that the text holds then.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localbatch.engine.text import TextStream

PLACES = st.lists(st.integers(0, 1000), max_size=10)
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


def text_of(pieces: list[bytes], stop: tuple[str, ...] = ()) -> TextStream:
    """Return a stream that was fed all pieces; token i stands for piece i."""
    stream = TextStream(lambda token: pieces[token], stop)
    for token in range(len(pieces)):
        stream.push(token)
    return stream


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Cut data at the places (taken modulo its length)."""
    at = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


def arrivals(pieces: list[bytes]) -> list[str]:
    """Return the whole characters that are there after each piece of a valid UTF-8 text."""
    return [b"".join(pieces[: i + 1]).decode(errors="ignore") for i in range(len(pieces))]


def expected_text(pieces: list[bytes], stops: list[str]) -> str:
    """Return the text by the definition above, from the whole of what had arrived."""
    texts = arrivals(pieces)
    for text in texts:
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)]
    return texts[-1] if texts else ""


@given(st.binary(max_size=40), PLACES)
@example(b"\xf0\x9f\x8e", [1, 2])
@example(b"\xff\xc3(\xed\xa0\x80", [1, 2, 3, 4])
def test_any_bytes_cut_anywhere_give_the_text_of_the_whole(data: bytes, places: list[int]) -> None:
    """The text equals a decode of all bytes at once, U+FFFD for what is no UTF-8 included."""
    assert data.decode("utf-8", "replace") == text_of(cut(data, places)).finish()


def test_an_emoji_over_four_tokens_appears_whole() -> None:
    """No half of a character is ever handed out, and it comes as soon as it is whole."""
    pieces = [b"a", b"\xf0", b"\x9f", b"\x8e", b"\x89", b"b"]
    stream = TextStream(lambda token: pieces[token])
    taken = []
    for token in range(len(pieces)):
        stream.push(token)
        taken.append(stream.take())

    assert taken == ["a", "", "", "", "\N{PARTY POPPER}", "b"]


def test_tokens_without_bytes_change_nothing() -> None:
    """Control tokens add no bytes, also between the bytes of one character."""
    assert (
        text_of([b"", b"\xc3", b"", b"\xa9", b""]).finish() == "\N{LATIN SMALL LETTER E WITH ACUTE}"
    )


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        ([b"one tw", b"o EN", b"D thr", b"ee"], ("END",), "one two "),
        ([b"END"], ("END",), ""),
        ([b"E", b"N", b"D"], ("END",), ""),
        ([b"ENENEND!"], ("END",), "ENEN"),
        ([b"x\xe4\xb8", b"\x96\xe7", b"\x95\x8c y"], ("世界",), "x"),
        # Both are there at the same token: the earlier one counts, not the first of the list.
        ([b"a b c"], ("c", "b"), "a "),
        # "bc" is complete a token before "abcd" could be.
        ([b"abc", b"d"], ("abcd", "bc"), "a"),
        ([b"abcd"], ("abcd", "bc"), ""),
        # What comes after the end does not count, whatever it is.
        ([b"a#", b"b#", b"c"], ("#",), "a"),
    ],
)
def test_a_stop_string_is_cut_exactly(
    pieces: list[bytes], stop: tuple[str, ...], text: str
) -> None:
    """Text ends right before the stop string, whatever the tokens hold."""
    stream = text_of(pieces, stop)

    assert stream.stopped
    assert stream.finish() == text


@pytest.mark.parametrize("pieces", [[b"an EN"], [b"an EN", b"TER"], [b"an E", b"", b"ND "[:1]]])
def test_text_that_only_begins_a_stop_string_is_kept(pieces: list[bytes]) -> None:
    """What was held back comes out when the text ends or goes on otherwise."""
    stream = text_of(pieces, ("END",))

    assert not stream.stopped
    assert stream.finish() == b"".join(pieces).decode()


def test_half_a_character_at_the_end_may_complete_a_stop_string() -> None:
    """U+FFFD at the end of the text is text like any other."""
    stream = text_of([b"ab\xf0\x9f"], ("b\ufffd",))

    assert not stream.stopped
    assert stream.finish() == "a"
    assert stream.stopped


@given(st.text("abé", max_size=30), PLACES, STOPS)
def test_stop_strings_cut_where_the_first_whole_one_begins(
    text: str, places: list[int], stops: list[str]
) -> None:
    """The text ends before the earliest stop string that is there when the first one is there."""
    pieces = cut(text.encode(), places)
    stream = text_of(pieces, tuple(stops))

    assert stream.stopped == any(stop in text for stop in stops)
    assert expected_text(pieces, stops) == stream.finish()


@given(st.text("abé", max_size=30), PLACES, STOPS)
def test_what_was_handed_out_is_never_taken_back(
    text: str, places: list[int], stops: list[str]
) -> None:
    """Pieces taken on the way, put together with the rest, are the final text."""
    pieces = cut(text.encode(), places)
    stream = TextStream(lambda token: pieces[token], tuple(stops))
    taken = ""
    for token in range(len(pieces)):
        stream.push(token)
        taken += stream.take()
        assert expected_text(pieces, stops).startswith(taken)
    whole = stream.finish()

    assert whole == taken + stream.take()
    assert stream.take() == ""


@given(st.text("abé", max_size=30), PLACES, STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop_string(
    text: str, places: list[int], stops: list[str]
) -> None:
    """After each token, all is handed out but the longest end that begins a stop string."""
    pieces = cut(text.encode(), places)
    stream = TextStream(lambda token: pieces[token], tuple(stops))
    begins = {stop[:n] for stop in stops for n in range(1, len(stop))}
    taken = ""
    for token, there in enumerate(arrivals(pieces)):
        stream.push(token)
        if stream.stopped:
            break
        taken += stream.take()
        ends = [len(there) - i for i in range(len(there)) if there[i:] in begins]

        assert taken == there[: len(there) - max(ends, default=0)]
