"""resize_batch's Triton kernels as on a GPU of some capability, up to the launch.

    python -m tests.support.pretend_resize 90

Prints JSON: for every rule the registers, spills and wide moves of the kernel, for a batch in which every tensor can be
copied in blocks of 16 bytes; the number of kernels for all lengths of a ramp, and for several numbers of rows; the same
for the kernel of packed batches.
"""

import json
import re
import sys
from collections import Counter

from tests.support.pretend_gpu import pretend  # must come first: disables Triton's interpreter

# isort: split
import numpy as np
import torch

from bench.alibi_attention.compiled import disassemble
from seqwarm_kernels.ops.resize_batch import triton as resize
from seqwarm_kernels.ops.resize_batch.schema import RULES, SKIPPING, Kind
from seqwarm_kernels.ops.resize_packed import triton as resize_packed
from seqwarm_kernels.ops.resize_packed.schema import PackedKind, cut_sequences


def resized(rule, rows, length, new_length, with_mask=True):
    inputs = [
        torch.zeros(rows, length, dtype=torch.int64),
        torch.zeros(rows, length, dtype=torch.bool),
        torch.zeros(rows, length, 24, dtype=torch.bfloat16),
    ]
    kinds = [Kind.LABEL, Kind.SEQUENCE, Kind.SEQUENCE]
    mask = inputs[1] if with_mask else None
    resize.resize_batch(inputs, mask, rows, length, new_length, rule, kinds, [-100, 0, 0], True)


def resized_packed(sequences, length, new_length):
    tokens = sequences * length
    inputs = [torch.zeros(sequences)] + 4 * [torch.zeros(tokens, dtype=torch.int64)]
    inputs.append(torch.zeros(tokens, 24, dtype=torch.bfloat16))
    mask = torch.zeros(tokens, dtype=torch.bool)
    pieces, new_bounds = cut_sequences(length * np.arange(sequences + 1), new_length, "reshape_overlap")
    kinds = [*map(int, PackedKind), int(PackedKind.TOKEN)]
    resize_packed.resize_packed(inputs, mask, pieces, int(new_bounds[-1]), kinds, [0, 0, -100, 0, 0, 0], True)


def made_of(compiled):
    registers, spilled, assembly = disassemble(compiled.asm["cubin"])
    moves = Counter(re.findall(r"\b(LDG|STG)\.E\.128\b", assembly))
    return {"registers": registers, "spilled_bytes": spilled, "wide_loads": moves["LDG"], "wide_stores": moves["STG"]}


def main():
    launched = []
    pretend(int(sys.argv[1]), launched)
    kernels = {}
    for rule in RULES:
        resized(rule, 4, 1024, 256)
        kernels[rule] = made_of(launched[-1])
    before_ramp = len({id(kernel) for kernel in launched})
    for new_length in range(8, 1024, 8):
        resized("truncate_valid", 4, 1024, new_length)
    after = len({id(kernel) for kernel in launched})
    for rows in (1, 16, 33):
        resized("truncate_valid", rows, 1024, 64)
    by_rows = len({id(kernel) for kernel in launched})
    for rule in RULES:
        if rule not in SKIPPING:
            resized(rule, 4, 1024, 256, with_mask=False)
    resized_packed(4, 1024, 256)
    packed = made_of(launched[-1])
    before = len({id(kernel) for kernel in launched})
    for sequences, length, new_length in [(1, 1, 1), (3, 7, 2), (16, 512, 64), (33, 1000, 8), (4, 1024, 1024)]:
        resized_packed(sequences, length, new_length)
    again = len({id(kernel) for kernel in launched}) - before
    report = {"kernels": kernels, "ramp": after - before_ramp, "rows": by_rows - after}
    print(json.dumps(report | {"packed": packed, "packed_ramp": again}))


if __name__ == "__main__":
    main()
