"""ALiBi in plain PyTorch: the slopes of the heads, and the dense bias that they define.

Source: O. Press, N. A. Smith, M. Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input
Length Extrapolation", ICLR 2022, arXiv 2108.12409.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.checks import check_bool, check_dense, check_int
from ..utils.devices import is_capturing, to_float64

#: The default slopes by number of heads and device. They are kept, since CUDA graphs read them in each replay.
_computed: dict[tuple[int, torch.device], Tensor] = {}


def alibi_slopes(num_heads: int, *, device: torch.device | str | None = None) -> Tensor:
    """The slopes of Press et al.: 2^(−8/n), 2^(−16/n), ..., 2^(−8) for n = `num_heads` a power of two.

    For other numbers, as in the paper's code: the slopes for the largest power of two p below `num_heads`, then every
    other slope for 2p.

    Args:
        num_heads: H, at least 1.
        device: Device of the result.

    Returns:
        (H,) float32, in (0, 1).

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `num_heads` is less than 1.
    """
    num_heads = check_int("num_heads", num_heads, minimum=1)
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = _geometric_slopes(power, device)
    if power < num_heads:
        between = _geometric_slopes(2 * power, device)[::2]
        slopes = torch.cat([slopes, between[: num_heads - power]])
    return slopes


def default_slopes(num_heads: int, device: torch.device) -> Tensor:
    """`alibi_slopes`, computed once for each device. Not to be changed in place."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return alibi_slopes(num_heads, device=device)  # another tensor than a later call may use
    known = _computed.get((num_heads, device))
    if known is not None:
        return known
    if is_capturing(device):  # the graph owns what it computes
        return alibi_slopes(num_heads, device=device)
    with torch.inference_mode(False):  # autograd cannot save inference tensors
        slopes = alibi_slopes(num_heads, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # from now on any stream may read them
    _computed[num_heads, device] = slopes
    return slopes


def _geometric_slopes(power: int, device: torch.device | str | None) -> Tensor:
    """2^(−8 i / power) for i = 1 ... power, rounded from float64 to float32.

    Computed on the device if it has float64, because a copy from the host would wait.
    """
    i = torch.arange(1, power + 1, device=device)
    return torch.exp2(to_float64(i) * (-8 / power)).float().to(i.device)


def alibi_bias(
    slopes: Tensor,
    query_length: int,
    key_length: int,
    *,
    causal: bool = True,
    query_start: int | None = None,
) -> Tensor:
    """The dense additive bias −slope · |position − j|, for attention kernels that take a bias.

    The bias has H · Q · K elements. `alibi_attention` computes the same attention without it.

    Args:
        slopes: (H,) or (B, H), any floating dtype.
        query_length: Q.
        key_length: K.
        causal: The bias is −∞ for keys after the query's position: j > position.
        query_start: Position of query 0; key j has position j. Default: K − Q, so that the last query has the position
            of the last key.

    Returns:
        (H, Q, K) of the slopes' dtype and device; (B, H, Q, K) for slopes (B, H). A row may hide every key.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `slopes` have another shape, or a length is negative.
    """
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
        raise TypeError(
            f"slopes must be a floating-point tensor, got {getattr(slopes, 'dtype', type(slopes).__name__)}"
        )
    check_dense("slopes", slopes)
    if slopes.dim() not in (1, 2):
        raise ValueError(f"slopes must be (num_heads,) or (batch, num_heads), got {tuple(slopes.shape)}")
    query_length = check_int("query_length", query_length, minimum=0)
    key_length = check_int("key_length", key_length, minimum=0)
    check_bool("causal", causal)
    start = key_length - query_length if query_start is None else check_int("query_start", query_start)
    position = torch.arange(query_length, device=slopes.device)[:, None] + start
    offset = position - torch.arange(key_length, device=slopes.device)
    bias = -slopes[..., None, None] * offset.abs()
    return bias.masked_fill(offset < 0, float("-inf")) if causal else bias
