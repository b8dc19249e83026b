import pytest
import torch


@pytest.fixture(scope="module")
def process_group():
    """The group of a process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
