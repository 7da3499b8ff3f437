"""A stop text ends the text before it, however the text is cut; no part of one is given out."""

from __future__ import annotations

import random

import pytest

from megalith.generate.stops import StopFilter


def expected(text: str, stops: list[str]) -> str:
    """The text before the stop that is complete first; found with ``str.find`` alone."""
    places = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(places)[1]] if places else text


@pytest.mark.parametrize("seed", range(20))
def test_any_cutting_gives_the_text_before_the_first_stop(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        text = "".join(rng.choices("ab", k=rng.randrange(14)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randrange(4))]
        right = expected(text, stops)
        filter_, given, fed, rest = StopFilter(stops), "", "", text
        while rest:
            size = rng.randint(1, len(rest))
            piece, rest = rest[:size], rest[size:]
            fed += piece
            given += filter_.feed(piece)
            if filter_.met:
                break
            # All is given out but what may yet become a stop: an end that begins one.
            held = fed[len(given) :]
            assert fed.startswith(given)
            assert not held or any(stop.startswith(held) for stop in stops)
            # And everything that begins one is held back.
            for size in range(1, len(given) + 1):
                assert not any(
                    len(stop) > len(held) + size and stop.startswith(given[-size:] + held)
                    for stop in stops
                )
        assert filter_.met == any(stop in text for stop in stops)
        assert given + filter_.close() == right, (text, stops)


def test_nothing_passes_after_a_stop() -> None:
    filter_ = StopFilter(["END"])
    assert filter_.feed("a E") == "a "
    assert filter_.feed("ND b") == ""
    assert filter_.met
    assert filter_.feed("c") == ""
    assert filter_.close() == ""


def test_a_held_beginning_that_comes_to_nothing_is_given_out() -> None:
    filter_ = StopFilter(["\n\n"])
    assert filter_.feed("one\n") == "one"
    assert filter_.feed("two\n") == "\ntwo"
    assert filter_.close() == "\n"


def test_without_stops_everything_passes_at_once() -> None:
    filter_ = StopFilter([])
    assert filter_.feed("anything") == "anything"
    assert filter_.close() == ""
