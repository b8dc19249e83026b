"""Trainings that are killed at a random moment resume from their last complete checkpoint, and end on the same bits."""

import pytest

from ..support.kills import KILLS, assert_kills_change_nothing
from . import trainings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize(
    ("train", "packages"),
    [(trainings.hugging_face, ["transformers", "accelerate"]), (trainings.lightning, ["lightning.pytorch"])],
)
def test_trainers(tmp_path, train, packages, kills):
    for package in packages:
        pytest.importorskip(package)
    assert_kills_change_nothing(tmp_path, train, trainings.assert_same_end, kills=kills)


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
