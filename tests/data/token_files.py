"""Documents of tokens, and files of each format that hold them."""

from importlib.util import find_spec

import numpy as np
import pytest

from ..support.stand_ins import stand_ins

END = 7  #: token at the end of each document
MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def documents(count, *, longest=40, seed=0):
    """Arrays of uint16. The first two tokens are the number of the document, the last one is END."""
    random = np.random.RandomState(seed)
    made = []
    for number in range(count):
        rest = random.randint(100, 50_000, random.randint(longest))
        made.append(np.array([100 + number // 1000, 100 + number % 1000, *rest, END], np.uint16))
    return made


def numbers(items):
    """The numbers of documents of `documents`."""
    return [(int(item[0]) - 100) * 1000 + int(item[1]) - 100 for item in items]


def write_flat(folder, made):
    """nanoGPT's format."""
    path = folder / "train.bin"
    np.concatenate(made).astype(made[0].dtype).tofile(path)
    return path


def write_llm_c(folder, made, *, name="train_000.bin", magic=20240520, version=1, dtype=np.uint16):
    """The format of llm.c and modded-nanogpt."""
    tokens, path = np.concatenate(made).astype(dtype), folder / name
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def write_npy(folder, made):
    np.save(folder / "train.npy", np.concatenate(made))
    return folder / "train.npy"


def ends(made):
    return np.cumsum([len(document) for document in made])


def write_megatron(folder, made, *, sequences=1):
    """Megatron's format.

    Args:
        sequences: number of sequences that each document is divided into.
    """
    prefix, dtype = folder / "train", made[0].dtype
    parts = [part for document in made for part in np.array_split(document, sequences)]
    lengths = np.array([len(part) for part in parts], np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize
    indices = np.arange(0, len(parts) + 1, sequences, dtype=np.int64)
    header = b"MMIDIDX\x00\x00" + np.uint64(1).tobytes() + bytes([MEGATRON_CODES[dtype.name]])
    counts = np.array([len(parts), len(indices)], np.uint64)
    arrays = (counts, lengths, pointers, indices)
    prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    np.concatenate(made).tofile(prefix.with_suffix(".bin"))
    return prefix


def need_mds():
    """Skips the test if mosaicml-streaming is not installed. It imports torchvision, which is not needed."""
    if find_spec("streaming") is None:
        pytest.skip("needs mosaicml-streaming: make test-mds")
    with stand_ins("torchvision"):
        import streaming

        return streaming


def write_mds(folder, made, *, encoding="ndarray:uint16", size_limit=5_000, others=None, **options):
    """MosaicML's format.

    Args:
        others: encodings of other columns, and a function from the number of a document to their values.
    """
    columns, values = others or ({}, lambda number: {})
    out = folder / "mds"
    columns = dict(sorted({**columns, "tokens": encoding}.items()))
    with need_mds().MDSWriter(out=str(out), columns=columns, size_limit=size_limit, **options) as writer:
        for number, document in enumerate(made):
            tokens = document.tobytes() if encoding == "bytes" else document
            writer.write({"tokens": tokens, **values(number)})
    return out


def write_merged_mds(folder, parts, **options):
    """A folder for each part, and an index of all of them, as mosaicml-streaming makes it."""
    need_mds()
    from streaming.base.util import merge_index

    for number, part in enumerate(parts):
        (folder / f"part{number}").mkdir(parents=True)
        write_mds(folder / f"part{number}", part, **options).rename(folder / str(number))
    merge_index(str(folder), keep_local=True)
    return folder
