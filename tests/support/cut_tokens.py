"""Batches cut in plain Python, written down from the documentation: what `resize_batch` must return.

A slot of a new row is the (row, position, is repeated) of a token of the old batch, or PADDING.
"""

import torch

from seqwarm_kernels.self_check import calls

PADDING = None

#: All ways to cut a batch.
METHODS = [*calls.METHODS.values()]


def pieces_of(tokens, seq_len, remainder="keep"):
    """One row of tokens in pieces of `seq_len`. "keep" leaves the last one short."""
    pieces = [tokens[start : start + seq_len] for start in range(0, len(tokens), seq_len)]
    missing = seq_len - len(pieces[-1]) if pieces else 0
    if missing and remainder == "drop":
        pieces.pop()
    elif missing and remainder == "pad":
        pieces[-1] = pieces[-1] + [PADDING] * missing
    elif missing and remainder == "overlap":
        start = len(tokens) - seq_len
        pieces[-1] = [(row, place, True) for row, place, _ in tokens[start : start + missing]] + pieces[-1]
    return pieces


def cut_rows(masks, seq_len, mode, remainder="drop", keep_last_token=False):
    """The new rows of a batch of rows, each with a mask of its valid tokens."""
    tokens = [[(row, place, False) for place in range(len(mask))] for row, mask in enumerate(masks)]
    source_length = len(masks[0]) if masks else 0
    if seq_len >= source_length:
        return tokens
    if mode == "flatten":
        return pieces_of([token for row in tokens for token in row], seq_len, "drop")
    if mode == "reshape":
        return [piece for row in tokens for piece in pieces_of(row, seq_len, remainder)]
    cut = []
    for row, mask in zip(tokens, masks, strict=True):
        valid = [place for place, value in enumerate(mask) if value] or [0]
        start = min(valid[0], source_length - seq_len)
        cut.append(row[start : start + seq_len])
        if keep_last_token and valid[-1] >= start + seq_len:
            cut[-1][-1] = row[valid[-1]]
    return cut


def cut_sequences(lengths, seq_len, mode, remainder="drop"):
    """The new sequences of a packed batch with sequences of these lengths, and which old one each is cut from."""
    olds, cut = [], []
    for sequence, length in enumerate(lengths):
        tokens = [(sequence, place, False) for place in range(length)]
        keeps = mode == "flatten" or remainder == "pad"  # a packed batch is not padded
        if length <= seq_len:
            pieces = [tokens]
        elif mode == "truncate":
            pieces = [tokens[:seq_len]]
        else:
            pieces = pieces_of(tokens, seq_len, "keep" if keeps else remainder)
        olds += [sequence] * len(pieces)
        cut += pieces
    return olds, cut


def taken(tensor, cut, seq_len, fill_value=0, fill_repeats=False):
    """The new rows of a tensor (B, S, features...)."""
    rows = []
    for row in cut:
        slots = [
            torch.full_like(tensor[0, 0], fill_value)
            if slot is PADDING or (fill_repeats and slot[2])
            else tensor[slot[0], slot[1]]
            for slot in row
        ]
        rows.append(torch.stack(slots))
    return torch.stack(rows) if rows else tensor.new_empty(0, min(seq_len, tensor.shape[1]), *tensor.shape[2:])


def check_info(info, valid):
    """`info` must be that of new rows with these valid tokens."""
    assert info.valid_lengths.dtype == torch.int32
    assert info.position_ids.dtype == torch.int64
    assert info.valid_lengths.tolist() == [sum(row) for row in valid.tolist()]
    expected = [[sum(row[:t]) if row[t] else 0 for t in range(len(row))] for row in valid.tolist()]
    assert info.position_ids.tolist() == expected
    assert info.num_valid_tokens.item() == valid.sum().item()
