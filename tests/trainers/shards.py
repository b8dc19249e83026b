"""The parts of batches that the forwards of a model with ContextParallel get on two ranks."""

import functools

from ..support.exchanges import Exchanges


def watch(made):
    """For each forward in training mode: the shape of this rank's part, and whether it exchanged anything."""
    forward, seen = made.forward, []

    @functools.wraps(forward)  # the Trainer reads its signature
    def watched(*args, **kwargs):
        with Exchanges() as exchanges:
            outputs = forward(*args, **kwargs)
        if made.training:
            seen.append([*kwargs["input_ids"].shape, exchanges.count > 0])
        return outputs

    made.forward = watched
    return seen


def part_of(rows, tokens):
    """The part of a rank, and whether it needs the keys of the other. Tokens are padded to a multiple of 4."""
    return [rows, -(-tokens // 8) * 4, True] if rows % 2 else [rows // 2, tokens, False]
