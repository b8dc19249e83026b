"""The recipes of docs/guides/batches_in_trainers.md on two ranks, and trainers that would shard a sampler again."""

import json
import multiprocessing
import os
from collections import Counter
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


class NotingModel(nn.Module):
    """Notes the tokens of each batch, and a random number that it draws there, as dropout does."""

    def __init__(self):
        super().__init__()
        self.weight, self.batches, self.drawn = nn.Parameter(torch.ones(())), [], []

    def forward(self, input_ids, **others):
        self.batches.append(input_ids.flatten().tolist())
        self.drawn.append(torch.rand(()).item())
        return {"loss": self.weight * input_ids.float().mean()}


def data_names():
    """What the functions that make loaders take for granted, beside a folder of texts."""
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


def blocks(page=ON_TWO_RANKS):
    """The page's code: functions that make loaders, and trainings."""
    code = [block.code for block in markdown.python_blocks((markdown.ROOT / page).read_text())]
    makers = [block for block in code if "def make_loader" in block]
    return makers, [block for block in code if "make_loader()" in block and block not in makers]


def count_items(rank, port, folder, trainings, names_of):
    """Each training on each of the page's loaders counts the tokens of items. `names_of(model)` are its names."""
    set_environment(rank, port)
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # the functions of a page are in no module
    counts = []
    for maker in blocks()[0]:
        for training in trainings:
            model = NotingModel()
            namespace = {**data_names(), **names_of(model)}
            exec(maker, namespace)
            exec(training, namespace)
            counted = Counter(token for batch in model.batches for token in batch)
            counts.append([counted[item + 1] for item in range(len(LENGTHS))])
    (folder / f"{rank}.json").write_text(json.dumps(counts))
    leave_group()


def one_of_two(rank, port, folder):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    early = sampler(None)
    join_group(rank, port)
    with pytest.raises(ValueError, match="LengthBatchSampler"):
        next(iter(early))
    count_items(rank, port, folder, blocks()[1], trainer_names)


def assert_every_item_is_trained_on_once(one_of_two, folder, trainings):
    texts = (f"{i + 1} " * length for i, length in enumerate(LENGTHS))
    write_chunks(texts, folder / "chunks", length_fn=lambda text: len(text.split()))
    run_ranks(one_of_two, folder)
    by_rank = torch.tensor([json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)])
    assert by_rank.shape[1] == 3 * trainings
    for counts in by_rank.unbind(1):
        assert counts.any(dim=1).all()
        assert counts.sum(0).tolist() == LENGTHS


@pytest.mark.slow
def test_two_ranks_train_on_every_item_once(tmp_path):
    assert_every_item_is_trained_on_once(one_of_two, tmp_path, trainings=3)


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
    @pytest.mark.parametrize("options", [{"even_batches": False}, {"dispatch_batches": True, "put_on_device": True}])
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


def of_hugging_face(folder, make, infinite=False, resume=None, num_workers=0, **options):
    """(items, random number) of each batch, and (batches before it, path) of the checkpoint after each step."""
    plain = DataLoader(ItemDataset(), batch_sampler=make(1, infinite), collate_fn=collate, num_workers=num_workers)
    model, steps = NotingModel(), 12 if make is sampler and not infinite else 14
    settings = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, **options}
    trainer = quiet_trainer(folder, model, huggingface.LoaderState(ResumableLoader(plain)), **settings)
    trainer.train(resume_from_checkpoint=resume)
    in_step = trainer.args.gradient_accumulation_steps
    saved = [(step * in_step, str(folder / f"checkpoint-{step}")) for step in range(1, trainer.state.global_step + 1)]
    return list(zip(model.batches, model.drawn, strict=True)), saved


def of_lightning_trainer(
    folder, make, infinite=False, resume=None, asks=False, combined=None, num_workers=0, **options
):
    """The items of each batch, and (batches before it, path) of each checkpoint: after a batch, the last one of an
    epoch, a validation, an epoch, and the end."""

    class Module(LossModule):
        def training_step(self, batch, batch_idx):
            parts = batch if combined else [batch]
            batches.append([part["input_ids"][0].tolist() for part in parts])
            return super().training_step(parts[0], batch_idx)

        def configure_optimizers(self):
            if asks:
                _ = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    class Save(pl.callbacks.Checkpoint):  # Lightning calls these after other callbacks
        def save(self, trainer, module, *_):
            saved.append((len(batches), str(folder / f"{len(saved):02}.ckpt")))
            trainer.save_checkpoint(saved[-1][1])

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
    module = Module(NotingModel(), torch.optim.SGD, lr=1e-6)
    validation = DataLoader([{"input_ids": torch.zeros(1)}]) if "val_check_interval" in options else None
    trainer.fit(module, loaders, validation, ckpt_path=resume, weights_only=False)
    return batches, saved


IN_STEPS_OF_FOUR = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 4}

#: A loader, whether it is infinite, and options. An epoch has 12 batches.
HUGGING_FACE = {
    "a sampler": (sampler, False, {}),
    "an infinite stream": (stream, True, {}),
    "steps of several batches": (sampler, False, IN_STEPS_OF_FOUR),
    "workers": (sampler, True, {"max_steps": 6, "num_workers": 1}),
}
LIGHTNING = {
    "a stream of epochs": (stream, False, {"max_epochs": 2}),
    "an infinite stream": (stream, True, {"max_steps": 14, "accumulate_grad_batches": 2}),
    "a part of a sampler": (sampler, False, {"max_epochs": 3, "limit_train_batches": 0.5}),
    "parts of a stream": (stream, False, {"max_epochs": 3, "limit_train_batches": 5}),
    "validation in between": (sampler, False, {"max_epochs": 2, "val_check_interval": 5}),
    "workers": (stream, True, {"max_steps": 6, "num_workers": 2}),
    "steps of the schedule are asked for": (sampler, False, {"max_epochs": 2, "asks": True}),
    "two loaders in a cycle": (stream, True, {"max_steps": 15, "combined": "max_size_cycle"}),
}
RESUMED_AT = {5, 12, 13, 24}  #: batches


def cases_of(train, cases):
    return first_fast([pytest.param(train, *case, id=f"{train.__name__}, {name}") for name, case in cases.items()])


@pytest.mark.parametrize(
    ("train", "make", "infinite", "options"),
    [*cases_of(of_hugging_face, HUGGING_FACE), *cases_of(of_lightning_trainer, LIGHTNING)],
)
def test_a_resumed_training_trains_on_the_same_batches(tmp_path, train, make, infinite, options):
    """Hugging Face's with the same dropout: a loader draws a seed where a pass begins, and none where it goes on."""
    whole, saved = train(tmp_path, make, infinite, **options)
    assert len({str(batch) for batch in whole[:12]}) == len(whole[:12])
    again = tmp_path / "again"
    again.mkdir()
    for batches, checkpoint in saved:
        if batches in RESUMED_AT:
            assert train(again, make, infinite, checkpoint, **options)[0] == whole[batches:], (batches, checkpoint)


@pytest.mark.parametrize("train", first_fast([of_hugging_face, of_lightning_trainer]))
def test_a_training_that_was_ended_by_its_steps_goes_on(tmp_path, train):
    whole, _ = train(tmp_path, stream, True, max_steps=4)
    _, saved = train(tmp_path, stream, True, max_steps=2)
    assert train(tmp_path, stream, True, saved[-1][1], max_steps=4)[0] == whole[2:]


class TestHuggingFace:
    @pytest.mark.parametrize("options", [{"max_steps": 13}, {"max_steps": 3, "gradient_accumulation_steps": 5}])
    def test_more_than_one_epoch_of_a_loader_with_a_length(self, tmp_path, options):
        with pytest.raises(ValueError, match="infinite"):
            of_hugging_face(tmp_path, sampler, **options)

    def test_a_checkpoint_without_it(self):
        callback = huggingface.LoaderState(ResumableLoader(DataLoader(ItemDataset(), batch_sampler=sampler(1))))
        arguments = SimpleNamespace(gradient_accumulation_steps=1)
        state = SimpleNamespace(global_step=1, max_steps=12, stateful_callbacks={})
        with pytest.raises(ValueError, match="LoaderState"):
            callback.on_train_begin(arguments, state, None)
        with pytest.raises(TypeError, match="loader"):
            huggingface.LoaderState(DataLoader([1]))


class TestLightning:
    def test_an_exception_in_a_batch(self, tmp_path, monkeypatch):
        """The checkpoint counts the batches whose step was made."""

        def forward(model, **inputs):
            calls.append(1)
            if len(calls) == 7:
                raise ArithmeticError
            return original(model, **inputs)

        whole, _ = of_lightning_trainer(tmp_path, stream, True, max_steps=9)
        original, calls = NotingModel.forward, []
        monkeypatch.setattr(NotingModel, "forward", forward)
        with pytest.raises(ArithmeticError):
            of_lightning_trainer(tmp_path, stream, True, max_steps=9)
        resume = str(tmp_path / "06.ckpt")
        assert of_lightning_trainer(tmp_path, stream, True, resume, max_steps=9)[0] == whole[6:]

    @pytest.mark.parametrize("has_loader_state", [False, True])
    def test_a_warmup_without_it_warns(self, tmp_path, recwarn, has_loader_state):
        warmup = of_lightning.SequenceLengthWarmup(SequenceLengthScheduler(8, 16, duration=0))
        callbacks = [warmup, *([of_lightning.LoaderState()] if has_loader_state else [])]
        loader = ResumableLoader(DataLoader(ItemDataset(), batch_sampler=sampler(1), collate_fn=collate))
        settings = {"limit_train_batches": 1, "enable_checkpointing": True, "default_root_dir": tmp_path}
        trainer = lightning_trainer(*callbacks, **settings)
        trainer.fit(LossModule(NotingModel(), torch.optim.SGD, lr=1e-6), loader)
        warned = any("callbacks have no LoaderState()" in str(warning.message) for warning in recwarn)
        assert warned != has_loader_state

    def test_a_checkpoint_without_it(self, tmp_path):
        _, [(_, path), *_] = of_lightning_trainer(tmp_path, sampler, max_steps=1)
        checkpoint = torch.load(path, weights_only=False)
        callback = of_lightning.LoaderState()
        callback.on_load_checkpoint(SimpleNamespace(training=False), None, {"callbacks": {}})  # it is only tested
        key = callback.state_key
        for message, states in (("ResumableLoaders", {key: {"loaders": []}}), ("LoaderState", {})):
            torch.save({**checkpoint, "callbacks": states}, path)
            with pytest.raises(ValueError, match=message):
                of_lightning_trainer(tmp_path, sampler, resume=path, max_steps=2)
