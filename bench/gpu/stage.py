"""One stage of a GPU run, in a process of its own: `python -m bench.gpu.stage NAME --out FOLDER --seconds SECONDS`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from ..alibi_attention import gpu as attention
from ..allocator import gpu as allocator
from ..moment_statistics import gpu as moments
from ..resize_batch import gpu as resizing
from .records import DeviceRecord, Recorder, explain

Part = Callable[[Recorder, torch.device, bool], None]
PARTS: dict[str, tuple[Part, ...]] = {
    "long": (resizing.copy, attention.long),
    "memory": (resizing.copy, resizing.resize, allocator.ramp),
    "small": (attention.host, attention.packed),
    "diagnostics": (moments.monitor,),
    "segments": (resizing.copy, attention.segments),
    "lengths": (attention.lengths,),
    "tuned": (attention.tuned,),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    recorder = Recorder(arguments.out, arguments.seconds)
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    for part in PARTS[arguments.name]:
        try:
            part(recorder, device, arguments.dry_run)
        except Exception as error:  # the other parts still run
            recorder.add(DeviceRecord(arguments.name, part.__name__, "", "", failure=explain(error)))


if __name__ == "__main__":
    main()
