"""Tokens of 32 or 64 bits that would be read as those of 16, with zeros between them, are noticed."""

import numpy as np
import pytest

from seqwarm_kernels.data import TokenSource
from seqwarm_kernels.data.files.data_file import fitting_dtype


def random_below(vocabulary):
    return lambda count: np.random.RandomState(count).randint(0, vocabulary, count)


#: By name: dtypes that hold the tokens of a vocabulary, and a function that makes some.
VOCABULARIES = {
    "a few": (["uint16", "int32", "uint32", "int64"], lambda count: np.arange(count) % 3 + 1),
    "GPT-2": (["uint16", "int32", "uint32", "int64"], random_below(50_257)),
    "Llama 3": (["int32", "uint32", "int64"], random_below(128_256)),
    "Gemma": (["int32", "uint32", "int64"], random_below(262_144)),
    "labels": (["int32", "int64"], lambda count: np.where(np.arange(count) < 2, -100, 50_256)),
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("lengths", [[3], [5, 2, 9, 1, 14], [512] * 3], ids=["one", "several", "rows"])
def test_a_dtype_that_is_too_narrow(vocabulary, lengths):
    dtypes, make = VOCABULARIES[vocabulary]
    for stored in dtypes:
        documents, width = [make(length).astype(stored) for length in lengths], np.dtype(stored).itemsize
        assert fitting_dtype(documents) == stored
        for narrow in ("uint16", "int16", "int32", "uint32"):
            if np.dtype(narrow).itemsize < width:
                assert fitting_dtype([document.view(narrow) for document in documents]) == f"int{8 * width}"


@pytest.mark.parametrize("vocabulary", [2, 4, 8, 65, 256, 50_257])
def test_a_dtype_that_is_right(vocabulary):
    """Also of small vocabularies, of padded rows, and of even lengths."""
    random = np.random.RandomState(0)
    for _ in range(5):
        made = [random.randint(0, vocabulary, 2 * random.randint(1, 50)).astype(np.uint16) for _ in range(20)]
        made = [np.append(document, np.zeros(2 * random.randint(20), np.uint16)) for document in made]
        made.append(np.array([1, 1], np.uint16))
        made += [np.array([7, 1], np.uint16)] * 30  # a token and an end
        assert fitting_dtype(made) == np.uint16
        if vocabulary <= 256:
            assert fitting_dtype([document.astype(np.uint8) for document in made]) == np.uint8
    for tokens in (random.randint(0, vocabulary, 5000), random.zipf(1.2, 5000) % vocabulary, np.zeros(5000)):
        assert fitting_dtype([tokens.astype(np.uint16)]) == np.uint16
    # A token and an end in each document, and few tokens with a large one in each document.
    assert fitting_dtype([np.array([number % 50_257, 2], np.uint16) for number in range(10_000)]) == np.uint16
    tokens = np.random.default_rng(0).integers(10, 190, (50, 1024)).astype(np.uint16)
    tokens[:, 0] = 50_256
    assert fitting_dtype([tokens.ravel()]) == np.uint16


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_a_file_of_a_wider_dtype_is_not_read_as_the_default(tmp_path, dtype):
    tokens = np.random.default_rng(0).integers(8, 50_257, 5000)
    tokens[9::10] = 7
    path = tmp_path / "train.bin"
    for content in (tokens, tokens[:10], [11, 12, 7], [11, 12, 13, 7]):
        np.array(content, dtype).tofile(path)
        for arguments in ({"end_token": 7}, {"start_token": 7}, {"document_ends": [len(content)]}):
            with pytest.raises(ValueError, match="dtype"):
                TokenSource(path, **arguments)
            assert sum(TokenSource(path, dtype=dtype, **arguments).lengths()) == len(content)
    assert len(TokenSource(path, end_token=7, dtype="uint16").lengths()) >= 1  # as it was said
