"""One stage of measurements, in a process of its own: `python -m bench.gpu.stage NAME --out FILE --seconds SECONDS`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from experiments import gpu as training

from ..alibi_attention import gpu as attention
from ..alibi_attention.hopper import hopper
from ..allocator import gpu as allocator
from ..moment_statistics import gpu as moments
from ..resize_batch import gpu as resizing
from .records import DeviceRecord, Recorder, explain

Measure = Callable[[Recorder, torch.device, bool], None]
STAGES: dict[str, tuple[Measure, ...]] = {
    "paths": (attention.paths,),
    "long": (resizing.copy, attention.long),
    "small": (attention.host, attention.packed, attention.decoding),
    "segments": (resizing.copy, attention.segments),
    "lengths": (attention.lengths,),
    "allocator": (allocator.ramp,),
    "resize": (resizing.copy, resizing.resize),
    "diagnostics": (moments.monitor,),
    "training": (training.to_one_loss,),
    "hopper": (hopper,),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    recorder = Recorder(arguments.out, arguments.seconds)
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    for measure in STAGES[arguments.name]:
        try:
            measure(recorder, device, arguments.dry_run)
        except Exception as error:  # the other measurements still run
            recorder.add(DeviceRecord(arguments.name, measure.__name__, "", "", failure=explain(error)))


if __name__ == "__main__":
    main()
