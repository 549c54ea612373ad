"""The duration of training steps, excluding evaluation and saving."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StepTimer(TrainerCallback):
    """A callback that logs the seconds per training step, without evaluation and saving, at the end of training."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.start = 0.0
        self.first_step = 0

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_options: Any
    ) -> None:
        """Store the time and step at which an epoch begins."""
        self.start = time.perf_counter()
        self.first_step = state.global_step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_options: Any
    ) -> None:
        """Add the time and steps of an epoch."""
        if args.device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - self.start
        self.steps += state.global_step - self.first_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_options: Any
    ) -> None:
        """Log the mean time per step."""
        if state.is_world_process_zero and self.steps:
            texts = args.train_batch_size  # texts of all processes, because `finetune` divides each batch among them
            step_seconds = self.seconds / self.steps
            message = "%.3g s per step of %d texts without evaluation and saving (%.3g texts/s)"
            logging.info(message, step_seconds, texts, texts / step_seconds)
