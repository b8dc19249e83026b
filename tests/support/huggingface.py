"""Trainings of Hugging Face's Trainer that are easy to repeat by hand."""

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


def logged(trainer, name="loss"):
    """The figure of each step."""
    return [record[name] for record in trainer.state.log_history if "loss" in record]
