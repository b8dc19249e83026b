"""The options that all sources share."""

from __future__ import annotations

from dataclasses import dataclass

from ...utils.checks import check_int, check_rank


@dataclass
class Order:
    """The order of a source's items, and which of them this process reads.

    Every source of this package takes these as keyword arguments: `SequenceSource(items, seed=3, infinite=True)`.

    Args:
        seed: determines the order, together with the epoch.
        shuffle: False: keep the order of the data.
        infinite: repeat epochs forever, each in its own order. Otherwise each `iter()` yields one epoch.
        rank, world_size: this process reads every world_size-th item of the epoch's order, or every world_size-th part
            of a source that reads in parts: files, row groups, or runs of documents. In a `LengthBatchStream`, leave
            them out: the stream assigns batches to ranks itself.

    Raises:
        TypeError: `seed`, `rank` or `world_size` is not an int.
        ValueError: `seed` is negative, or `rank` is not in [0, world_size).
    """

    seed: int = 0
    shuffle: bool = True
    infinite: bool = False
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_rank(self.rank, self.world_size)
        self.seed = check_int("seed", self.seed, minimum=0)
        self.rank, self.world_size = int(self.rank), int(self.world_size)  # NumPy's ints are not JSON-able
