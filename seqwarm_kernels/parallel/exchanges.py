"""What each way to shard tokens exchanges in a layer, as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .volumes import ContextSize, Volume

RING, ALL_GATHER, ULYSSES, HALO = "ring", "all-gather", "Ulysses", "halo"


@dataclass(frozen=True)
class Exchanges:
    """The bytes that the ranks receive for a layer whose halo has these widths, one for each key head."""

    size: ContextSize
    widths: tuple[int, ...]

    def volumes(self) -> dict[str, Volume | str]:
        """By name of the parallelism: the volume, or why the ranks cannot do it."""
        try:
            ulysses: Volume | str = self.size.ulysses()
        except ValueError as error:
            ulysses = str(error)
        return {
            RING: self.size.ring(),
            ALL_GATHER: self.size.all_gather(),
            ULYSSES: ulysses,
            HALO: self.size.halo(self.widths),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values: the size, the widths, and the bytes of each parallelism, or why it is not possible."""
        volumes = {
            name: {"not_possible": volume} if isinstance(volume, str) else volume._asdict()
            for name, volume in self.volumes().items()
        }
        return {**asdict(self.size), "halo_widths": list(self.widths), "bytes_received": volumes}

    def table(self) -> str:
        size, volumes = self.size, self.volumes()
        ring = size.ring()
        lines = [
            f"A rank receives in each layer: {counted(size.heads, 'head')}, {counted(size.key_heads, 'key head')} of "
            f"{size.head_dim}, {counted(size.length, 'token')} on {counted(size.ranks, 'rank')}, "
            f"{counted(size.batch_size, 'row')}, {8 * size.bytes_per_element} bits",
            f"{'':12}{'forward':>14}{'backward':>14}{'times fewer than a ring':>26}",
        ]
        for name, volume in volumes.items():
            if isinstance(volume, str):
                lines.append(f"{name:12}  not possible: {volume}")
                continue
            fewer = f"{sum(ring) / sum(volume):.1f}" if sum(volume) else ""
            lines.append(f"{name:12}{megabytes(volume.forward):>14}{megabytes(volume.backward):>14}{fewer:>26}")
        widths = f"{min(self.widths):,} to {max(self.widths):,}"
        lines.append(f"The halo is {widths} tokens wide by key head, for random normal queries and keys.")
        return "\n".join(lines)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def megabytes(count: int) -> str:
    amount = count / 1e6
    return f"{amount:,.0f} MB" if amount >= 100 else f"{amount:.3g} MB"
