"""Every row is attended once, with every key that it may see: its own segment, up to the halo's width."""

from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels.parallel.parts import Shard


@st.composite
def shards(draw):
    size = draw(st.integers(1, 4))
    return Shard(
        draw(st.integers(1, 12)),
        draw(st.integers(0, size - 1)),
        size,
        draw(st.booleans()),
        draw(st.none() | st.integers(1, 30)),
    )


def sees(shard, query, key):
    """Positions in the tokens of all ranks."""
    is_near = query // shard.segment_length == key // shard.segment_length if shard.segment_length else True
    return 0 <= key < shard.size * shard.length and is_near and (key <= query or not shard.causal)


def needed(shard, row, width):
    """The keys that a row must find, as positions from the shard's start.

    A row farther than `width` from an end of the shard needs no key beyond it: the width was chosen so.
    """
    all_rows = shard.segment_length is not None
    first = -width if all_rows or row < width else 0
    end = shard.length + (width if all_rows or row >= shard.length - width else 0)
    return {key for key in range(first, end) if sees(shard, shard.start + row, shard.start + key)}


@given(shards(), st.integers(0, 60))
def test_rows_find_their_keys(shard, width):
    width = min(width, shard.widest(None))
    parts = shard.parts(width)
    assert width == 0 or any(part.with_halo for part in parts), "all ranks take part in backward"
    assert [row for part in parts for row in range(part.first_row, part.end_row)] == list(range(shard.length))
    for part in parts:
        assert part.with_halo or (part.first_key >= 0 and part.end_key <= shard.length)
        assert part.first_key >= -width
        assert part.end_key <= shard.length + width
        for row in range(part.first_row, part.end_row):
            visible = {
                key
                for key in range(part.first_key, part.end_key)
                if (key <= row or not shard.causal)
                and (
                    part.segment_length is None
                    or (row - part.first_row) // part.segment_length == (key - part.first_key) // part.segment_length
                )
            }
            assert visible >= needed(shard, row, width)
            assert all(sees(shard, shard.start + row, shard.start + key) for key in visible)


@given(shards(), st.none() | st.integers(0, 60))
def test_the_widest_halo(shard, window):
    """No rank sees a key farther beyond its shard, and some rank sees that one."""
    beyond = [0]
    for rank in range(shard.size):
        own = Shard(shard.length, rank, shard.size, shard.causal, shard.segment_length)
        for query in range(own.start, own.end):
            for key in range(own.size * own.length):
                if sees(own, query, key) and (window is None or abs(query - key) <= window):
                    beyond.append(max(own.start - key, key - own.end + 1))
    assert shard.widest(window) >= max(beyond)
    if window is None:
        assert shard.widest(None) == max(beyond)
