"""Alibi in Composer's own trainer, by itself and with SeqLengthWarmup."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from composer.core import Event

from seqwarm_kernels.models import AlibiHeads
from seqwarm_kernels.trainers.composer import Alibi, SeqLengthWarmup

from .training import BATCH_SIZE, LENGTH, Run, batches, tiny_gpt2

PACKED = {"input_ids": torch.arange(8)[None], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])}


def is_alibi(model):
    return any(isinstance(module, AlibiHeads) for module in model.modules())


def cut(algorithm, batch):
    state = SimpleNamespace(batch=batch)
    algorithm.apply(Event.AFTER_DATALOADER, state, None)
    return state.batch


def test_training_on_short_rows_evaluates_on_longer_ones():
    run = Run("2ba", Alibi(2 * LENGTH), eval_dataloader=batches(1, length=2 * LENGTH), eval_interval="1ba").fit()
    assert is_alibi(run.model)
    assert run.seen.shapes == [(4 * BATCH_SIZE, LENGTH // 4)] * 2
    assert run.seen.eval_shapes == [(BATCH_SIZE, 2 * LENGTH)] * 2


def test_the_optimizer_drops_the_position_embeddings():
    run = Run("1ba", Alibi(LENGTH))
    held = [parameter for group in run.trainer.state.optimizers[0].param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in run.model.parameters()}


@pytest.mark.parametrize(("scaling", "parts"), [(1, 1), (0.25, 4), (0.333, 3)])
def test_rows_are_cut_as_composer_reshapes_them(scaling, parts):
    rows, length = 2, 84
    batch = {"input_ids": torch.arange(rows * length).view(rows, length), "labels": torch.randn(rows, length)}
    new = cut(Alibi(128, scaling), batch)
    for name, tensor in batch.items():
        torch.testing.assert_close(new[name], tensor.reshape(rows * parts, length // parts), rtol=0, atol=0)


def test_batches_that_cannot_be_cut():
    for batch in (PACKED, {"input_ids": torch.ones(2, 30)}, {"scores": torch.ones(2)}):
        with pytest.raises(ValueError, match="train_sequence_length_scaling"):
            cut(Alibi(32), batch)
    with pytest.raises(TypeError, match="batch"):
        cut(Alibi(32), torch.ones(2, 32))


@pytest.mark.parametrize("alibi_is_first", [True, False])
@pytest.mark.parametrize("truncate", [True, False])
def test_with_warmup_alibi_cuts_first_in_either_order(alibi_is_first, truncate):
    """10 batches, with rows of 16 tokens after Alibi, and a ramp to 16 over 4 of them: 4 + 4 · ⌊3n / 4⌋."""
    alibi, warmup = Alibi(LENGTH, 0.5), SeqLengthWarmup(0.4, 4, 16, 4, truncate)
    algorithms = [alibi, warmup] if alibi_is_first else [warmup, alibi]
    run = Run("10ba", *algorithms, eval_dataloader=batches(1)).fit()
    lengths = [4, 4, 8, 12] + [16] * 6
    rows = 2 * BATCH_SIZE
    assert run.seen.shapes == [(rows if truncate else rows * 16 // length, length) for length in lengths]
    assert run.metric("seq_length_warmup/curr_seq_len") == lengths
    assert run.seen.eval_shapes == [(BATCH_SIZE, LENGTH)]
    assert run.trainer.state.algorithms == [warmup, alibi]


def test_the_order_of_other_algorithms_stays():
    others = [SeqLengthWarmup(), SeqLengthWarmup()]
    alibi, warmup = Alibi(LENGTH), SeqLengthWarmup()
    state = SimpleNamespace(algorithms=[others[0], alibi, others[1], warmup])
    warmup.apply(Event.INIT, state, None)
    assert state.algorithms == [others[0], warmup, alibi, others[1]]
    warmup.apply(Event.INIT, state, None)
    assert state.algorithms == [others[0], warmup, alibi, others[1]]
    state.algorithms = []  # the caller runs the algorithm, not the trainer
    warmup.apply(Event.INIT, state, None)
    assert state.algorithms == []


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_checkpoint_brings_its_alibi(is_listed, tmp_path, recwarn):
    """If the trainer that loads the checkpoint has no Alibi, Composer adds the Alibi of this package."""
    whole = Run("10ba", Alibi(LENGTH), save_folder=str(tmp_path), save_interval="4ba").fit()
    model, algorithms = tiny_gpt2(seed=1), [Alibi(LENGTH)] if is_listed else []
    resumed = Run("10ba", *algorithms, model=model, load_path=str(tmp_path / "ep0-ba4-rank0.pt")).fit()
    assert sum("required_on_load" in str(warning.message) for warning in recwarn) == (not is_listed)
    assert [type(algorithm) for algorithm in resumed.trainer.state.algorithms] == [Alibi]
    assert resumed.seen.shapes == whole.seen.shapes[4:]
    assert resumed.seen.losses == whole.seen.losses[4:]


def test_one_algorithm_serves_several_trainers():
    alibi, model = Alibi(LENGTH), tiny_gpt2()
    Run("1ba", alibi, model=model).fit()
    Run("1ba", alibi, model=model).fit()  # already converted
    other = Run("1ba", alibi).fit()
    assert is_alibi(other.model)


@pytest.mark.parametrize("scaling", [0, 1.5, 0.75])
def test_a_scaling_that_is_no_share_of_rows(scaling):
    with pytest.raises(ValueError, match="train_sequence_length_scaling"):
        Alibi(8, scaling)
