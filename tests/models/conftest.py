import pytest
from torch.distributed.device_mesh import init_device_mesh

from ..support.ranks import one_rank


@pytest.fixture
def mesh():
    """The mesh of a process alone."""
    with one_rank():
        yield init_device_mesh("cpu", (1,))
