"""The order of trials, on random stable regions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels.tuning.search import largest_stable

from ..support.tiers import examples

LENGTHS = st.integers(1, 6)
DURATIONS = st.integers(1, 70)


def ask(lengths, durations, stable):
    """The result and the candidates that were tried. Fails if a candidate is tried twice."""
    asked = []

    def is_stable(length, duration):
        assert 0 <= length < lengths
        assert 0 <= duration < durations
        assert (length, duration) not in asked
        asked.append((length, duration))
        return stable(length, duration)

    return largest_stable(lengths, durations, is_stable), asked


@examples(30)
@given(LENGTHS, DURATIONS, st.data())
def test_between_a_lower_and_an_upper_bound(lengths, durations, data):
    bounds = st.tuples(st.integers(1, durations), st.integers(1, durations)).map(sorted)
    stretches = data.draw(st.lists(st.none() | bounds, min_size=lengths, max_size=lengths))

    def stable(length, duration):
        return stretches[length] is not None and stretches[length][0] <= duration + 1 <= stretches[length][1]

    found, asked = ask(lengths, durations, stable)
    at_once = [length for length in range(lengths) if stable(length, 0)]
    if at_once:
        assert found[0] == at_once[0]
        assert len(asked) <= found[0] + 1 + math.ceil(math.log2(durations))
    assert len(asked) <= lengths * (2 + math.floor(math.log2(durations))) + math.ceil(math.log2(durations))
    if found is None:
        assert all(s is None or (s[1] < 2 * s[0] - 1 and s[1] < durations) for s in stretches)
    else:
        assert found in asked
        assert stable(*found)
        assert found[1] + 1 == stretches[found[0]][1], "a longer duration is stable as well"


@examples(50)
@given(LENGTHS, DURATIONS, st.data())
def test_the_result_was_tried_and_was_stable_in_any_region(lengths, durations, data):
    """Also if stability is not monotone."""
    stable = data.draw(st.sets(st.tuples(st.integers(0, lengths - 1), st.integers(0, durations - 1))))
    found, asked = ask(lengths, durations, lambda *candidate: candidate in stable)
    if found is None:
        assert not stable & set(asked)
    else:
        assert found in asked
        assert found in stable
        assert not any(duration > found[1] for length, duration in stable & set(asked) if length == found[0])


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 15, [0, 8, 12, 14, 15]),
        (0, 0, [0, 8, 4, 2, 1]),
        (5, 9, [0, 1, 3, 7, 11, 9, 10]),
        (15, 15, [0, 1, 3, 7, 15]),
    ],
)
def test_the_order_of_trials(first, last, expected):
    _, asked = ask(1, 16, lambda length, duration: first <= duration <= last)
    assert [duration for _, duration in asked] == expected


def test_all_lengths_are_tried_before_a_longer_duration():
    found, asked = ask(3, 4, lambda length, duration: (length, duration) == (1, 1))
    assert asked == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (1, 2)]
    assert found == (1, 1)
