"""An independent implementation of ALiBi attention, which decides every pair of tokens on its own, in float64."""

import torch


def distance_and_visibility(
    batch_size,
    query_length,
    key_length,
    *,
    causal=True,
    segment_length=None,
    query_start=None,
    window=None,
    key_padding_mask=None,
):
    """Distance (float64) and visibility (bool), both (B, Q, K)."""
    distance = torch.zeros(batch_size, query_length, key_length, dtype=torch.float64)
    visible = torch.zeros(batch_size, query_length, key_length, dtype=torch.bool)
    if query_start is None:
        query_start = key_length - query_length
    starts = torch.as_tensor(query_start).reshape(-1).expand(batch_size).tolist()
    for b in range(batch_size):
        for i in range(query_length):
            for j in range(key_length):
                position = starts[b] + i
                distance[b, i, j] = abs(position - j)
                visible[b, i, j] = (
                    (not causal or j <= position)
                    and (window is None or abs(position - j) <= window)
                    and (segment_length is None or i // segment_length == j // segment_length)
                    and (key_padding_mask is None or bool(key_padding_mask[b, j]))
                )
    return distance, visible


def dense_attention(query, key, value, slopes, distance, visible, *, scale=None):
    """Attend one query at a time over the keys it sees: out (B, Hq, Q, D) and lse (B, Hq, Q), differentiable."""
    batch_size, num_heads, query_length, head_dim = query.shape
    group = num_heads // key.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    query, key, value, slopes = (tensor.double() for tensor in (query, key, value, slopes))
    slopes = slopes.expand(batch_size, num_heads)
    rows, sums = [], []
    for b in range(batch_size):
        for h in range(num_heads):
            for i in range(query_length):
                seen = visible[b, i].nonzero()[:, 0]
                if len(seen) == 0:
                    rows.append(torch.zeros(head_dim, dtype=torch.float64))
                    sums.append(torch.tensor(float("-inf"), dtype=torch.float64))
                    continue
                keys, values = key[b, h // group, seen], value[b, h // group, seen]
                scores = scale * (keys @ query[b, h, i]) - slopes[b, h] * distance[b, i, seen]
                rows.append(torch.softmax(scores, 0) @ values)
                sums.append(torch.logsumexp(scores, 0))
    if not rows:
        return torch.zeros(query.shape, dtype=torch.float64), torch.zeros(query.shape[:-1], dtype=torch.float64)
    return torch.stack(rows).view(query.shape), torch.stack(sums).view(query.shape[:-1])
