"""Lightning's training_step must pass on what tells the model its segments."""

import pytest
import torch

import seqwarm_kernels as sw

pytest.importorskip("lightning", reason="lightning is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import lightning.pytorch as pl
from transformers import LlamaConfig, LlamaForCausalLM

from seqwarm_kernels.trainers.lightning import SequenceLengthWarmup


class Module(pl.LightningModule):
    def __init__(self, picks):
        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.model, self.picks, self.losses = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)), picks, []

    def training_step(self, batch):
        passed = {name: batch[name] for name in ("input_ids", "labels")} if self.picks else batch
        loss = self.model(**passed).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(picks, mode, as_tuple=False):
    torch.manual_seed(0)
    ids = torch.randint(32, (4, 16))
    rows = [(row, row) if as_tuple else {"input_ids": row, "labels": row} for row in ids]
    warmup = SequenceLengthWarmup(sw.SequenceLengthScheduler(4, 16, duration=8, step_size=4), mode=mode)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    module = Module(picks)
    trainer = pl.Trainer(max_steps=2, callbacks=[warmup], enable_model_summary=False, **options)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
    return module


def test_a_model_that_does_not_get_its_segments_raises():
    with pytest.raises(ValueError, match="position_ids"):
        fit(picks=True, mode="segments")


def test_segments_train_as_flatten_does_and_leave_no_hook():
    module = fit(picks=False, mode="segments")
    assert module.losses == pytest.approx(fit(picks=True, mode="flatten").losses, rel=1e-5)
    assert not module.model._forward_pre_hooks


def test_a_batch_without_names_is_refused():
    with pytest.raises(TypeError, match="mapping"):
        fit(picks=False, mode="segments", as_tuple=True)
