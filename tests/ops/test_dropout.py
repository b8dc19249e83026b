import pytest
import torch

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.ops.alibi_attention.dropout import keep_mask, philox
from tests.support.backends import serving

#: Known answers of Philox-4x32-10, from the Random123 distribution: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_against_known_answers(counter, key, output):
    seed = key[1] << 32 | key[0]
    seed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    assert tuple(int(word) for word in philox(seed, *map(torch.tensor, counter))) == output


def test_four_neighboring_keys_share_a_counter():
    seed = torch.tensor(12345)
    head, query = torch.tensor(3), torch.tensor(5)
    words = philox(seed, torch.arange(10), query, head, torch.tensor(0))
    kept = keep_mask(0.5, seed, head, query, torch.arange(40))
    assert torch.equal(kept, torch.stack(words, 1).flatten() >= 2**31)


@pytest.mark.parametrize("length", [4, 100])
@pytest.mark.parametrize("backend", serving())
def test_a_number_equal_to_the_threshold_keeps_its_weight(backend, length):
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, ())  # as the call draws it
    drawn = int(philox(seed, *map(torch.tensor, (0, 0, 0, 0)))[0])
    torch.manual_seed(3)
    ones = torch.ones(1, 1, length, 16)
    out = alibi_attention(ones, ones, ones, dropout_p=drawn / 2**32, backend=backend)
    assert out[0, 0, 0, 0] > 0
