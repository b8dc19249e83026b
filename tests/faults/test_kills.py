"""Trainings that are killed at a random moment resume from their last complete checkpoint, and end on the same bits."""

import pytest

from ..support.kills import KILLS, assert_kills_change_nothing
from . import trainings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kills", KILLS)
def test_hugging_face(tmp_path, kills):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert_kills_change_nothing(tmp_path, trainings.hugging_face, trainings.assert_same_end, kills=kills)


@pytest.mark.parametrize("kills", KILLS)
def test_lightning(tmp_path, kills):
    pytest.importorskip("lightning.pytorch")
    assert_kills_change_nothing(tmp_path, trainings.lightning, trainings.assert_same_end, kills=kills)


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize(
    ("train", "ranks"),
    [
        pytest.param(trainings.train_gpt2, 1, id="one process"),
        pytest.param(trainings.train_gpt2, 2, id="DDP", marks=pytest.mark.exhaustive),
        pytest.param(trainings.train_gpt2_fsdp2, 2, id="FSDP2", marks=pytest.mark.exhaustive),
    ],
)
def test_train_gpt2(tmp_path, train, ranks, kills):
    pytest.importorskip("tokenizers")
    from ..test_train_gpt2 import assert_same_run

    assert_kills_change_nothing(tmp_path, train, assert_same_run, kills=kills, ranks=ranks)
