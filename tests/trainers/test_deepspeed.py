"""The schedule beside DeepSpeed's, and in a loop with DeepSpeed's engine. `make test-deepspeed` has the package."""

import os

import pytest
import torch
from torch import nn

import seqwarm_kernels as sw

from ..support.ranks import SERVER, free_port, set_environment

deepspeed = pytest.importorskip("deepspeed", reason="needs DeepSpeed: make test-deepspeed")
pytestmark = pytest.mark.xdist_group("deepspeed")
WORDS, WIDTH, LENGTH, STEPS = 32, 16, 32, 6


def lengths_of_deepspeed(schedule_type, config, steps, **difficulties):
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    whole = {"min_difficulty": 8, "max_difficulty": 1024, "schedule_type": schedule_type, "schedule_config": config}
    scheduler = CurriculumScheduler(whole | difficulties)
    return [scheduler.update_difficulty(step) for step in steps]


@pytest.mark.parametrize(
    ("schedule_type", "config", "pacing"),
    [
        ("fixed_linear", {}, "linear"),
        ("fixed_root", {"root_degree": 2}, sw.root(2)),
        ("fixed_root", {"root_degree": 3}, sw.root(3)),
    ],
)
def test_ramps_are_deepspeeds(schedule_type, config, pacing):
    steps = range(1, 450)
    config = {"total_curriculum_step": 400, "difficulty_step": 8, **config}
    scheduler = sw.SequenceLengthScheduler(8, 1024, duration=400, step_size=8, pacing=pacing)
    ours = [scheduler.seq_length_at(step) for step in steps]
    assert ours == lengths_of_deepspeed(schedule_type, config, steps)


def test_stages_are_deepspeeds_which_counts_from_1():
    config = {"difficulty": [64, 256, 1024], "max_step": [50, 150]}
    scheduler = sw.SequenceLengthScheduler(64, 1024, duration=150, pacing=sw.discrete([(50, 64), (100, 256)]))
    ours = [scheduler.seq_length_at(step) for step in range(200)]
    assert ours == lengths_of_deepspeed("fixed_discrete", config, range(1, 201), min_difficulty=64)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inputs = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.lengths = []

    def forward(self, input_ids, labels):
        self.lengths.append(input_ids.shape[1])
        x = self.embedding(input_ids)
        query, key, value = self.inputs(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + sw.alibi_attention(query, key, value).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(2 * STEPS):
        tokens = torch.randint(WORDS, (2, LENGTH), generator=generator)
        yield {"input_ids": tokens, "labels": tokens.roll(-1, 1)}


def schedule():
    return sw.SequenceLengthScheduler(8, LENGTH, duration=4, step_size=8)


def engine_of(model, stage):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(model, scheduler, stage, attaches=False):
    engine = engine_of(model, stage)
    if attaches:
        scheduler.attach(engine.module)
    losses = []
    for batch in batches():
        loss = engine(**(batch if attaches else scheduler.resize(batch)))
        engine.backward(loss)
        is_step = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_step:
            scheduler.step()
        losses.append(loss.item())
    return engine, losses


def check_engine(folder):
    warmed_up = {"example_batch": next(batches()), "loss_fn": lambda loss, batch: loss}
    for stage in range(4):
        model, scheduler = Model(), schedule()
        engine, losses = train(model, scheduler, stage)
        assert model.lengths == [8, 8, 8, 8, 16, 16, 24, 24, 32, 32, 32, 32]
        assert train(Model(), schedule(), stage, attaches=True)[1] == losses

        before = Model()
        sw.warmup_allocator(before, LENGTH, scheduler=schedule(), **warmed_up)
        assert train(before, schedule(), stage)[1] == losses

        engine.save_checkpoint(folder / str(stage), client_state={"scheduler": scheduler.state_dict()})
        loaded = schedule()
        loaded.load_state_dict(engine.load_checkpoint(folder / str(stage))[1]["scheduler"])
        assert loaded.progress == STEPS

        with pytest.raises(ValueError, match="DeepSpeed"):
            sw.warmup_allocator(engine, LENGTH, **warmed_up)
        if stage:
            with pytest.raises(ValueError, match="DeepSpeed"):
                sw.warmup_allocator(engine.module, LENGTH, **warmed_up)


def run_alone(port, folder):
    os.environ["DS_ACCELERATOR"] = "cpu"
    set_environment(0, port, world_size=1)
    deepspeed.comm.torch.build_shm_op = lambda: None  # compiles C++ for a minute, and serves several ranks
    check_engine(folder)


def test_the_engine(tmp_path):
    process = SERVER.Process(target=run_alone, args=(free_port(), tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
