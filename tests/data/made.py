"""Shared by tests of sources and batches: random lengths, items, sources of them, and what they yield."""

import json
from itertools import islice

import numpy as np
from hypothesis import strategies as st

from seqwarm_kernels.data import Piece
from seqwarm_kernels.data.files.remote import RemotePath

#: Lists of lengths: mixed ones, short ones, equal ones, and empty lists.
lengths_lists = st.one_of(
    st.lists(st.integers(0, 40), max_size=120),
    st.lists(st.integers(1, 8), max_size=120),
    st.integers(1, 30).flatmap(lambda length: st.lists(st.just(length), max_size=60)),
)


#: Items of sources. No file size or buffer size divides their number.
TEXTS = [f"item {number}" for number in range(1003)]


class ListSource:
    """A source of the items of a list, in another order each epoch, one epoch for each `iter()`.

    Args:
        ends_with: the state after the last item: the start of the "next" epoch, or the "end" of this epoch, from which
            no item is yielded.
    """

    def __init__(self, items, ends_with="next"):
        self.items, self.ends_with = items, ends_with
        self.epoch = self.position = 0
        self.reads = 0
        self._is_over = False

    def __iter__(self):
        if self._is_over:
            self._start_next_epoch()
        while self.position < len(self.items):
            self.position += 1
            self.reads += 1
            yield self.items[(self.position - 1 + self.epoch) % len(self.items)]
        self._is_over = True
        if self.ends_with == "next":
            self._start_next_epoch()

    def _start_next_epoch(self):
        self.epoch, self.position, self._is_over = self.epoch + 1, 0, False

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position, self._is_over = state["epoch"], state["position"], False


def through_json(state):
    return json.loads(json.dumps(state))


def same(found, expected):
    """Whether items are equal, tokens or texts."""
    found = list(found)
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


def item_of(entry):
    return entry.item if isinstance(entry, Piece) else entry


def items_of(batches):
    return [item_of(entry) for batch in batches for entry in batch]


def taken(batches, count=None):
    return list(islice(batches, count))


class Stream:
    """Like IterableDataset: the state is the position after the last item, and applies to every later iter()."""

    def __init__(self, items):
        self.items, self.next, self.begin, self.read = items, 0, 0, []

    def __iter__(self):
        self.next = self.begin
        while self.next < len(self.items):
            self.next += 1
            self.read.append(self.next - 1)
            yield self.items[self.next - 1]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state_dict):
        self.begin = state_dict["next"]


def remove(path):
    """Remove a file, which may be at a URL."""
    if isinstance(path, RemotePath):
        path.call(lambda fs, place: fs.rm_file(place))
    else:
        path.unlink()
