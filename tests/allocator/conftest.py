import pytest

from ..support.ranks import one_rank


@pytest.fixture(scope="module")
def process_group():
    """The group of a process alone."""
    with one_rank():
        yield
