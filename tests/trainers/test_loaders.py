"""The recipes of docs/guides/batches_in_trainers.md on two ranks, and trainers that would shard a sampler again."""

import json
import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

import lightning.pytorch as pl
import transformers
from accelerate.data_loader import prepare_data_loader
from lightning.pytorch.utilities import CombinedLoader

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import (
    BatchPlanner,
    ItemDataset,
    LengthBatchSampler,
    LengthBatchStream,
    ResumableLoader,
    SequenceSource,
    write_chunks,
)
from seqwarm_kernels.trainers import huggingface
from seqwarm_kernels.trainers import lightning as of_lightning

from ..docs import markdown
from ..docs.test_code_blocks import ON_TWO_RANKS
from ..support.huggingface import quiet_trainer
from ..support.lightning import LossModule
from ..support.lightning import quiet_trainer as lightning_trainer
from ..support.ranks import join_group, leave_group, run_ranks, set_environment
from ..support.tiers import first_fast

#: 1,000 items, six batches padded or packed. The tokens of item i are i + 1. Padding is 0.
LENGTHS = [35 + 37 * i % 101 for i in range(1000)]


class CountingModel(nn.Module):
    """Counts the tokens of each item."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.counts = torch.zeros(len(LENGTHS) + 1, dtype=torch.int64)

    def forward(self, input_ids, **others):
        self.counts += torch.bincount(input_ids.flatten(), minlength=len(self.counts))
        return {"loss": self.weight * input_ids.float().mean()}


def write_texts(folder):
    texts = (f"{i + 1} " * length for i, length in enumerate(LENGTHS))
    write_chunks(texts, folder / "chunks", length_fn=lambda text: len(text.split()))


def data_names():
    """What the functions that make loaders take for granted, beside the folder of `write_texts`."""
    return {
        "dataset": [{"input_ids": [i + 1] * length} for i, length in enumerate(LENGTHS)],
        "tokenizer": lambda text: SimpleNamespace(input_ids=list(map(int, text.split()))),
    }


def trainer_names(model):
    """What the trainings take for granted."""
    settings = {"max_steps": 3, "use_cpu": True, "ddp_backend": "gloo", "save_strategy": "no", "report_to": []}
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6),
        "arguments": transformers.TrainingArguments("out", disable_tqdm=True, **settings),
        "module": LossModule(model, torch.optim.SGD, lr=1e-6),
        "other_arguments": {"accelerator": "cpu", "devices": 2, "strategy": "ddp", **dict.fromkeys(off, False)},
    }


def blocks():
    """The page's code: functions that make loaders, and trainings."""
    code = [block.code for block in markdown.python_blocks((markdown.ROOT / ON_TWO_RANKS).read_text())]
    makers = [block for block in code if "def make_loader" in block]
    return makers, [block for block in code if block not in makers]


def one_of_two(rank, port, folder):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    set_environment(rank, port)
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # the functions of a page are in no module
    early = sampler(None)
    join_group(rank, port)
    with pytest.raises(ValueError, match="LengthBatchSampler"):
        next(iter(early))
    counts = []
    makers, trainings = blocks()
    for maker in makers:
        for training in trainings:
            model = CountingModel()
            namespace = {**data_names(), **trainer_names(model)}
            exec(maker, namespace)
            exec(training, namespace)
            counts.append(model.counts.tolist())
    (folder / f"{rank}.json").write_text(json.dumps(counts))
    leave_group()


@pytest.mark.slow
def test_two_ranks_train_on_every_item_once(tmp_path):
    write_texts(tmp_path)
    run_ranks(one_of_two, tmp_path)
    by_rank = torch.tensor([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)])
    assert by_rank.shape[1] == 3 * 3
    for counts in by_rank.unbind(1):
        assert counts[:, 1:].any(dim=1).all()
        assert counts.sum(0)[1:].tolist() == LENGTHS


def sampler(world_size, infinite=False):
    ranks = {} if world_size is None else {"rank": 0, "world_size": world_size}
    return LengthBatchSampler(LENGTHS, BatchPlanner(8192), infinite=infinite, **ranks)


def stream(world_size, infinite=False):
    source = SequenceSource(range(1000), infinite=infinite)
    return LengthBatchStream(
        source, BatchPlanner(8192), length=LENGTHS.__getitem__, window=1000, rank=0, world_size=world_size
    )


class TestShardedAgain:
    @pytest.mark.parametrize("make", [sampler, stream])
    @pytest.mark.parametrize(
        "options", [{"even_batches": False}, {"even_batches": True}, {"dispatch_batches": True, "put_on_device": True}]
    )
    def test_accelerate(self, make, options):
        loader = DataLoader(ItemDataset(), batch_sampler=make(2))
        with pytest.raises(ValueError, match="sharded"):
            prepare_data_loader(loader, num_processes=2, process_index=0, **options)

    def test_lightning(self):
        from lightning.pytorch.utilities.data import _update_dataloader

        loader = DataLoader(ItemDataset(), batch_sampler=sampler(2))
        with pytest.raises(ValueError, match="sharded"):
            _update_dataloader(loader, loader.sampler)

    def test_one_rank_is_not_sharded(self):
        loader = DataLoader(ItemDataset(), batch_sampler=sampler(1), collate_fn=list)
        assert sorted(item for batch in prepare_data_loader(loader) for item in batch) == list(range(1000))
        assert not hasattr(sampler(1), "batch_size")
        assert not hasattr(sampler(1), "sampler")


def collate(items):
    return {"input_ids": torch.tensor(items)[None]}


class TestTrainer:
    """Hugging Face's. An epoch has 12 batches."""

    @staticmethod
    def train(folder, make, infinite=False, resume=None, num_workers=0, **options):
        """Trains on 14 batches, or on one epoch of a loader with a length. Returns the items of each."""
        plain = DataLoader(ItemDataset(), batch_sampler=make(1, infinite), collate_fn=collate, num_workers=num_workers)

        class Model(CountingModel):
            def forward(self, input_ids):
                batches.append(input_ids[0].tolist())
                return super().forward(input_ids)

        batches, steps = [], 12 if make is sampler and not infinite else 14
        settings = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, **options}
        trainer = quiet_trainer(folder, Model(), huggingface.LoaderState(ResumableLoader(plain)), **settings)
        trainer.train(resume_from_checkpoint=resume)
        return batches

    @pytest.mark.parametrize(
        ("make", "infinite"), first_fast([(sampler, False), (sampler, True), (stream, False), (stream, True)])
    )
    def test_a_resumed_training_continues_with_the_next_batch(self, tmp_path, make, infinite):
        whole = self.train(tmp_path, make, infinite)
        # In the first epoch, after it, and in the second. After an epoch of a loader that ends, the Trainer stops.
        for step in (4, 11, 12, 13) if infinite else (4, 11) if make is sampler else (4, 13):
            resumed = self.train(tmp_path / "again", make, infinite, str(tmp_path / f"checkpoint-{step}"))
            assert resumed == whole[step:]

    @pytest.mark.parametrize("num_workers", first_fast([0, 1]))
    def test_dropout_continues(self, tmp_path, monkeypatch, num_workers):
        """A loader draws a seed of its workers at the start of a pass, and none where a pass goes on."""

        def forward(model, input_ids):
            drawn.append(torch.rand(()).item())
            return original(model, input_ids)

        original, drawn = CountingModel.forward, []
        monkeypatch.setattr(CountingModel, "forward", forward)
        self.train(tmp_path, sampler, infinite=True, num_workers=num_workers)
        whole, checkpoint = list(drawn), str(tmp_path / "checkpoint-4")
        drawn.clear()
        torch.manual_seed(7)
        self.train(tmp_path / "again", sampler, infinite=True, resume=checkpoint, num_workers=num_workers)
        assert drawn == whole[4:]

    @pytest.mark.parametrize(
        "options",
        [
            {"max_steps": 13},
            {"max_steps": -1, "num_train_epochs": 2},
            {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 5},
        ],
        ids=str,
    )
    def test_one_epoch_of_a_loader_with_a_length(self, tmp_path, options):
        with pytest.raises(ValueError, match="infinite"):
            self.train(tmp_path, sampler, **options)

    def test_whole_steps_of_several_batches(self, tmp_path):
        options = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 4}
        whole = self.train(tmp_path, sampler, **options)
        assert len(whole) == 12
        resumed = self.train(tmp_path / "again", sampler, resume=str(tmp_path / "checkpoint-2"), **options)
        assert resumed == whole[8:]
        assert self.train(tmp_path, sampler, max_steps=2, gradient_accumulation_steps=5) == whole[:10]

    def test_a_checkpoint_without_it(self):
        callback = huggingface.LoaderState(ResumableLoader(DataLoader(ItemDataset(), batch_sampler=sampler(1))))
        arguments = SimpleNamespace(gradient_accumulation_steps=1)
        state = SimpleNamespace(global_step=1, max_steps=12, stateful_callbacks={})
        with pytest.raises(ValueError, match="LoaderState"):
            callback.on_train_begin(arguments, state, None)
        with pytest.raises(ValueError, match="callbacks"):
            callback.on_init_end(arguments, state, None)
        with pytest.raises(TypeError, match="loader"):
            huggingface.LoaderState(DataLoader([1]))


#: Lightning trainings: a loader, whether it is infinite, and options.
LIGHTNING = {
    "a stream of epochs": (stream, False, {"max_epochs": 2}),
    "a sampler": (sampler, False, {"max_epochs": 2}),
    "an infinite sampler": (sampler, True, {"max_steps": 14}),
    "an infinite stream": (stream, True, {"max_steps": 14, "accumulate_grad_batches": 2}),
    "a part of a sampler": (sampler, False, {"max_epochs": 3, "limit_train_batches": 0.5}),
    "parts of an infinite sampler": (sampler, True, {"max_epochs": 3, "limit_train_batches": 5}),
    "parts of an infinite stream": (stream, True, {"max_epochs": 3, "limit_train_batches": 5}),
    "parts of a stream": (stream, False, {"max_epochs": 3, "limit_train_batches": 5}),
    "validation in between": (sampler, False, {"max_epochs": 2, "val_check_interval": 5}),
    "workers": (stream, True, {"max_steps": 6, "num_workers": 2}),
    "steps of the schedule are asked for": (sampler, False, {"max_epochs": 2, "asks": True}),
    "and of a stream": (stream, False, {"max_epochs": 2, "asks": True}),
    "two loaders in a cycle": (stream, True, {"max_steps": 15, "combined": "max_size_cycle"}),
    "two loaders, the shorter one ends": (stream, True, {"max_epochs": 2, "combined": "min_size"}),
}


class TestLightning:
    """An epoch has 12 batches."""

    @staticmethod
    def train(folder, make, infinite=False, resume=None, asks=False, combined=None, num_workers=0, **options):
        """Returns the items of each batch, and the numbers of batches after which a checkpoint was saved."""

        class Module(LossModule):
            def training_step(self, batch, batch_idx):
                parts = batch if combined else [batch]
                batches.append([part["input_ids"][0].tolist() for part in parts])
                return super().training_step(parts[0], batch_idx)

            def validation_step(self, batch):
                pass

            def configure_optimizers(self):
                if asks:
                    _ = self.trainer.estimated_stepping_batches
                return super().configure_optimizers()

        class Save(pl.callbacks.Checkpoint):  # Lightning calls these after other callbacks
            def save(self, trainer, module, *_):
                trainer.save_checkpoint(folder / f"{len(saved):02}.ckpt")
                saved.append(len(batches))

            on_train_batch_end = on_validation_end = on_train_epoch_end = on_train_end = on_exception = save

        def loader(make, infinite):
            sampled = {"batch_sampler": make(1, infinite), "collate_fn": collate, "num_workers": num_workers}
            return ResumableLoader(DataLoader(ItemDataset(), **sampled))

        batches, saved = [], []
        loaders = loader(make, infinite)
        if combined:
            loaders = CombinedLoader([loaders, loader(sampler, False)], combined)
        settings = {"max_epochs": None, "enable_checkpointing": True, "num_sanity_val_steps": 0, **options}
        trainer = lightning_trainer(of_lightning.LoaderState(), Save(), **settings)
        module = Module(CountingModel(), torch.optim.SGD, lr=1e-6)
        validation = DataLoader([1]) if "val_check_interval" in options else None
        trainer.fit(module, loaders, validation, ckpt_path=resume, weights_only=False)
        return batches, saved

    @pytest.mark.parametrize("case", first_fast(LIGHTNING))
    def test_a_resumed_training_trains_on_the_same_batches(self, tmp_path, case):
        """From each checkpoint: after a batch, the last one of an epoch, a validation, an epoch, and the end."""
        make, infinite, options = LIGHTNING[case]
        whole, saved = self.train(tmp_path, make, infinite, **options)
        assert len({str(batch) for batch in whole[:12]}) == len(whole[:12])
        again = tmp_path / "again"
        again.mkdir()
        for number, batches in enumerate(saved):
            if case == "workers" and number % 3:
                continue
            resumed, _ = self.train(again, make, infinite, str(tmp_path / f"{number:02}.ckpt"), **options)
            assert resumed == whole[batches:], (number, batches)

    def test_a_training_that_was_ended_by_its_steps_goes_on(self, tmp_path):
        whole, _ = self.train(tmp_path, stream, True, max_steps=11)
        _, saved = self.train(tmp_path, stream, True, max_steps=6)
        last = str(tmp_path / f"{len(saved) - 1:02}.ckpt")
        assert self.train(tmp_path, stream, True, last, max_steps=11)[0] == whole[6:]

    def test_an_exception_in_a_batch(self, tmp_path, monkeypatch):
        """The checkpoint counts the batches whose step was made."""

        def fails_at(count):
            def forward(model, **inputs):
                calls.append(1)
                if len(calls) == count:
                    raise ArithmeticError
                return original(model, **inputs)

            return forward

        whole, _ = self.train(tmp_path, stream, True, max_steps=9)
        original, calls = CountingModel.forward, []
        monkeypatch.setattr(CountingModel, "forward", fails_at(7))
        with pytest.raises(ArithmeticError):
            self.train(tmp_path, stream, True, max_steps=9)
        assert self.train(tmp_path, stream, True, str(tmp_path / "06.ckpt"), max_steps=9)[0] == whole[6:]

    @pytest.mark.parametrize("has_loader_state", [False, True])
    def test_a_warmup_without_it_warns(self, tmp_path, recwarn, has_loader_state):
        warmup = of_lightning.SequenceLengthWarmup(SequenceLengthScheduler(8, 16, duration=0))
        callbacks = [warmup, *([of_lightning.LoaderState()] if has_loader_state else [])]
        loader = ResumableLoader(DataLoader(ItemDataset(), batch_sampler=sampler(1), collate_fn=collate))
        settings = {"limit_train_batches": 1, "enable_checkpointing": True, "default_root_dir": tmp_path}
        trainer = lightning_trainer(*callbacks, **settings)
        trainer.fit(LossModule(CountingModel(), torch.optim.SGD, lr=1e-6), loader)
        warned = any("callbacks have no LoaderState()" in str(warning.message) for warning in recwarn)
        assert warned != has_loader_state

    def test_a_checkpoint_without_it(self, tmp_path):
        self.train(tmp_path, sampler, max_steps=1)
        path = tmp_path / "00.ckpt"
        checkpoint = torch.load(path, weights_only=False)
        del checkpoint["callbacks"][of_lightning.LoaderState().state_key]
        torch.save(checkpoint, path)
        with pytest.raises(ValueError, match="LoaderState"):
            self.train(tmp_path, sampler, resume=str(path), max_steps=2)


def test_accelerate_saves_and_loads_a_loader(tmp_path):
    from accelerate import Accelerator

    def make():
        loader = ResumableLoader(DataLoader(ItemDataset(), batch_sampler=stream(1), collate_fn=list))
        accelerator = Accelerator(cpu=True)
        accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    accelerator, loader = make()
    batches = iter(loader)
    head = [next(batches) for _ in range(5)]
    accelerator.save_state(str(tmp_path))
    accelerator, loader = make()
    accelerator.load_state(str(tmp_path))
    assert head + list(loader) == list(stream(1))
