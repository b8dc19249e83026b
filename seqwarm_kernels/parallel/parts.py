"""The rows of a shard in parts: those that see local keys only, and those that also see keys of the halo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Part(NamedTuple):
    """One call of attention. Positions count from the shard's start; keys of the halo are below 0 or past the end."""

    first_row: int
    end_row: int
    first_key: int
    end_key: int
    segment_length: int | None = None
    with_halo: bool = False


@dataclass(frozen=True)
class Shard:
    """The tokens of one rank.

    Attributes:
        length: Tokens of a rank. All ranks have the same number.
        rank, size: Place of the rank in the mesh.
        causal: Whether only earlier keys are visible.
        segment_length: As in `alibi_attention`.
    """

    length: int
    rank: int
    size: int
    causal: bool
    segment_length: int | None = None

    @property
    def start(self) -> int:
        return self.rank * self.length

    @property
    def end(self) -> int:
        return self.start + self.length

    def widest(self, window: int | None) -> int:
        """The widest halo that any rank can use. The same on all ranks."""
        boundaries = [rank * self.length for rank in range(1, self.size)]
        widths = [self._open_before(boundary) for boundary in boundaries]
        if not self.causal:
            widths += [self._open_after(boundary) for boundary in boundaries]
        widest = max([0, *widths])
        return widest if window is None else min(widest, window)

    def parts(self, width: int, *, split: bool = True) -> list[Part]:
        """All rows in parts, in order.

        Args:
            width: Tokens of the halo on one side. Without segments, rows farther than that from the shard's end see
                local keys only.
            split: False: without segments, leave all rows together.
        """
        if self.length == 0:
            return [Part(0, 0, 0, 0)]
        if self.segment_length is not None:
            parts = self._segments(width, self.segment_length)
        elif width == 0:
            return [Part(0, self.length, 0, self.length)]
        else:
            parts = self._rows(width if split else self.length, width)
        return [part for part in parts if part.first_row < part.end_row]

    def _rows(self, near: int, width: int) -> Iterator[Part]:
        """Rows nearer than `near` to an end of the shard see the halo on that side."""
        end = self.length
        first_key = -min(width, self.start)
        end_key = end if self.causal else end + min(width, self._open_after(self.end))
        near_start, near_end = min(near, end), end if self.causal else max(end - near, 0)
        if near_end < near_start:
            yield Part(0, end, first_key, end_key, None, True)
            return
        yield Part(0, near_start, first_key, near_start if self.causal else end, None, True)
        yield Part(near_start, near_end, 0, end)
        yield Part(near_end, end, 0, end_key, None, True)

    def _segments(self, width: int, segment: int) -> Iterator[Part]:
        """The segment that may begin before the shard, whole segments, and the one that may end after the shard."""
        end, in_segment = self.length, self.start % segment
        if width == 0 and in_segment == 0:
            yield Part(0, end, 0, end, segment)
            return
        first_end = min(segment - in_segment, end)
        last_start = end if self.causal else end - self.end % segment
        before = min(width, self._open_before(self.start))
        after = 0 if self.causal else min(width, self._open_after(self.end))
        if first_end == end:
            yield Part(0, end, -before, end + after, None, True)
            return
        yield Part(0, first_end, -before, first_end, None, True)
        yield Part(first_end, last_start, first_end, last_start, segment)
        yield Part(last_start, end, last_start, end + after, None, True)

    def _open_before(self, position: int) -> int:
        """Tokens before a position in its segment."""
        return position if self.segment_length is None else position % self.segment_length

    def _open_after(self, position: int) -> int:
        """Tokens from a position on that are in the segment of the token before it."""
        rest = self.size * self.length - position
        return rest if self.segment_length is None else min(-position % self.segment_length, rest)
