"""What may be skipped: bounds of the error, and the worst keys for decoding."""

import math

import torch

from seqwarm_kernels import alibi_attention

LENGTH = 512
TOLERANCE = 0.125
ROWS = 11


def check_the_promise(backend, *, causal, bounded, device="cpu"):
    """The weights that are left out are at most the tolerance. Of those from 1/8 to 4 times as much, some are left out.

    The query's last 32 keys have score 0. With `bounded`, the keys far away are as long as the norm bound allows and
    point along the query, and all between weigh next to nothing. Else all other keys have the same score.
    """
    position = LENGTH - 1 if causal else LENGTH // 2
    slope = 0.1 if bounded else 1e-6
    distance = (torch.arange(LENGTH) - position).abs().double()
    is_near = (torch.arange(LENGTH) <= position) & (distance < 32)
    is_far = (distance >= 128) if bounded else ~is_near
    penalties = torch.exp(-slope * distance)
    shares = TOLERANCE * 2 ** torch.linspace(-3, 2, ROWS, dtype=torch.float64)  # of the far keys, one row each
    norms = torch.log(shares / (1 - shares) * penalties[is_near].sum() / penalties[is_far].sum())
    scores = torch.where(is_far, norms[:, None], torch.where(is_near, 0, -norms.abs()[:, None]))
    query, key, value = torch.zeros(ROWS, 1, 1, 16), torch.zeros(ROWS, 1, LENGTH, 16), torch.zeros(ROWS, 1, LENGTH, 16)
    query[..., 0], key[:, 0, :, 0], value[:, 0, is_far] = 1, scores.float(), 1

    def attended(tensors, **options):
        slopes = torch.full((1,), slope, dtype=tensors[0].dtype, device=tensors[0].device)
        out = alibi_attention(*tensors, slopes, scale=1, causal=causal, query_start=position, **options)
        return out[:, 0, 0, 0].double().cpu()

    exact = attended([tensor.double() for tensor in (query, key, value)], skip_tolerance=0, backend="reference")
    torch.testing.assert_close(exact, shares, rtol=0.05, atol=0)
    query, key, value = (tensor.to(device) for tensor in (query, key, value))
    bound = key[:, :, :, 0].abs().amax(-1) if bounded else None
    found = attended((query, key, value), skip_tolerance=TOLERANCE, key_norm_bound=bound, backend=backend)
    left_out = (exact - found).max()
    assert TOLERANCE / 8 <= left_out <= TOLERANCE


def check_error_bounds(backend, tensors, slopes, tolerance, attention=alibi_attention, **options):
    """Apart from rounding, lse is off by at most log(1 − ε), outputs by 2ε, the gradients of a query by 6ε."""

    def run(tensors, backend, **more):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        out, lse = attention(*leaves, slopes=slopes, return_lse=True, backend=backend, **options, **more)
        return out, lse, leaves

    out, lse, leaves = run(tensors, backend, skip_tolerance=tolerance)
    exact, exact_lse, exact_leaves = run([tensor.double() for tensor in tensors], "reference")
    eps = torch.finfo(out.dtype).eps
    seen = exact_lse.isfinite()
    assert (lse.isfinite() == seen).all()
    if not seen.any():
        return out, lse
    rounding = 1e-5 * (1 + exact_lse[seen].abs().max().item())
    missing = (exact_lse - lse)[seen]
    assert missing.min() >= -rounding
    assert missing.max() <= -math.log1p(-tolerance) + rounding
    largest = tensors[2].nan_to_num(0).abs().max().item()
    assert (out - exact).abs().max() <= 2 * tolerance * largest + 64 * eps * largest + rounding

    weights = torch.randn_like(exact)
    gradients = torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)
    wanted = torch.autograd.grad((exact * weights).sum(), exact_leaves)
    scale = options.get("scale", tensors[0].shape[-1] ** -0.5)
    reach = (weights.abs().sum(-1).max() * largest).item() * abs(scale)  # G · |scale|
    norms = max(tensor.nan_to_num(0).abs().max().item() for tensor in tensors[:2])
    for gradient, want, queries in zip(gradients[:2], wanted[:2], (1, out.shape[-2]), strict=True):
        bound = 6 * tolerance * reach * norms * queries
        assert (gradient - want).abs().max() <= bound + 256 * eps * (1 + want.abs().max().item()) + rounding * reach
    return out, lse


#: 128 keys and a slope, of queries that are all 1: score of most keys, places of others, their score, slope. All keys
#: that weigh something must be visited, and no weight may overflow.
NEAR_AND_FAR_KEYS = {
    "scores that exceed negative ones": (-20.0, [40], 20.0, 0.5),
    "one row masks the far key": (0.0, [0], 80.0, 0.5),
    "bounded": (1.0, [3, 124], 2.0, 0.1),
    "a large score": (0.0, [3, 124], 100.0, 0.01),
    "a negative slope": (0.0, [], 0.0, -2.0),
}


def check_within_reach(backend, name, **options):
    """With a head before that reaches less far."""
    score, places, other_score, slope = NEAR_AND_FAR_KEYS[name]
    rows = 2 if "masks" in name else 1
    key = torch.full((rows, 1, 128, 16), score / 4)  # scores are sums of 16 products, times 1/4
    key[:, :, places] = other_score / 4
    if "masks" in name:
        options["key_padding_mask"] = torch.ones(rows, 128, dtype=torch.bool)
        options["key_padding_mask"][0, places] = False
    query = torch.ones_like(key).repeat(1, 2, 1, 1)
    leaves = [tensor.requires_grad_() for tensor in (query, key, torch.randn_like(key))]
    weights = torch.randn_like(query)
    results = []
    for each in (backend, "reference"):
        out = alibi_attention(*leaves, torch.tensor([8.0, slope]), backend=each, **options)
        results.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
