"""Refuses calls inside torch's context_parallel, which would give wrong results without an error."""

from __future__ import annotations

import sys

from torch.nn import functional

#: Where torch keeps the functions with which `context_parallel` replaces others. Loaded only by those who use it.
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"


def refuse_context_parallel() -> None:
    """Raise ValueError if torch's `context_parallel` is active."""
    module = sys.modules.get(_MODULE)
    if module is not None and functional.scaled_dot_product_attention in module._replaced_functions:
        raise ValueError(
            "query must hold the tokens of whole rows, got a call inside torch's context_parallel, which leaves each "
            "rank a part of the tokens and exchanges keys for scaled_dot_product_attention alone: positions and keys "
            "would be those of the part. Call seqwarm_kernels.parallel.context_attention, outside of context_parallel"
        )
