"""Another default device and dtype, on which no result may depend."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def other_defaults(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
