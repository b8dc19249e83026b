"""Train a GPT-2 with ALiBi and sequence-length warmup, from text files to checkpoints that resume bit for bit.

    python examples/train_gpt2/train.py --text corpus/ --out runs/first
    torchrun --nproc-per-node 8 examples/train_gpt2/train.py --size 1.5b --parallel fsdp2 --text corpus/ --out runs/big
    torchrun --nproc-per-node 2 examples/train_gpt2/train.py --tensor-parallel 2 --text corpus/ --out runs/shared
    torchrun --nproc-per-node 8 examples/train_gpt2/train.py --context-parallel 4 --text corpus/ --out runs/long
    python examples/train_gpt2/train.py --size toy --text corpus/ --out runs/toy    # a minute on two CPU cores

To continue a run that was killed, repeat the command with --resume. The run's folder, shared by all nodes, holds
config.json, tokenizer.json, tokens/, records.jsonl (a line for each validation), monitor.jsonl (a line for each step),
checkpoint.pt (with --parallel fsdp2 or --tensor-parallel also checkpoint-STEP/) and at the end model.pt. Exit status 2:
the flags or the text are invalid. Exit status 3: the loss became NaN or infinite. Under torchrun the exit status is 1
in both cases.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from model import (
    GPT,
    Attention,
    Batch,
    Config,
    UserError,
    build_model,
    configure,
    has_diverged,
    loss_sum,
    parse,
    read_config,
    read_records,
    reading,
)
from text import IGNORED, Batches, load_tokenizer, open_atomically, prepare_tokens
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm.auto import tqdm

import seqwarm_kernels as sw
from seqwarm_kernels.diagnostics import JsonLines, TrainingMonitor

BETAS = (0.9, 0.95)
FINAL_LEARNING_RATE = 0.1  # of the peak
REFUSED, DIVERGED = 2, 3  # exit status


class Run:
    """Model, optimizer, schedule and progress of one run. `train` continues from the current progress."""

    def __init__(
        self, config: Config, out: Path, cache: Path, attention: Attention | None, rank: int, world_size: int
    ) -> None:
        self.config, self.out, self.rank = config, out, rank
        self.device = torch.device(config.device)  # under torchrun, the GPU that `main` chose
        self.synchronize = torch.get_device_module(self.device).synchronize
        # Ranks that share heads train on the same rows. `replicas` groups of them have rows of their own.
        self.replicas, odd = divmod(world_size, config.tensor_parallel)
        if odd:
            raise UserError(f"tensor_parallel must divide the {world_size} ranks, got {config.tensor_parallel}")
        if config.tensor_parallel > 1 and self.replicas > 1 and config.parallel != "fsdp2":
            raise UserError("--tensor-parallel with fewer than all ranks needs --parallel fsdp2")
        self.context = self.context_mesh()  # of the replicas that share the tokens of each row, in groups
        groups = self.replicas // config.context_parallel
        self.rows, odd = divmod(config.batch_size, groups)
        if odd:
            raise UserError(f"batch_size must be a multiple of the {groups} replicas, got {config.batch_size}")
        self.mesh = None
        if distributed.is_initialized():
            shape = self.replicas, config.tensor_parallel
            self.mesh = distributed.init_device_mesh(config.device, shape, mesh_dim_names=("replicas", "heads"))
        self.batches = Batches(config, cache / config.tokens, rank // (world_size // groups), groups)
        if self.context is not None:
            attention = functools.partial(sw.parallel.context_attention, mesh=self.context)
        self.model = build_model(config, attention).to(self.device)
        self.parallel = self.parallelise()  # the module that training calls
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim != 2]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=BETAS, fused=True)
        self.scheduler = sw.SequenceLengthScheduler(
            config.min_seq_length,
            config.seq_length,
            duration=config.warmup_duration * config.total_tokens,
            step_size=config.step_size,
            unit="token",
        )
        outputs = [JsonLines(out / "monitor.jsonl")] if self.rank == 0 else []
        self.monitor = TrainingMonitor(self.optimizer, *outputs, read_every=config.monitor_every)
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.seq_length = self.scheduler.seq_length  # of the last step
        self.records: list[dict[str, Any]] = []

    def context_mesh(self) -> DeviceMesh | None:
        size, config = self.config.context_parallel, self.config
        if size == 1:
            return None
        if self.replicas % size:
            raise UserError(f"context_parallel must divide the {self.replicas} ranks of torchrun, got {size}")
        if config.compile or config.tensor_parallel > 1 or config.mode == "segments":
            raise UserError("--context-parallel excludes --compile, --tensor-parallel and --mode segments")
        lengths = {config.min_seq_length, config.step_size, config.seq_length, *(config.validation_lengths or ())}
        if any(length % size for length in lengths):
            raise UserError(f"context_parallel {size} must divide all lengths and step_size, got {sorted(lengths)}")
        shape = self.replicas // size, size
        return distributed.init_device_mesh(config.device, shape, mesh_dim_names=("data", "context"))["context"]

    def parallelise(self) -> nn.Module:
        if self.config.compile:
            for block in self.model.blocks:
                block.compile()
        if self.mesh is not None and self.config.tensor_parallel > 1:
            shard_heads(self.model, self.mesh["heads"])
        if self.config.parallel == "fsdp2":
            if self.mesh is None:
                raise UserError("--parallel fsdp2 needs torchrun: torchrun --nproc-per-node N ...")
            dtype = torch.bfloat16 if self.config.precision == "bf16" else None
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for module in [*self.model.blocks, self.model]:
                fully_shard(module, mesh=self.mesh["replicas"], mp_policy=policy)
        elif self.replicas > 1:
            return DistributedDataParallel(self.model, broadcast_buffers=False, gradient_as_bucket_view=True)
        return self.model

    def train(self) -> list[dict[str, Any]]:
        """Train to the end, with a checkpoint after each validation. Returns the records of the whole run."""
        if not self.is_finished():
            self.claim_memory()
        total = self.config.total_tokens
        bar = tqdm(total=total, initial=self.tokens, unit=" tokens", unit_scale=True, disable=self.rank > 0)
        with bar, self.monitor:
            while not self.is_finished():
                self.records.append(self.train_and_validate(bar))
                self.save()
                if self.rank == 0:
                    bar.write(describe(self.records[-1]))
        if not has_diverged(self.records):
            self.export()
        return self.records

    def is_finished(self) -> bool:
        return has_diverged(self.records) or self.tokens >= self.config.total_tokens

    def claim_memory(self) -> None:
        """Allocate and compile before the first step: every length of the schedule, with the rows of its passes."""
        by_rows: dict[int, list[int]] = {}  # the lengths of the passes with that many rows, shortest first
        for length in sorted({milestone.seq_length for milestone in self.scheduler.milestones()}):
            for rows in set(self.passes(length)):
                by_rows.setdefault(rows, []).append(length)
        example = {name: tensor[:1] for name, tensor in self.batches.draw(0).items()}
        largest_first = sorted(by_rows.items(), key=lambda group: group[0] * group[1][-1], reverse=True)
        for number, (rows, lengths) in enumerate(largest_first):
            report = sw.warmup_allocator(
                self.parallel,
                lengths[-1],
                batch_size=rows,
                example_batch=example,
                loss_fn=loss_sum,
                optimizer=self.optimizer,
                autocast_dtype=torch.bfloat16 if self.config.precision == "bf16" else None,
                max_grad_norm=self.config.max_grad_norm or None,
                accumulation_steps=max(min(2, len(self.passes(length))) for length in lengths),
                scheduler=sw.SequenceLengthScheduler(
                    lengths[0],
                    lengths[-1],
                    duration=len(lengths) - 1,
                    pacing=sw.discrete([(1, length) for length in lengths[:-1]]),
                ),
                resize_options={"mode": "segments"} if self.config.mode == "segments" else None,
                shard_batch=None if self.context is None else self.shard,
                raise_out_of_memory=True,
            )
            if self.rank == 0 and number == 0:
                print(report)

    def passes(self, length: int) -> list[int]:
        """Rows of each forward pass of a step: about as many tokens at every length, at most the whole batch."""
        full = self.config.seq_length
        rows = self.rows * full // length if self.config.mode == "flatten" else self.rows
        most = self.config.micro_batch_size * (1 if self.config.mode == "segments" else full // length)
        return [min(most, rows - start) for start in range(0, rows, most)]

    def train_and_validate(self, bar: tqdm[Any]) -> dict[str, Any]:
        """Train until the next validation, and validate. Only the training counts as time."""
        seconds, tokens = self.seconds, self.tokens
        interval = math.ceil(self.config.validate_every * self.config.total_tokens) or self.config.total_tokens
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        train_loss = self.train_until(min(self.config.total_tokens, (tokens // interval + 1) * interval), bar)
        record = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "seq_length": self.seq_length,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "train_loss": None,
            "validation_loss": {},
            "tokens_per_second": (self.tokens - tokens) / (self.seconds - seconds),
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "diverged": True,
        }
        losses = self.validate() if math.isfinite(train_loss) else {}
        if math.isfinite(train_loss) and all(map(math.isfinite, losses.values())):
            record.update(train_loss=train_loss, validation_loss=losses, diverged=False)
        return record

    def train_until(self, tokens: int, bar: tqdm[Any]) -> float:
        """Train until this number of tokens, or until the loss is seen not to be finite. Returns the mean loss."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, labels
        self.synchronize()
        start = time.perf_counter()
        while self.tokens < tokens:
            loss, labels, trained = self.train_step()
            sums += torch.stack([loss * labels, labels])
            bar.update(trained)
            if self.step % self.config.monitor_every == 0:  # reading the loss waits for the device
                bar.set_postfix(loss=f"{loss.item():.3f}", length=self.seq_length, refresh=False)
                if not math.isfinite(sums[0].item()):
                    break
        self.synchronize()
        self.seconds += time.perf_counter() - start
        return (sums[0] / sums[1]).item()

    def train_step(self) -> tuple[Tensor, Tensor, int]:
        """One optimizer step at the current length. Returns mean loss, labels and tokens, over all ranks."""
        self.seq_length = self.scheduler.seq_length
        batch = self.resize(self.batches.draw(self.step))
        limits = {"segment_length": batch.pop("segment_length")} if self.config.mode == "segments" else {}
        count = torch.full((), int((batch["labels"] != IGNORED).sum()), device=self.device)
        labels = self.sum_over_ranks(count).clamp(min=1)
        loss = torch.zeros((), device=self.device)
        for part, is_last in self.micro_batches(batch, self.passes(self.seq_length)[0]):
            with self.exchange_gradients(is_last):
                with self.autocast():
                    part_loss = loss_sum(self.parallel(part["input_ids"], **limits), part) * self.replicas / labels
                part_loss.backward()
            loss += part_loss.detach()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm or math.inf)
        rate = learning_rate(self.step, self.tokens, self.config) * self.rate_factor(len(batch["labels"]))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        loss = self.sum_over_ranks(loss) / self.replicas
        grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        self.monitor.observe(loss, grad_norm, learning_rate=rate, seq_length=self.seq_length)
        self.optimizer.zero_grad()
        tokens = batch["input_ids"].numel() * self.replicas
        self.scheduler.step(tokens)
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        return loss, labels, tokens

    def resize(self, batch: Batch) -> Batch:
        """This rank's batch at the current length.

        "flatten" cuts the windows as one stream: a row may begin in one window and end in the next. The end of the
        stream is dropped if it does not fill a row. "segments" drops no token. No label either, since labels are those
        of the next token already.
        """
        if self.config.mode == "segments":
            options = {"boundaries": "segment_length", "keep_first_labels": True}
            return self.scheduler.resize(batch, mode="segments", **options)
        return self.shard(self.scheduler.resize(batch, mode=self.config.mode))

    def shard(self, batch: Batch) -> Batch:
        """This rank's part of the tokens. Labels are those of the next token already."""
        return batch if self.context is None else sw.parallel.shard_sequence(batch, self.context, shift_labels=False)

    def rate_factor(self, rows: int) -> float:
        """The square root of rows over rows at full length, or 1 without --scale-learning-rate.

        Malladi et al. (arXiv 2205.10287) derive this rule for Adam and batches of independent examples. They change
        betas and epsilon, too, which stay here.
        """
        return math.sqrt(rows / self.rows) if self.config.scale_learning_rate else 1.0

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The mean loss at each validation length."""
        losses = {}
        for length in self.batches.lengths:
            rows = max(1, self.config.micro_batch_size * self.config.seq_length // length)
            total = torch.zeros(2, dtype=torch.float64, device=self.device)
            for part, _ in self.micro_batches(self.shard(self.batches.to_validate(length)), rows):
                with self.autocast():
                    loss = loss_sum(self.model(part["input_ids"]), part)
                total += torch.stack([loss, (part["labels"] != IGNORED).sum()])
            loss, labels = self.sum_over_ranks(total).tolist()
            losses[str(length)] = loss / max(1, labels)
        return losses

    def micro_batches(self, batch: Batch, rows: int) -> Iterator[tuple[Batch, bool]]:
        """Parts of `batch` on the device, each with whether it is the last one."""
        total = len(batch["labels"])
        for start in range(0, total, rows):
            part = {name: tensor[start : start + rows] for name, tensor in batch.items()}
            if self.device.type == "cuda":
                part = {name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in part.items()}
            yield part, start + rows >= total

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def exchange_gradients(self, is_last: bool) -> AbstractContextManager[Any]:
        """Ranks exchange gradients once a step, with the last micro-batch."""
        if isinstance(self.parallel, FSDPModule):
            self.parallel.set_requires_gradient_sync(is_last)
        elif isinstance(self.parallel, DistributedDataParallel) and not is_last:
            return self.parallel.no_sync()
        return nullcontext()

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that train on different rows."""
        if self.mesh is not None and self.replicas > 1:
            distributed.all_reduce(tensor, group=self.mesh.get_group("replicas"))
        return tensor

    def is_sharded(self) -> bool:
        return self.config.parallel == "fsdp2" or self.config.tensor_parallel > 1

    # A checkpoint is the file checkpoint.pt, replaced atomically. Shards of weights are in the folder of its step.

    def save(self) -> None:
        if not has_diverged(self.records):
            self.save_checkpoint()
        self.save_records()

    def save_records(self) -> None:
        if self.rank == 0:
            with open_atomically(self.out / "records.jsonl") as file:
                file.writelines(json.dumps(record).encode() + b"\n" for record in self.records)

    def save_checkpoint(self) -> None:
        self.monitor.flush()
        state = {
            "counts": [self.step, self.tokens, self.seconds],
            "records": self.records,
            "scheduler": self.scheduler.state_dict(),
            "monitor": self.monitor.state_dict(),
            "weights": None if self.is_sharded() else self.weights(),
        }
        shards = self.shards(self.step)
        if self.is_sharded():
            checkpoint.save(self.weights(), checkpoint_id=shards)
        if self.rank == 0:
            with open_atomically(self.out / "checkpoint.pt") as file:
                torch.save(state, file)
            for folder in self.out.glob("checkpoint-*"):
                if folder != shards:
                    shutil.rmtree(folder)

    def shards(self, step: int) -> Path:
        return self.out / f"checkpoint-{step:d}"

    def weights(self) -> dict[str, Any]:
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self) -> None:
        """Load the checkpoint, if there is one. A run that diverged is finished: only its records are read."""
        recorded = read_records(self.out)
        if has_diverged(recorded):
            self.records = recorded
            if self.rank == 0:
                print(f"{self.out} has ended: {describe(recorded[-1])}")
            return
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return
        with reading(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
            self.step, self.tokens, self.seconds = state["counts"]
            weights = self.weights() if self.is_sharded() else state["weights"]
            if self.is_sharded():  # the file names no folder: torch unpickles what it finds in it
                checkpoint.load(weights, checkpoint_id=self.shards(self.step))
            states.set_state_dict(
                self.model, self.optimizer, model_state_dict=weights["model"], optim_state_dict=weights["optimizer"]
            )
            self.scheduler.load_state_dict(state["scheduler"])
            self.monitor.load_state_dict(state["monitor"])
            self.records = state["records"]
        self.save_records()  # a killed run may have stopped between checkpoint and records

    def export(self) -> None:
        """model.pt: the full weights, without the optimizer."""
        options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = states.get_model_state_dict(self.model, options=options)
        if self.rank == 0:
            with open_atomically(self.out / "model.pt") as file:
                torch.save(weights, file)


def shard_heads(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallelism: each rank of `mesh` has a part of the heads, of the MLPs, and all other weights.

    All weights become DTensors. Attention follows them: its heads are sharded, and the slopes are those of all heads.
    """
    first = {"heads_projection": (Shard(0), Shard(0)), "mlp_expand": (Shard(0), Shard(0))}  # weight, bias
    second = {"attention_project": (Shard(1), Replicate()), "mlp_project": (Shard(1), Replicate())}

    def shard(path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        placements = (first | second).get(path.rpartition(".")[2], ())
        for name, placement in zip(("weight", "bias"), placements, strict=False):
            weights = distribute_tensor(getattr(module, name), mesh, [placement])
            module.register_parameter(name, nn.Parameter(weights))

    def on_mesh(input_ids: Tensor) -> DTensor:
        return DTensor.from_local(input_ids, mesh, [Replicate()], run_check=False)

    def replicate(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> Any:
        return tuple(map(on_mesh, inputs)), {name: on_mesh(tensor) for name, tensor in named.items()}

    def gather(_: nn.Module, inputs: Any, logits: DTensor) -> Tensor:
        return logits.redistribute(placements=[Replicate()]).to_local()

    distribute_module(model, mesh, shard)
    model.register_forward_pre_hook(replicate, with_kwargs=True)
    model.register_forward_hook(gather)


def learning_rate(step: int, tokens: int, config: Config) -> float:
    """Linear warmup by steps, times cosine decay by tokens.

    Short steps hold few tokens. A decay by steps would fall long before the model has seen its share of the text (Li,
    Zhang and He, arXiv 2108.06084, appendix A.2). A warmup by tokens would take many more steps than needed
    (DeepSpeed's tutorial on curriculum learning, section 2.5: "unnecessary and harmful").
    """
    cosine = (1 + math.cos(math.pi * tokens / config.total_tokens)) / 2
    warmup = min(1.0, (step + 1) / config.lr_warmup_steps)
    return config.learning_rate * warmup * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


def peak_memory_bytes(device: torch.device) -> int:
    """GPU: the most allocated since the last reset. CPU: the largest resident set since the process started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # does not exist on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def describe(record: dict[str, Any]) -> str:
    losses = "  ".join(f"{length}: {loss:.4f}" for length, loss in record["validation_loss"].items())
    return (
        f"step {record['step']:>7,}  {record['tokens']:>14,} tokens  {record['seconds']:>9.1f} s  length "
        f"{record['seq_length']:>5}  {'the loss is not finite' if record['diverged'] else f'validation loss {losses}'}"
    )


def load_run(folder: str | Path, *, attention: Attention | None = None) -> tuple[GPT, Any, Config]:
    """Model, tokenizer and configuration of a finished run. The model is on the CPU, in evaluation mode."""
    config = read_config(Path(folder))
    model = build_model(config, attention)
    model.load_state_dict(torch.load(Path(folder) / "model.pt", weights_only=True))
    return model.eval(), load_tokenizer(Path(folder, "tokenizer.json")), config


def main(arguments: list[str] | None = None, *, attention: Attention | None = None) -> list[dict[str, Any]]:
    """Train or resume. Returns the records of all validations. `attention`: see `build_model`."""
    given = parse(arguments, __doc__)
    config = configure(given)
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.set_float32_matmul_precision("high")  # TF32 in products of float32
    owns_group = "WORLD_SIZE" in os.environ and not distributed.is_initialized()
    if owns_group:  # a long timeout: rank 0 tokenizes while the others wait
        distributed.init_process_group("nccl" if config.device == "cuda" else "gloo", timeout=timedelta(hours=4))
    try:
        return run(config, given.out, given.cache or given.out / "tokens", attention)
    finally:
        if owns_group:
            gc.collect()  # wrappers of the model must not outlive the group
            distributed.destroy_process_group()


def run(config: Config, out: Path, cache: Path, attention: Attention | None) -> list[dict[str, Any]]:
    is_parallel = distributed.is_initialized()
    rank, world_size = (distributed.get_rank(), distributed.get_world_size()) if is_parallel else (0, 1)
    prepared = [prepare_tokens(config, cache) if rank == 0 else config]
    if world_size > 1:
        distributed.broadcast_object_list(prepared)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        with open_atomically(out / "tokenizer.json") as file:
            file.write((cache / prepared[0].tokens / "tokenizer.json").read_bytes())
        with open_atomically(out / "config.json") as file:
            file.write(json.dumps(dataclasses.asdict(prepared[0]), indent=2).encode())
    training = Run(prepared[0], out, cache, attention, rank, world_size)
    training.load()
    return training.train()


if __name__ == "__main__":
    try:
        sys.exit(DIVERGED if has_diverged(main()) else 0)
    except UserError as refused:
        print(f"{Path(__file__).name}: {refused}", file=sys.stderr)
        sys.exit(REFUSED)
