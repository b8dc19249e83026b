"""Trainings of Hugging Face's Trainer that are easy to repeat by hand."""

import torch
import transformers

#: Arguments of a plain SGD without schedule, clipping, checkpoints or reports, which logs each step.
PLAIN_SGD = {
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "num_train_epochs": 1,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def tiny_gpt2(words, length, *, seed=1, width=16, dropout=0.0):
    torch.manual_seed(seed)
    sizes = {"vocab_size": words, "n_positions": length, "n_embd": width, "n_layer": 2, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0))


def quiet_trainer(
    folder, model, *callbacks, kind=transformers.Trainer, config=transformers.TrainingArguments, given=None, **arguments
):
    """A trainer with these callbacks, by plain SGD unless the arguments say otherwise.

    Args:
        kind: Its class.
        config: The class of its arguments.
        given: What the trainer takes besides.
    """
    arguments = config(output_dir=str(folder), **{**PLAIN_SGD, **arguments})
    made = kind(model, args=arguments, **(given or {}))
    made.remove_callback(transformers.PrinterCallback)
    for callback in callbacks:
        callback.add_to(made) if hasattr(callback, "add_to") else made.add_callback(callback)
    return made


def logged(trainer, name="loss"):
    """The figure of each step."""
    return [record[name] for record in trainer.state.log_history if "loss" in record]
