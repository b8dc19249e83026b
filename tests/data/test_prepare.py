"""Items through Prepare and PieceDataset: only tokens are cut."""

import pytest

from seqwarm_kernels.data import (
    BatchPlanner,
    LengthBatchSampler,
    PackedCollator,
    PaddedCollator,
    Piece,
    PieceDataset,
    Prepare,
)


def test_prepare():
    prepare = Prepare(PaddedCollator(), transform=lambda text: [ord(letter) for letter in text])
    assert prepare(["ab", Piece("xyz", 1, 1)])["input_ids"].tolist() == [[97, 98], [121, 0]]
    prepare = Prepare(PackedCollator(), dataset=[[1, 2, 3], [4]])
    assert prepare([Piece(0, 2, 1), 1])["input_ids"].tolist() == [[3, 4]]
    assert prepare([])["input_ids"].tolist() == [[0]]
    assert Prepare(list, cut=lambda item, start, length: (item, start, length))([Piece("a", 1, 2)]) == [("a", 1, 2)]


@pytest.mark.parametrize("text", ["a text", b"a text"])
@pytest.mark.parametrize("make", [lambda text: text, lambda text: {"input_ids": text}], ids=["text", "mapping"])
def test_characters_are_not_cut_for_tokens(make, text):
    planner = BatchPlanner(8, max_length=4, too_long="truncate")
    for lengths in ([6], [3]):
        (batch,) = LengthBatchSampler(lengths, planner)
        for cut in (Prepare(list, dataset=[make(text)]), PieceDataset([make(text)]).__getitems__):
            with pytest.raises(TypeError, match=r"to cut must hold tokens, got b?'a text', whose characters"):
                cut(batch)
