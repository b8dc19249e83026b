"""Composer's recipe for batches by length on two ranks."""

import pytest

from . import conftest  # noqa: F401  # each process imports Composer this way

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from ..contract.composer import Wrapped
from ..test_loaders import assert_every_item_is_trained_on_once, blocks, count_items

RECIPES = blocks("docs/guides/composer.md")[1]


def one_of_two(rank, port, folder):
    count_items(rank, port, folder, RECIPES, lambda model: {"model": Wrapped(model), "max_duration": "3ba"})


def test_two_ranks_train_on_every_item_once(tmp_path):
    assert_every_item_is_trained_on_once(one_of_two, tmp_path, trainings=1)
