"""Dynamic batching on real text, as a well-known post of 2020 showed it with infinibatch, and what we do beyond it.

    python examples/dynamic_batching.py --text my_text.txt --figure padding.png

What matters to you is numbered 1 to 4. `python -m seqwarm_kernels padding` prints the table of step 2 alone.
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
from seqwarm_kernels.data.padding.comparison import Settings, compare, table
from seqwarm_kernels.data.padding.corpus import TOKENIZERS, UNITS, Corpus, count_tokens
from seqwarm_kernels.data.padding.figure import draw


def encode(text_and_length: tuple[str, int]) -> list[int]:  # your tokenizer; here bytes are tokens
    return list(text_and_length[0].encode())


def count_bytes(text: str) -> int:
    return len(text.encode())


def the_length(text_and_length: tuple[str, int]) -> int:
    return text_and_length[1]


def stream(folder: str, packed: bool) -> LengthBatchStream:
    source = ChunkSource(folder, with_lengths=True)  # one epoch; infinite=True goes on for ever
    planner = BatchPlanner(max_tokens=16_384, too_long="split", packed=packed)
    return LengthBatchStream(source, planner, length=the_length, window=10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", default=[pydoc_data.topics.__file__], help="default: a text of Python's")
    parser.add_argument("--items", choices=UNITS, default="line")
    parser.add_argument("--tokenizer", default="bytes", help=f"{', '.join(TOKENIZERS)}, or one of Hugging Face")
    parser.add_argument("--figure", help="a PNG with histograms and the table")
    arguments = parser.parse_args()

    try:
        corpus = Corpus(arguments.text, arguments.items)
        lengths, counted = count_tokens(corpus.items, arguments.tokenizer)
    except (ValueError, ImportError) as error:
        sys.exit(f"dynamic_batching.py: {error}")
    with tempfile.TemporaryDirectory() as folder:
        # 1. Text becomes compressed files of 10,000 items. Lengths are counted once, so planning needs no tokenizer.
        texts = (item.replace("\n", " ") for item in corpus.items)
        manifest = write_chunks(texts, folder, length_fn=count_bytes)
        print(f"{manifest.items:,} items in {len(manifest.chunks or ())} files\n")

        # 2. What padding costs: the post's three settings, then ours.
        batchings = compare(lengths, Settings())
        print(f"Tokens: {counted}\n{table(batchings)}\n")
        if arguments.figure:
            draw(lengths, batchings, counted, arguments.figure)

        # 3. Batches for training: no padding for a model with attention of variable length, or rows of similar length.
        for packed, collator in ((True, PackedCollator()), (False, PaddedCollator())):
            prepare = Prepare(collator, transform=encode)
            batch = prepare(next(iter(stream(folder, packed))))
            print(
                f"{'packed' if packed else 'padded':<10}", {name: getattr(v, "shape", v) for name, v in batch.items()}
            )

        # 4. A run that was killed goes on with the batch it would have had, from a state of a few hundred bytes.
        half = sum(1 for _ in stream(folder, packed=True)) // 2
        unbroken = stream(folder, packed=True)
        batches = iter(unbroken)
        for _ in itertools.islice(batches, half):
            pass
        state = json.dumps(unbroken.state_dict())
        resumed = stream(folder, packed=True)
        resumed.load_state_dict(json.loads(state))
        after = unbroken.progress.items
        assert list(resumed) == list(batches)
        print(f"\nresumed after {after:,} items, from {len(state)} bytes")


if __name__ == "__main__":
    main()
