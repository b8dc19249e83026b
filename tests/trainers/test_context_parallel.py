"""A model with ContextParallel, or with tensor parallelism, on two ranks trains as on one: each token counts once."""

import json

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")

import transformers
from lightning.pytorch.strategies import ModelParallelStrategy

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi, load_alibi_model
from seqwarm_kernels.parallel import ContextParallel, ShardSlopes
from seqwarm_kernels.trainers import huggingface
from seqwarm_kernels.trainers import lightning as of_lightning
from seqwarm_kernels.trainers.schedule_state import ScheduleState

from ..support.huggingface import logged
from ..support.lightning import LossModule, quiet_trainer
from ..support.ranks import leave_group, run_ranks, set_environment
from . import test_packed
from .shards import part_of, watch
from .test_huggingface import model, trainer

LENGTH, ROWS = 16, 12

KEYS = ("input_ids", "attention_mask", "labels")

#: Rows of a batch, batches of a step, options of resize_batch. Two ranks get whole rows, tokens, or first one, then
#: the other: rows of 4 and 8 tokens are even in number.
CASES = {"rows": (2, 1, {}), "tokens": (3, 1, {"keys": KEYS}), "switch": (1, 2, {"mode": "reshape"})}


def rows_of(case):
    """With an entry that a model without cross-attention ignores, and that is to be kept whole."""
    whole = {"encoder_attention_mask": torch.ones(5)} if case == "tokens" else {}
    return [{**row, **whole} for row in rows()]


def rows():
    """Rows with different numbers of tokens, most of them on rank 0."""
    torch.manual_seed(2)
    mask = (torch.arange(LENGTH) < (torch.arange(ROWS)[:, None] * 5) % LENGTH + 3).long()
    ids = torch.randint(50, (ROWS, LENGTH))
    labels = ids.masked_fill(mask == 0, -100)
    return [{"input_ids": i, "attention_mask": m, "labels": k} for i, m, k in zip(ids, mask, labels, strict=True)]


def schedule(unit):
    return SequenceLengthScheduler(4, LENGTH, duration={"token": 60, "sample": 9}[unit], step_size=4, unit=unit)


def converted(loss_type="ForCausalLM"):
    made = model()
    made.loss_type = loss_type
    apply_alibi(made, LENGTH)
    return made


def shard(made, ranks):
    if ranks > 1:
        parallelize_module(made, init_device_mesh("cpu", (ranks,)), ContextParallel())


def huggingface_report(folder, ranks, case, resume=False, **kind):
    size, accumulate, options = CASES[case]
    made, warmup = converted(**kind), huggingface.SequenceLengthWarmup(schedule("token"), **options)
    settings = {"eval_strategy": "epoch", "ddp_backend": "gloo" if ranks > 1 else None}
    settings |= {"gradient_accumulation_steps": accumulate, "save_strategy": "steps", "save_steps": 2}
    training = trainer(folder, made, [], rows(), **settings)
    training.get_train_dataloader = lambda: DataLoader(rows_of(case), batch_size=size)
    warmup.add_to(training)
    shard(made, ranks)
    seen = watch(made)
    training.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    evaluated = [record["eval_loss"] for record in training.state.log_history if "eval_loss" in record]
    counts = [logged(training, "seq_length"), logged(training, "train_tokens"), warmup.state_dict()]
    return [[*logged(training), *evaluated], counts, seen]


class Module(LossModule):
    """Shards its model on several ranks. Notes the losses of evaluations, too."""

    def __init__(self, ranks, inner=None, shard=shard):
        super().__init__(inner or converted(), torch.optim.SGD, lr=0.5)
        self.ranks, self.shard = ranks, shard
        self.seen = watch(self.model) if inner is None else []  # of ContextParallel

    def configure_model(self):
        self.shard(self.model, self.ranks)

    def validation_step(self, batch, batch_idx):
        self.losses.append(self.model(**batch).loss.item())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.losses.append(self.model(**batch).logits.abs().mean().item())


def lightning_report(ranks, unit="token", module=None, case="rows", data=rows, **settings):
    size, accumulate, options = CASES[case]
    module, warmup = module or Module(ranks), of_lightning.SequenceLengthWarmup(schedule(unit), **options)
    settings |= {"use_distributed_sampler": False, "accumulate_grad_batches": accumulate}
    training = quiet_trainer(warmup, **settings)
    evaluated = DataLoader(rows()[:4], batch_size=2)
    training.fit(module, DataLoader(data(), batch_size=size), evaluated)
    if case == "tokens":
        training.test(module, evaluated, verbose=False)
        training.predict(module, evaluated)
    return [module.losses, warmup.state_dict(), module.seen]


ATTENTION = "model.layers.*.self_attn"
PLAN = {f"{ATTENTION}.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
PLAN |= {f"{ATTENTION}.o_proj": RowwiseParallel(), f"{ATTENTION}.alibi": ShardSlopes()}


def shard_heads(made, ranks):
    if ranks > 1:
        parallelize_module(made, init_device_mesh("cpu", (ranks,)), PLAN)


def shard_both(made, ranks):
    shard_heads(made, ranks)
    shard(made, ranks)


def lightning_of_heads(ranks, **settings):
    return lightning_report(ranks, module=Module(ranks, test_packed.model(), shard_heads), **settings)


def check_huggingface_of_heads(folder):
    """Accelerate has no tensor parallelism on CPUs, so the Trainer's calls are made by hand."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=2)
    made = load_alibi_model(transformers.LlamaForCausalLM, folder / "llama", distributed_config=config).train()
    warmup = huggingface.SequenceLengthWarmup(schedule("token"))
    given = [transformers.TrainingArguments(folder, use_cpu=True), transformers.TrainerState(), None]
    warmup.on_train_begin(*given, model=made, lr_scheduler=None)
    warmup._batches({"input_ids": torch.ones(3, LENGTH, dtype=torch.long)})
    warmup.on_step_begin(*given)
    assert warmup.count_tokens() == 3 * 4
    warmup.detach()


def one_of_two(rank, port, folder):
    set_environment(rank, port)
    reports = [huggingface_report(folder / case, 2, case) for case in CASES]
    reports.append(huggingface_report(folder / "switch", 2, "switch", resume=True))
    reports.append(huggingface_report(folder, 2, "tokens", loss_type="ForMaskedLM"))  # which does not shift labels
    shard(made := converted(), 2)
    with pytest.raises(ValueError, match="seq_dim"):
        ScheduleState(schedule("token"), seq_dim=0)._attach(made, made, torch.device("cpu"))
    training = trainer(folder, made, [])
    huggingface.SequenceLengthWarmup(schedule("token")).add_to(training)
    with pytest.raises(RuntimeError, match="batch"):
        training.train()  # with the Trainer's own loader
    reports += [lightning_report(2, case=case, devices=2, strategy="ddp") for case in CASES]
    reports.append(lightning_report(2, "sample", devices=2, strategy="ddp"))
    reports.append(lightning_of_heads(2, devices=2, strategy=ModelParallelStrategy()))
    with pytest.raises(TypeError, match="mapping"):
        lightning_report(2, data=lambda: [tuple(row.values()) for row in rows()], devices=2, strategy="ddp")
    module = Module(2, test_packed.model(), shard_both)
    with pytest.raises(ValueError, match="ranks"):
        lightning_report(2, module=module, devices=2, strategy=ModelParallelStrategy())
    check_huggingface_of_heads(folder)
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    leave_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's hints on workers, loggers and intervals
def test_two_ranks_train_as_one(tmp_path):
    test_packed.model().save_pretrained(tmp_path / "llama")
    run_ranks(one_of_two, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    alone = [huggingface_report(tmp_path / f"{case} alone", 1, case) for case in CASES]
    alone.append(huggingface_report(tmp_path / "switch alone", 1, "switch", resume=True))
    alone.append(huggingface_report(tmp_path, 1, "tokens", loss_type="ForMaskedLM"))
    alone += [lightning_report(1, case=case) for case in CASES]
    alone += [lightning_report(1, "sample"), lightning_of_heads(1)]
    for own, other, (losses, counts, whole) in zip(first, second, alone, strict=True):
        assert own[1] == other[1] == json.loads(json.dumps(counts))
        mean = torch.tensor([own[0], other[0]]).mean(0)
        torch.testing.assert_close(mean, torch.tensor(losses), rtol=2e-5, atol=1e-5)
        assert own[2] == other[2] == [part_of(*shape) for *shape, _ in whole]
    lengths = alone[2][1][0]
    assert lengths == [4, 4, 12, 12, 16, 16]  # resumed after the second step
    resumed = alone[3]
    assert resumed[1][0] == lengths
    torch.testing.assert_close(resumed[0], alone[2][0])
