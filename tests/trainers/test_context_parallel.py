"""A model with ContextParallel, or with tensor parallelism, on two ranks trains as on one: each token counts once."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")

from lightning.pytorch.strategies import ModelParallelStrategy

from seqwarm_kernels import apply_alibi
from seqwarm_kernels.parallel import ContextParallel, ShardSlopes
from seqwarm_kernels.trainers import huggingface, lightning
from seqwarm_kernels.trainers.schedule_state import ScheduleState

from ..support.lightning import LossModule, quiet_trainer
from ..support.ranks import join_group, leave_group, run_ranks, set_environment
from .contract.cases import LENGTH, Case, Decoder, collate_padded, items
from .contract.record import combined
from .contract.table import FLATTEN, adapter_of, each_trainer
from .shards import part_of, watch
from .test_contract import assert_close, pairs_of
from .test_huggingface import model, trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # hints of the trainers
NETWORK = "llama-alibi"

#: Two ranks get whole rows, the tokens of a packed row, or one of them: as one stream, a batch has 9, 4, 3 or 2 rows.
CASES = {
    "rows": Case({}, "token", 80, "padded", NETWORK, accumulate=2),
    "switch": Case(FLATTEN, "sample", 32, "padded", NETWORK, saves=True),
    "packed": Case(data="flattened", network=NETWORK),
}


def shard(model, ranks):
    if ranks > 1:
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), ContextParallel())
    return model


def reports(adapter, folder, ranks=1):
    """Of each training, of which the last one resumes: its record, its log, its progress, and what the model gets."""
    resumed = replace(CASES["switch"], saves=False)
    found = []
    for name, case, resume in [(name, case, None) for name, case in CASES.items()] + [("switch", resumed, 8)]:
        model = shard(Decoder(NETWORK, seed=2 if resume else 1), ranks)
        seen = watch(model)
        training = adapter(case, model, folder / name)
        record = training.run(resume)
        found.append((record, pairs_of(training.logged(), record.first), training.progress(), seen))
    return found


def one_of_two(rank, port, trainer, folder):
    adapter = adapter_of(trainer)
    adapter.join_ranks(rank, port, share_rows=True)
    join_group(rank, port)
    torch.save(reports(adapter, folder, ranks=2), folder / f"{rank}.pt")
    leave_group()


@each_trainer(shards_rows=True)
def test_two_ranks_train_as_one(adapter, tmp_path):
    run_ranks(one_of_two, adapter.__module__.rpartition(".")[2], tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    alone = reports(adapter, tmp_path / "alone")
    for of_ranks, (expected, *counts, whole) in zip(zip(*ranks, strict=True), alone, strict=True):
        records = [record for record, *_ in of_ranks]
        assert [[*own] for _, *own, _ in of_ranks] == [counts] * 2
        if adapter.rule.loss != "rows":  # whose losses composer/test_context_parallel.py compares
            losses = zip(*(record.losses for record in records), strict=True)
            found = [combined([(1, part) for part in parts], adapter.rule.loss) for parts in losses]
            assert_close(found, expected.losses)
        for record in records:
            assert_close(record.weights, expected.weights)
            assert {each[:2] for each in record.evaluations} <= {each[:2] for each in expected.evaluations}
        evaluated = [losses_of_evaluations(record) for record in records]
        if len(evaluated[0]) < len(expected.evaluations):  # each rank has a batch, of 21 and of 27 labels in all 48
            shares = torch.tensor([[21], [27]], dtype=torch.float64) / 48
            evaluated = [(torch.tensor(evaluated, dtype=torch.float64) / shares).T.flatten().tolist()]
        for own in evaluated:
            assert_close(own, losses_of_evaluations(expected))
        if whole[0][0] > 1:  # packed rows are padded
            assert [seen for *_, seen in of_ranks] == [[part_of(*shape) for *shape, _ in whole]] * 2
    assert len({length for length, _ in alone[1][1].values()}) > 2


def losses_of_evaluations(record):
    return [loss for *_, loss in record.evaluations]


ATTENTION = "network.model.layers.*.self_attn"
PLAN = {f"{ATTENTION}.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
PLAN |= {f"{ATTENTION}.o_proj": RowwiseParallel(), f"{ATTENTION}.alibi": ShardSlopes()}


def shard_heads(model, ranks):
    if ranks > 1:
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), PLAN)


def shard_both(model, ranks):
    shard_heads(model, ranks)
    shard(model, ranks)


def lightning_report(ranks, shard_model, data=collate_padded, **settings):
    """Losses and counts."""

    class Module(LossModule):
        def configure_model(self):
            shard_model(self.model, ranks)

    module, case = Module(Decoder(NETWORK), torch.optim.SGD, lr=0.5), CASES["rows"]
    warmup = lightning.SequenceLengthWarmup(case.schedule())
    trainer = quiet_trainer(warmup, devices=ranks, use_distributed_sampler=False, **settings)
    trainer.fit(module, DataLoader(items(case), 2, collate_fn=data))
    return [module.losses, warmup.state_dict()]


def others_of_two(rank, port, folder):
    set_environment(rank, port)
    report = lightning_report(2, shard_heads, strategy=ModelParallelStrategy())
    (folder / f"{rank}.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match="ranks"):
        lightning_report(2, shard_both, strategy=ModelParallelStrategy())
    with pytest.raises(TypeError, match="mapping"):
        lightning_report(2, shard, lambda rows: [*collate_padded(rows).values()], strategy="ddp")
    check_loader_of_huggingface(folder)
    check_state(shard(Decoder(NETWORK), 2))
    leave_group()


def check_loader_of_huggingface(folder):
    """The Trainer's own loader has other rows for each rank."""
    apply_alibi(made := model(), LENGTH)
    training = trainer(folder, shard(made, 2), [huggingface.SequenceLengthWarmup(CASES["rows"].schedule())])
    with pytest.raises(RuntimeError, match="batch"):
        training.train()


def check_state(model):
    """Entries that `keys` leaves out stay whole, and labels are shifted if the model's loss does so."""
    whole, batch = torch.ones(3, 5), collate_padded(items(CASES["rows"])[:3])
    for loss_type, shifts in (("ForCausalLM", True), ("ForMaskedLM", False)):
        model.loss_type = loss_type
        state, called = ScheduleState(CASES["rows"].schedule(), keys=[*batch]), nn.Identity()
        state._attach(called, model, torch.device("cpu"))
        part = called({**batch, "encoder_attention_mask": whole})
        assert ("shift_labels" in part) == shifts
        assert part["encoder_attention_mask"] is whole
        assert part["input_ids"].shape == (3, 4)
        state.detach()
    with pytest.raises(ValueError, match="seq_dim"):
        ScheduleState(CASES["rows"].schedule(), seq_dim=0)._attach(model, model, torch.device("cpu"))


def test_ranks_that_share_heads_train_as_one(tmp_path):
    run_ranks(others_of_two, tmp_path)
    expected = lightning_report(1, shard_heads)
    for rank in (0, 1):
        losses, counts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert counts == json.loads(json.dumps(expected[1]))
        assert_close(losses, expected[0])
