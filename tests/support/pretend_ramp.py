"""A ramp's kernels as on a GPU of capability 9.0, up to the launch: attention and resizing at every length, twice.

Prints the names of the kernels compiled by the first ramp. The second ramp must compile none, else an error is raised.
"""

import json

from tests.support.pretend_gpu import forward_and_backward, pretend  # must come first: disables Triton's interpreter

# isort: split
from seqwarm_kernels import SequenceLengthScheduler, compilations, no_compilation
from tests.support.pretend_resize import resized

LONGEST = 1024


def ramp(lengths):
    for length in lengths:
        resized("truncate", 4, LONGEST, length)
        forward_and_backward(4, length)


def main():
    pretend(chip=90)
    scheduler = SequenceLengthScheduler(8, LONGEST, duration=1000, step_size=8)
    lengths = [milestone.seq_length for milestone in scheduler.milestones()]
    with compilations() as warmup:
        ramp(reversed(lengths))  # as warmup_allocator passes them
    with no_compilation():
        ramp(lengths)
    print(json.dumps({"lengths": len(lengths), "compiled": warmup}))


if __name__ == "__main__":
    main()
