"""Dynamic batching on your text: padding, batches for training, and exact restarts.

    python examples/dynamic_batching.py --text my_text.txt --figure padding.png

The four steps are numbered in `main`. `seqwarm padding` prints only the table of step 2.
"""

import argparse
import itertools
import json
import pydoc_data.topics
import sys
import tempfile

from seqwarm_kernels.data import (
    BatchPlanner,
    ChunkSource,
    LengthBatchStream,
    PackedCollator,
    PaddedCollator,
    Prepare,
    write_chunks,
)
from seqwarm_kernels.data.padding import TOKENIZERS, UNITS, compare, count_tokens, draw, read_text, table


def encode(text_and_length: tuple[str, int]) -> list[int]:  # your tokenizer; here bytes are tokens
    return list(text_and_length[0].encode())


def count_bytes(text: str) -> int:
    return len(text.encode())


def length_of(text_and_length: tuple[str, int]) -> int:
    return text_and_length[1]


def stream(folder: str, packed: bool) -> LengthBatchStream:
    source = ChunkSource(folder, with_lengths=True)  # one epoch; infinite=True repeats epochs forever
    planner = BatchPlanner(max_tokens=16_384, too_long="split", packed=packed)
    return LengthBatchStream(source, planner, length=length_of, window=10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text", nargs="+", default=[pydoc_data.topics.__file__], help="default: a file of Python's documentation"
    )
    parser.add_argument("--items", choices=UNITS, default="line")
    parser.add_argument("--tokenizer", default="bytes", help=f"{', '.join(TOKENIZERS)}, or a name of Hugging Face")
    parser.add_argument("--figure", help="write histograms and the table to this PNG")
    arguments = parser.parse_args()

    try:
        items, _ = read_text(arguments.text, arguments.items)
        lengths, token_kind = count_tokens(items, arguments.tokenizer)
    except (ValueError, ImportError) as error:
        sys.exit(f"dynamic_batching.py: {error}")
    with tempfile.TemporaryDirectory() as folder:
        # 1. Write the text to compressed files of 10,000 items. The lengths are counted once and stored, so planning
        #    needs no tokenizer.
        texts = (item.replace("\n", " ") for item in items)
        manifest = write_chunks(texts, folder, length_fn=count_bytes)
        print(f"{manifest.items:,} items in {len(manifest.chunks or ())} files\n")

        # 2. Compare the padding of several ways of batching.
        batchings = compare(lengths)
        print(f"Tokens: {token_kind}\n{table(batchings)}\n")
        if arguments.figure:
            draw(lengths, batchings, token_kind, arguments.figure)

        # 3. Make batches for training: packed without padding, for a model with variable-length attention, or padded
        #    rows of similar length.
        for packed, collator in ((True, PackedCollator()), (False, PaddedCollator())):
            prepare = Prepare(collator, transform=encode)
            batch = prepare(next(iter(stream(folder, packed))))
            shapes = {name: getattr(value, "shape", value) for name, value in batch.items()}
            print(f"{'packed' if packed else 'padded':<10}", shapes)

        # 4. Interrupt a run, and resume it with the next batch from a state of a few hundred bytes.
        half = sum(1 for _ in stream(folder, packed=True)) // 2
        interrupted = stream(folder, packed=True)
        batches = iter(interrupted)
        for _ in itertools.islice(batches, half):
            pass
        state = json.dumps(interrupted.state_dict())
        resumed = stream(folder, packed=True)
        resumed.load_state_dict(json.loads(state))
        items = interrupted.progress.items
        assert list(resumed) == list(batches)
        print(f"\nresumed after {items:,} items, from {len(state)} bytes")


if __name__ == "__main__":
    main()
