"""Each argument of what needs Composer replaced by values that make no sense: taken, or refused by its name."""

import pytest

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from seqwarm_kernels.trainers import composer

from ...support.arguments import check_all_arguments


def monitor(outputs, spike_threshold, read_every):
    return composer.Monitor(outputs, spike_threshold=spike_threshold, read_every=read_every)


def warmup():
    lengths = {"min_seq_length": 2, "max_seq_length": 8, "step_size": 2}
    return {"duration": 0.5, **lengths, "truncate": True, "preserve_end_of_sequence": False}


CALLS = {
    "Alibi": (composer.Alibi, lambda: {"max_sequence_length": 8, "train_sequence_length_scaling": 0.5}),
    "Monitor": (monitor, lambda: {"outputs": print, "spike_threshold": 1.2, "read_every": 20}),
    "SeqLengthWarmup": (composer.SeqLengthWarmup, warmup),
    "TokenCounter": (composer.TokenCounter, lambda: {"total_tokens": 8}),
}

#: Called where Composer is missing, too.
FUNCTIONS = {"apply_alibi", "set_batch_sequence_length"}


def test_every_public_name_is_called():
    assert CALLS.keys() | FUNCTIONS == set(composer.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_junk(name):
    check_all_arguments(*CALLS[name])
