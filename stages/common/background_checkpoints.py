"""A Trainer whose checkpoints are written by a background thread, from copies of the tensors in host memory."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import rotate_checkpoints

from attnmix.core.errors import InputError, first_line

Write = Callable[[], Any]


class BackgroundTrainer(Trainer):
    """A Trainer that continues while its last checkpoint is written; at most one checkpoint is in flight.

    The files and their order are those of `Trainer`: the trainer state is last, then older checkpoints are removed. The
    last checkpoint of a training run is complete before the training ends.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.running: Future[None] | None = None
        self.writes: list[Write] = []
        """Deferred writes of the current checkpoint, in their order."""
        self.waiting_seconds = 0.0

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        if self.running is not None and self.running.done():
            self.wait_for_checkpoint()  # raises the error of a failed write
        return super().training_step(*arguments, **options)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint in flight is complete; raise `InputError` if it cannot be written."""
        running = self.running
        self.running = None
        if running is not None:
            start = time.perf_counter()
            running.result()
            self.waiting_seconds += time.perf_counter() - start

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Copy the state of training to host memory, and start to write it."""
        self.wait_for_checkpoint()
        self.writes = []
        state: Any = self.state
        limit = self.args.save_total_limit
        self.args.save_total_limit = None
        state.save_to_json = self._defer_state
        try:
            super()._save_checkpoint(model, trial)
        finally:
            del state.save_to_json
            self.args.save_total_limit = limit
        if self.args.should_save:
            rotate = partial(
                rotate_checkpoints, output_dir=str(self.args.output_dir), save_total_limit=limit, use_mtime=True
            )
            self.writes.append(partial(rotate, best_model_checkpoint=state.best_model_checkpoint))
        name = f"checkpoint-{state.global_step}"
        self.running = self.thread.submit(_run_writes, self.writes, name)
        if state.global_step >= state.max_steps:
            self.wait_for_checkpoint()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Defer the write of the weights."""
        if not self.args.should_save:
            return
        Path(str(output_dir)).mkdir(parents=True, exist_ok=True)
        model: Any = self.model
        weights = copy_to_host(model.state_dict() if state_dict is None else state_dict)
        self.writes.append(partial(super()._save, output_dir, weights))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Defer the writes of optimizer and scheduler."""
        if not self.args.should_save:
            return
        optimizer: Any = self.optimizer
        scheduler: Any = self.lr_scheduler
        states = copy_to_host({OPTIMIZER_NAME: optimizer.state_dict(), SCHEDULER_NAME: scheduler.state_dict()})
        for name, state in states.items():
            self.writes.append(partial(torch.save, state, Path(output_dir, name)))

    def _defer_state(self, json_path: str) -> None:
        """Defer the write of the trainer state, without the steps of later epochs."""
        state: Any = copy.copy(self.state)
        del state.save_to_json
        self.writes.append(partial(copy.deepcopy(state).save_to_json, json_path))


def _run_writes(writes: list[Write], name: str) -> None:
    """Run the writes of a checkpoint in order; raise `InputError` if one fails."""
    try:
        for write in writes:
            write()
    except Exception as error:  # torch and safetensors raise their own types for a full disk
        problem = f"finetune: {name} cannot be written: {first_line(error)}"
        raise InputError(f"{problem}; free some space and run the stage again, which resumes") from error


def copy_to_host(value: Any) -> Any:
    """Return a copy of nested dictionaries and lists with all tensors in host memory.

    Args:
        value: Nested dictionaries, lists and tuples of tensors and other values. Tensors on a GPU are copied to pinned
            memory. Equal tensors at one place in memory, such as tied weights, share one copy.

    Example:
        >>> weights = torch.ones(2)
        >>> copied = copy_to_host({"weights": [weights, weights]})
        >>> weights.zero_()
        tensor([0., 0.])
        >>> copied["weights"][0], copied["weights"][0] is copied["weights"][1]
        (tensor([1., 1.]), True)
    """
    copies: dict[Any, Tensor] = {}
    copied = _copy_nested(value, copies)
    if any(tensor.is_pinned() for tensor in copies.values()):
        torch.accelerator.synchronize()
    return copied


def _copy_nested(value: Any, copies: dict[Any, Tensor]) -> Any:
    """Return the copy of a value; `copies` contains the copied tensors by place in memory, shape and type."""
    if isinstance(value, dict):
        return {key: _copy_nested(item, copies) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_copy_nested(item, copies) for item in value])
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
    if key not in copies or not value.numel():
        host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        copies[key] = host.copy_(value.detach(), non_blocking=value.is_cuda)
    return copies[key]


class StepTimer(transformers.TrainerCallback):
    """A callback that logs the seconds per step at the end of training, without evaluation and saving."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.start = 0.0
        self.first_step = 0

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **_options: Any) -> None:
        self.start = time.perf_counter()
        self.first_step = state.global_step

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **_options: Any) -> None:
        if args.device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - self.start
        self.steps += state.global_step - self.first_step

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **_options: Any) -> None:
        if state.is_world_process_zero and self.steps:
            texts = args.train_batch_size * args.world_size
            step = self.seconds / self.steps
            sentence = "%.3g s per step of %d texts without evaluation and saving (%.3g texts/s)"
            logging.info(sentence, step, texts, texts / step)
