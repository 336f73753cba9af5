"""Tokens to text: characters over several tokens, stop strings."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from localbatch.engine.text import TextStream


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


@given(st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=10))
def test_any_bytes_cut_anywhere_give_the_text_of_the_whole(data: bytes, places: list[int]) -> None:
    """The text equals a decode of all bytes at once, U+FFFD for what is no UTF-8 included."""
    assert data.decode("utf-8", "replace") == text_of(cut(data, places)).finish()


def test_an_emoji_over_four_tokens_appears_whole() -> None:
    """No half of a character is ever handed out."""
    pieces = [b"a", b"\xf0", b"\x9f", b"\x8e", b"\x89", b"b"]
    stream = TextStream(lambda token: pieces[token])
    taken = []
    for token in range(len(pieces)):
        stream.push(token)
        taken.append(stream.take())

    assert taken == ["a", "", "", "", "\N{PARTY POPPER}", "b"]


def test_a_stop_string_over_token_borders_is_cut_exactly() -> None:
    """Text ends right before the stop string, whatever the tokens hold."""
    stream = text_of([b"one tw", b"o EN", b"D thr", b"ee"], stop=("END",))

    assert stream.stopped
    assert stream.finish() == "one two "


def test_text_that_only_begins_a_stop_string_is_kept() -> None:
    """What was held back comes out when the text ends or goes on otherwise."""
    assert text_of([b"an EN"], stop=("END",)).finish() == "an EN"
    assert text_of([b"an EN", b"TER"], stop=("END",)).finish() == "an ENTER"


@given(
    st.text("abc", max_size=30),
    st.lists(st.integers(0, 1000), max_size=10),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_cut_where_the_first_whole_one_begins(
    text: str, places: list[int], stops: list[str]
) -> None:
    """The text ends at the earliest stop string in what came up to the token that completed one."""
    pieces = cut(text.encode(), places)
    expected, so_far = text, ""
    for piece in pieces:
        so_far += piece.decode()
        found = [so_far.find(stop) for stop in stops if stop in so_far]
        if found:
            expected = so_far[: min(found)]
            break

    assert expected == text_of(pieces, tuple(stops)).finish()


@given(
    st.text("abc", max_size=30),
    st.lists(st.integers(0, 1000), max_size=10),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_what_was_handed_out_is_never_taken_back(
    text: str, places: list[int], stops: list[str]
) -> None:
    """Pieces taken on the way, put together, are the final text."""
    pieces = cut(text.encode(), places)
    stream = TextStream(lambda token: pieces[token], tuple(stops))
    taken = ""
    for token in range(len(pieces)):
        stream.push(token)
        taken += stream.take()
    whole = stream.finish()

    assert whole == taken + stream.take()
