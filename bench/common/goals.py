"""The figures that this project is held to on a GPU, looked up in a run's records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..alibi_attention.gpu import BACKWARD, BOTH, FORWARD
from ..alibi_attention.peers import FLASH, FLEX, FLEX_ROWS
from ..allocator.gpu import AFTER, WITHOUT
from ..allocator.gpu import FULL_LENGTH as RAMP_FULL_LENGTH
from ..gpu.lookup import OURS, OURS_NO_SKIP, Records, gigabytes_per_second, speedup, teraflops
from ..gpu.records import DeviceRecord
from ..resize_batch import implementations as resizing
from ..resize_batch.implementations import named


class Goal(NamedTuple):
    what: str
    goal: float | None
    value: float | None  #: None where nothing was measured
    unit: str = ""
    where: str = ""  #: the case that decides, where there are several
    at_most: bool = False

    def reached(self) -> bool | None:
        if self.value is None or self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def goals(records: Records) -> Iterator[Goal]:
    yield from _dense(records)
    yield from _skipping(records)
    yield from _lengths(records)
    yield from _segments(records)
    yield from _resizing(records)
    yield from _memory(records)


def _dense(records: Records) -> Iterator[Goal]:
    for work, head_dim, goal in ((FORWARD, 128, 600), (FORWARD, 64, 470), (BACKWARD, 128, 400)):
        found = records.find(
            OURS_NO_SKIP, work, length=8192, head_dim=head_dim, causal=True, key_heads=2048 // head_dim
        )
        yield Goal(f"causal 8k, no skip, {work}, D{head_dim}", goal, teraflops(found), "TFLOP/s")
        if work == BACKWARD:
            yield Goal("the same by difference", goal, _backward_by_difference(records, found), "TFLOP/s")


def _backward_by_difference(records: Records, backward: DeviceRecord | None) -> float | None:
    if backward is None:
        return None
    forward, both = (records.find(OURS_NO_SKIP, work, **backward.facts) for work in (FORWARD, BOTH))
    if forward is None or both is None or forward.median_ms is None or both.median_ms is None:
        return None
    return backward.figures["gflop"] / (both.median_ms - forward.median_ms)


def _skipping(records: Records) -> Iterator[Goal]:
    for inputs in "ab":
        for head_dim in (128, 64):
            facts = {"length": 16384, "head_dim": head_dim, "batch_size": 1}
            forward, both = (records.find(OURS, work, inputs, **facts) for work in (FORWARD, BOTH))
            share = forward.figures.get("attended_share") if forward else None
            where = "" if share is None else f"visits {share:.1%} of keys"
            what = f"causal 16k D{head_dim}, inputs {inputs}"
            yield Goal(f"{what}, {FORWARD}", 1000, teraflops(forward), "TFLOP/s", where)
            yield Goal(f"{what}, {BOTH} vs FlexAttention", 2, _against(records, both, FLEX.name), "x")


def _against(records: Records, record: DeviceRecord | None, *others: str) -> float | None:
    """Beside the fastest of the others."""
    if record is None:
        return None
    ratios = [speedup(record, records.beside(record, other)) for other in others]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _worst(records: Records, found: list[DeviceRecord], *others: str) -> tuple[float | None, str]:
    ratios = [(ratio, record.case) for record in found if (ratio := _against(records, record, *others)) is not None]
    return min(ratios, default=(None, ""))


def _lengths(records: Records) -> Iterator[Goal]:
    for work in (FORWARD, BOTH):
        found = list(records.each(OURS, work, causal=True, segment_length=None))
        upto_16k = [record for record in found if record.facts["length"] <= 16384]
        long = [record for record in found if record.facts["length"] >= 4096]
        ratio, where = _worst(records, upto_16k, FLEX.name)
        yield Goal(f"lengths 128 to 16k, {work} vs FlexAttention, worst", 1.3, ratio, "x", where)
        ratio, where = _worst(records, long, FLASH.name)
        yield Goal(f"from 4k on, {work} vs SDPA flash without bias, worst", 1.0, ratio, "x", where)


def _segments(records: Records) -> Iterator[Goal]:
    found = [record for record in records.each(OURS, FORWARD) if record.facts["segment_length"]]
    copied = records.copy_rate()
    rates = [(rate, record.case) for record in found if (rate := gigabytes_per_second(record)) is not None]
    slowest, where = min(rates, default=(None, ""))
    share = None if slowest is None or copied is None else 100 * slowest / copied
    yield Goal("segments 8 to 256 in 64k tokens, forward, worst share of a copy", 70, share, "%", where)
    for work in (FORWARD, BOTH):
        found = [record for record in records.each(OURS, work) if record.facts["segment_length"]]
        ratio, where = _worst(records, found, FLEX.name, FLEX_ROWS.name)
        yield Goal(f"the same, {work} vs the best FlexAttention, worst", 5, ratio, "x", where)


def _resizing(records: Records) -> Iterator[Goal]:
    resized = [record for record in records.of_stage("resize_batch") if record.median_ms is not None]
    for backend, most_us in (("native", 6), ("triton", 15)):
        ours, out = named(resizing.OURS, backend), named(resizing.OURS_OUT, backend)
        same = [record for record in resized if record.implementation == ours]
        launched = max((record.figures["launches"] for record in same if "launches" in record.figures), default=None)
        yield Goal(f"{ours}, launches, worst", 1, launched, at_most=True)
        small = next((r for r in same if r.facts["source_megabytes"] < 1 and r.facts["method"] == "truncate"), None)
        waited = small.figures.get("wait_ms") if small else None
        yield Goal(f"{ours}, host time, small batch", most_us, waited and waited * 1e3, "µs", at_most=True)
        large = [record for record in same if record.facts["source_megabytes"] > 500]
        rates = [(rate, record.case) for record in large if (rate := gigabytes_per_second(record)) is not None]
        slowest, where = min(rates, default=(None, ""))
        copied = records.copy_rate()
        share = None if slowest is None or copied is None else 100 * slowest / copied
        yield Goal(f"{ours}, large, share of a copy, worst", 80, share, "%", where)
        for other in (resizing.BY_HAND, resizing.FOREACH, resizing.COMPILED):
            against = out if other == resizing.FOREACH else ours
            pairs = [record for record in resized if record.implementation == against]
            ratios = [(r, record.case) for record in pairs if (r := speedup(record, _same(resized, record, other)))]
            ratio, where = min(ratios, default=(None, ""))
            yield Goal(f"{against} vs {other}, worst", 1, ratio, "x", where)


def _same(records: list[DeviceRecord], record: DeviceRecord, implementation: str) -> DeviceRecord | None:
    return next((r for r in records if r.case == record.case and r.implementation == implementation), None)


def _memory(records: Records) -> Iterator[Goal]:
    ramps = {record.implementation: record.figures for record in records.of_stage("allocator")}
    warmed, without, full = (ramps.get(name, {}) for name in (AFTER, WITHOUT, RAMP_FULL_LENGTH))
    for what in ("device_allocations", "compilations", "stalls"):
        beside = f"{without[what]:.0f} without" if what in without else ""
        yield Goal(f"ramp to 1024, {what.replace('_', ' ')}", 0, warmed.get(what), "", beside, at_most=True)
    reserved, constant = warmed.get("reserved_megabytes"), full.get("reserved_megabytes")
    surplus = None if reserved is None or not constant else 100 * (reserved / constant - 1)
    yield Goal("ramp, reserved beyond the full length throughout", 5, surplus, "%", at_most=True)
    yield Goal("warmup_allocator, seconds, compilation included", 5, warmed.get("warmup_seconds"), "s", at_most=True)
    both = records.find(OURS, BOTH, length=16384, head_dim=128)
    extra = both.figures.get("extra_megabytes") if both else None
    forward = records.find(OURS, FORWARD, length=16384, head_dim=128)
    inputs = forward.figures["moved_megabytes"] if forward else None
    yield Goal(
        "memory of forward + backward at 16k beside q, k, v, out", None, extra and inputs and extra / inputs, "x"
    )
