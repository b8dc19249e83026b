"""The schedule beside DeepSpeed's, and in a loop with DeepSpeed's engine. `make test-deepspeed` has the package."""

import os

import pytest

import seqwarm_kernels as sw

from ..support.ranks import SERVER, free_port, set_environment
from .contract.cases import EPOCHS, LONGEST, Case, loader

deepspeed = pytest.importorskip("deepspeed", reason="needs DeepSpeed: make test-deepspeed")
pytestmark = pytest.mark.xdist_group("deepspeed")
CASE = Case(accumulate=2, duration=4, network="llama-alibi")


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
    """The engine, and the lengths and losses of all batches."""
    engine = engine_of(model, stage)
    if attaches:
        scheduler.attach(engine.module)
    model.calls.clear()
    for batch in [*loader(CASE)] * EPOCHS:
        loss = engine(**(batch if attaches else scheduler.resize(batch)))["loss"]
        engine.backward(loss)
        is_step = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_step:
            scheduler.step()
    return engine, [(length, loss) for _, _, length, loss in model.calls]


def check_engine(folder):
    warmed_up = {"example_batch": next(iter(loader(CASE))), "loss_fn": lambda outputs, batch: outputs["loss"]}
    for stage in range(4):
        scheduler = CASE.schedule()
        engine, made = train(CASE.model(), scheduler, stage)
        assert [length for length, _ in made] == [4, 4, 4, 4, 8, 8, 12, 12] + [16] * 8
        assert train(CASE.model(), CASE.schedule(), stage, attaches=True)[1] == made

        before = CASE.model()
        sw.warmup_allocator(before, LONGEST, scheduler=CASE.schedule(), **warmed_up)
        assert train(before, CASE.schedule(), stage)[1] == made

        engine.save_checkpoint(folder / str(stage), client_state={"scheduler": scheduler.state_dict()})
        loaded = CASE.schedule()
        loaded.load_state_dict(engine.load_checkpoint(folder / str(stage))[1]["scheduler"])
        assert loaded.progress == EPOCHS * CASE.epoch_steps

        with pytest.raises(ValueError, match="DeepSpeed"):
            sw.warmup_allocator(engine, LONGEST, **warmed_up)
        if stage:
            with pytest.raises(ValueError, match="DeepSpeed"):
                sw.warmup_allocator(engine.module, LONGEST, **warmed_up)


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
