"""Checkpoints of fine-tuning are written by a thread from copies, and a failed write fails the run."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHORT, Workspace, write_reviews
from safetensors.torch import load_file
from transformers import PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.core.store.runs import Run
from stages import finetune
from stages.common import background_checkpoints
from stages.common.background_checkpoints import BackgroundTrainer, copy_to_host
from stages.common.parameters import read_parameters
from stages.common.resume import UNFINISHED

RECIPE: dict[str, Any] = {"epochs": 3, "batch_size": 8, "learning_rate": 1e-3, "max_length": 40}
STEPS_PER_EPOCH = 3


def prepare(workspace: Workspace, checkpoint: Path) -> Path:
    folder = workspace(finetune=RECIPE, **SHORT)
    write_reviews(folder / "data/reviews", test=16, train=8 * STEPS_PER_EPOCH)
    shutil.copytree(checkpoint, folder / "models/pretrained")
    return folder


def test_checkpoint_has_weights_of_its_step(
    workspace: Workspace, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(workspace, tiny_bert)
    weights: dict[str, dict[str, torch.Tensor]] = {}
    differences: list[str] = []
    threads = set()
    may_write = threading.Event()
    save_checkpoint = BackgroundTrainer._save_checkpoint
    save_pretrained, training_step = PreTrainedModel.save_pretrained, BackgroundTrainer.training_step

    def keep_weights(trainer: Any, model: Any, trial: Any) -> None:
        name = f"checkpoint-{trainer.state.global_step}"
        weights[name] = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
        may_write.set() if trainer.state.global_step >= trainer.state.max_steps else may_write.clear()
        save_checkpoint(trainer, model, trial)

    def write_late(model: Any, folder: Any, **options: Any) -> None:
        if Path(folder).name in weights:  # a checkpoint, not the published model
            assert may_write.wait(timeout=600)
            threads.add(threading.current_thread())
        save_pretrained(model, folder, **options)
        written = load_file(Path(folder, "model.safetensors"))
        expected = weights.get(Path(folder).name, {})
        differences.extend(key for key, tensor in expected.items() if not torch.equal(written[key], tensor))

    def step_and_allow(trainer: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = training_step(trainer, *arguments, **options)
        may_write.set()  # the previous checkpoint is written after a step of the next epoch
        return loss

    monkeypatch.setattr(BackgroundTrainer, "_save_checkpoint", keep_weights)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", write_late)
    monkeypatch.setattr(BackgroundTrainer, "training_step", step_and_allow)
    finetune.main(read_parameters())
    assert list(weights) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    assert differences == []
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_failed_write_fails_training_and_keeps_last_complete_checkpoint(
    workspace: Workspace, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = prepare(workspace, tiny_bert)
    save = torch.save

    def fail_in_second_epoch(state: Any, file: Any, *arguments: Any, **options: Any) -> None:
        if str(file).endswith("checkpoint-6/optimizer.pt"):
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
        save(state, file, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(background_checkpoints.torch, "save", fail_in_second_epoch)
        with pytest.raises(InputError, match=r"^finetune: checkpoint-6 cannot be written: .* failed; free some space"):
            finetune.main(read_parameters())
    (unfinished,) = (folder / UNFINISHED / "finetune").iterdir()
    complete = [path.parent.name for path in unfinished.glob("checkpoint-*/trainer_state.json")]
    assert complete == ["checkpoint-3"]
    with caplog.at_level(logging.INFO):
        finetune.main(read_parameters())
    assert "resumes from checkpoint-3" in caplog.messages
    assert json.loads((Run(folder).metrics_folder / "finetune.json").read_text())["test"]
    assert any("s per step of 8 texts without evaluation and saving" in message for message in caplog.messages)


def test_copies_are_independent_and_keep_tied_tensors() -> None:
    tied = torch.arange(6.0).view(2, 3)
    state = {"step": torch.tensor(1.0), "groups": [{"lr": 0.1}], "first": tied, "second": tied, "row": tied[0]}
    copied = copy_to_host(state)
    expected = tied.clone()
    tied.zero_()
    state["step"] += 1
    state["groups"][0]["lr"] = 0.2
    assert torch.equal(copied["first"], expected)
    assert copied["first"] is copied["second"]
    assert torch.equal(copied["row"], expected[0])
    assert copied["step"] == 1
    assert copied["groups"] == [{"lr": 0.1}]
