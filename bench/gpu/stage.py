"""One stage of a run on a GPU, in a process of its own: `python -m bench.device_stage NAME --out FOLDER`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from ..alibi_attention import gpu as device_attention
from ..alibi_attention import gpu_small as device_small
from ..allocator import gpu as device_ramp
from ..moment_statistics import gpu as device_diagnostics
from ..resize_batch import gpu as device_memory
from .records import DeviceRecord, Recorder, explain

Part = Callable[[Recorder, torch.device, bool], None]
PARTS: dict[str, tuple[Part, ...]] = {
    "long": (device_memory.copy, device_attention.long),
    "memory": (device_memory.copy, device_memory.resize, device_ramp.ramp),
    "small": (device_small.host, device_small.packed),
    "diagnostics": (device_diagnostics.monitor,),
    "segments": (device_memory.copy, device_attention.segments),
    "lengths": (device_attention.lengths,),
    "tuned": (device_attention.tuned,),
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
        except Exception as error:  # the other parts go on
            recorder.add(DeviceRecord(arguments.name, part.__name__, "", "", failure=explain(error)))


if __name__ == "__main__":
    main()
