"""Valid states and files, and the same with one entry dropped or replaced, or cut at any byte."""

import copy

import pytest
from hypothesis import given, settings, strategies

#: Number of examples: few in the tests of every change, many in the longest tests.
EXAMPLES = [10, pytest.param(300, marks=pytest.mark.exhaustive)]

#: What a damaged state, or a state of another version, may hold at any place.
_NUMBERS = [-1, 0, 1, 2**31, 2**62, 2**63, -(2**63) - 1, 10**40, 0.5, float("nan"), float("inf"), 1e308, 1j]
JUNK = strategies.sampled_from([None, True, *_NUMBERS, "", "junk", b"junk", [], [1, "a"], [[0, 0]], {}, {"junk": 1}])


@strategies.composite
def changed(draw, state):
    """A copy of nested dicts and lists with one entry dropped, added or replaced."""
    result = copy.deepcopy(state)
    *parents, key = draw(strategies.sampled_from([*_paths(state)]))
    container = result
    for parent in parents:
        container = container[parent]
    change = draw(strategies.sampled_from(["drop", "add", "replace", "replace"]))
    if change == "drop":
        del container[key]
    elif change == "add" and isinstance(container, dict):
        container["of another version"] = 1
    else:
        container[key] = draw(JUNK)
    return result


def _paths(state):
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        yield (key,)
        if isinstance(value, (dict, list)):
            yield from ((key, *rest) for rest in _paths(value))


@strategies.composite
def damaged(draw, content):
    """Bytes that are cut, or with some bytes replaced."""
    position = draw(strategies.integers(0, len(content) - 1))
    if draw(strategies.booleans()):
        return content[:position]
    return content[:position] + draw(strategies.binary(min_size=1, max_size=4)) + content[position + 1 :]


def explore(examples, strategy, check):
    """Call `check` with this number of examples of `strategy`."""

    @settings(max_examples=examples)
    @given(strategy)
    def explored(example):
        check(example)

    explored()


def refusal_of(call):
    """The message of the ValueError that a call raises; None if it raises nothing."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None
