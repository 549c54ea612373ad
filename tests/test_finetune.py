"""Fine-tuning learns, keeps the best epoch and reports its scores.

A killed run resumes, and its results have the same bytes.
"""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import SHORT, Workspace, digest, plain_logits, toy_reviews, write_parameters, write_reviews
from safetensors.torch import load_file
from stage_process import run_stage
from transformers import AutoModelForSequenceClassification, Trainer, TrainerControl, TrainerState, TrainingArguments

from attnmix.core.errors import InputError
from attnmix.core.store.runs import Run
from attnmix.models.checkpoint import load_tokenizer
from stages import finetune
from stages.common import step_timer
from stages.common.parameters import read_parameters
from stages.common.resume import UNFINISHED, lock_stage

RECIPE: dict[str, Any] = {"epochs": 8, "batch_size": 8, "learning_rate": 5e-3, "max_length": 40}
OUTPUTS = ("models/finetuned", "reports")


TRAIN = 56
"""Number of training texts. An epoch has 7 steps, which is not a multiple of the 2 steps between logged losses."""


def prepared(folder: Path, checkpoint: Path) -> Path:
    """Write the inputs of `finetune`, the reviews and the pretrained model, to `folder`, and return `folder`."""
    write_reviews(folder / "data/reviews", test=60, train=TRAIN)
    shutil.copytree(checkpoint, folder / "models/pretrained")
    return folder


def tuned(folder: Path) -> Path:
    """Run the stage `finetune` in `folder`, in this process, and return the folder."""
    with chdir(folder), lock_stage("finetune"):
        finetune.main(read_parameters())
    assert not (folder / UNFINISHED).exists()
    return folder


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """Return the folder of a finished run of the stage."""
    folder = prepared(tmp_path_factory.mktemp("finetuned"), tiny_bert)
    write_parameters(folder, finetune=RECIPE, **SHORT)
    return tuned(folder)


def test_training_learns_and_reports_scores_of_kept_model(finetuned: Path) -> None:
    metrics = json.loads((finetuned / "reports/metrics/finetune.json").read_text())
    assert set(metrics) == {"test", "best_epoch", "computed_on"}
    reviews = toy_reviews(60, 3)
    kept = json.loads((finetuned / "models/finetuned/config.json").read_text())
    assert kept["id2label"] == {"0": "negative", "1": "positive"}
    scores = plain_logits(finetuned / "models/finetuned", reviews["text"])
    truth = torch.tensor(reviews["label"].to_numpy())
    chosen = scores.argmax(-1)
    by_class = pd.read_csv(finetuned / "reports/plots/finetune/finetune_by_class.csv").set_index("label_name")
    f1 = []
    for label, name in enumerate(("negative", "positive")):
        right = int(((chosen == label) & (truth == label)).sum())
        true_count, predicted_count = int((truth == label).sum()), int((chosen == label).sum())
        f1.append(2 * right / (true_count + predicted_count))
        expected = [label, true_count, predicted_count, right / predicted_count, right / true_count, f1[label]]
        assert by_class.loc[name].tolist() == pytest.approx(expected, abs=1e-6)
    assert pd.read_parquet(Run(finetuned).test_predictions_file)["predicted"].tolist() == chosen.tolist()
    accuracy = float((chosen == truth).double().mean())
    assert accuracy > 0.8
    test = metrics["test"]
    assert test["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert test["macro_f1"] == pytest.approx(sum(f1) / 2, abs=1e-6)
    assert test["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, truth)), abs=1e-4)
    assert test["majority_accuracy"] == 0.5
    # Each end of Wilson's interval is 1.96 standard errors from the observed share; the standard error is computed at
    # this end.
    for edge in ("accuracy_ci_low", "accuracy_ci_high"):
        distance = abs(accuracy - test[edge])
        assert distance == pytest.approx(1.959964 * np.sqrt(test[edge] * (1 - test[edge]) / 60), abs=1e-5), edge
    assert test["accuracy_ci_low"] < accuracy <= test["accuracy_ci_high"]


def test_the_training_loss_is_logged_before_each_checkpoint(finetuned: Path) -> None:
    curves = pd.read_csv(finetuned / "reports/plots/finetune/finetune.csv")
    steps = {split: rows["step"].tolist() for split, rows in curves.groupby("split")}
    assert steps["validation"] == [7, 14, 21, 28, 35, 42, 49, 56]
    # Otherwise, the checkpoint of an epoch would not contain the losses since the last logged step.
    assert steps["train"] == sorted({*range(2, 57, 2), *steps["validation"]})


def test_epoch_with_lowest_validation_loss_is_kept(finetuned: Path) -> None:
    curves = pd.read_csv(finetuned / "reports/plots/finetune/finetune.csv")
    assert list(curves.columns) == ["step", "epoch", "split", "loss", "accuracy"]
    assert len(curves[curves["split"] == "train"]) >= 10
    validation = curves[curves["split"] == "validation"]
    assert validation["epoch"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    best = validation.loc[validation["loss"].idxmin()]
    assert json.loads((finetuned / "reports/metrics/finetune.json").read_text())["best_epoch"] == best["epoch"]
    reviews = pd.read_parquet(finetuned / "data/reviews/validation.parquet")
    scores = plain_logits(finetuned / "models/finetuned", reviews["text"])
    truth = torch.tensor(reviews["label"].to_numpy())
    assert float(torch.nn.functional.cross_entropy(scores, truth)) == pytest.approx(best["loss"], abs=1e-4)


def test_fit_table_has_accuracy_and_margin(finetuned: Path) -> None:
    table = pd.read_csv(finetuned / "reports/plots/finetune/finetune_fit.csv").set_index("split")
    assert list(table.index) == ["train", "validation", "test"]
    for split, row in table.iterrows():
        reviews = pd.read_parquet(finetuned / f"data/reviews/{split}.parquet")
        scores = plain_logits(finetuned / "models/finetuned", reviews["text"]).double()
        own, other = (scores[torch.arange(len(scores)), labels] for labels in both_labels(reviews))
        assert row["texts"] == len(reviews)
        assert row["accuracy"] == pytest.approx(float((own > other).double().mean()), abs=1e-6)
        assert row["margin"] == pytest.approx(float((own - other).mean()), abs=1e-4)
    assert table.loc["train", "accuracy"] > 0.8


def test_training_fit_uses_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "MAX_FIT_TEXTS", 5)
    drawn, same, other = (finetune._draw_examples(list(range(50)), seed) for seed in (1, 1, 2))
    assert drawn == same == sorted(set(drawn))
    assert len(drawn) == 5
    assert drawn != other


def both_labels(reviews: pd.DataFrame) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the true and the opposite labels of two classes."""
    labels = torch.tensor(reviews["label"].to_numpy())
    return labels, 1 - labels


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("kept", "epoch"), [(True, 1), (False, 2)])
def test_best_or_last_epoch_is_kept(workspace: Workspace, tiny_bert: Path, kept: bool, epoch: int) -> None:
    folder = prepared(workspace(finetune=RECIPE | {"load_best_model_at_end": kept}, **SHORT), tiny_bert)

    def trained(trainer: Trainer, **_options: Any) -> None:
        assert trainer.args.load_best_model_at_end == kept
        trainer.state.log_history = [{"epoch": number, "step": number, "eval_loss": float(number)} for number in (1, 2)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", trained)
        finetune.main(read_parameters())
    assert json.loads((folder / "reports/metrics/finetune.json").read_text())["best_epoch"] == epoch


def test_permuted_labels_keep_last_epoch(workspace: Workspace, tiny_bert: Path) -> None:
    folder = prepared(workspace(finetune=RECIPE | {"labels": "permuted"}, **SHORT), tiny_bert)
    trained_on: dict[str, list[int]] = {}

    def watched(trainer: Trainer, **_options: Any) -> None:
        for split, examples in (("train", trainer.train_dataset), ("validation", trainer.eval_dataset)):
            trained_on[split] = [example["labels"] for example in examples]
        trainer.state.log_history = [{"epoch": epoch, "step": epoch, "eval_loss": float(epoch)} for epoch in (1, 2)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train", watched)
        finetune.main(read_parameters())
    for split, labels in trained_on.items():
        given = pd.read_parquet(folder / f"data/reviews/{split}.parquet")["label"].tolist()
        assert sorted(labels) == sorted(given)
        assert labels != given
    metrics = json.loads((folder / "reports/metrics/finetune.json").read_text())
    assert metrics["best_epoch"] == 2  # although the first epoch has the lower loss


def test_permuted_labels_follow_from_seed() -> None:
    reviews = toy_reviews(40, seed=1)
    one, same, other = (finetune.permuted_labels(reviews, seed)["label"].tolist() for seed in (1, 1, 2))
    assert one == same != other


def test_frozen_layers_and_embeddings_are_unchanged(workspace: Workspace, tiny_bert: Path) -> None:
    folder = prepared(workspace(finetune=RECIPE | {"epochs": 1, "frozen_layers": 1}, **SHORT), tiny_bert)
    before = weights_of(folder / "models/pretrained")
    finetune.main(read_parameters())
    after = weights_of(folder / "models/finetuned")
    same = {name for name, weight in before.items() if name in after and torch.equal(weight, after[name])}
    frozen = {name for name in before if "embeddings." in name or ".layer.0." in name}
    assert len(frozen) > 10
    assert frozen & after.keys() <= same
    assert not [name for name in same - frozen if ".layer." in name and name.endswith("weight")]


@pytest.mark.long
def test_two_processes_train_like_one(tmp_path: Path, tiny_bert: Path) -> None:
    weights = []
    for processes in (1, 2):
        folder = prepared(tmp_path / str(processes), tiny_bert)
        config = folder / "models/pretrained/config.json"
        plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # dropout differs between processes
        config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | plain), encoding="utf-8")
        write_parameters(folder, finetune=RECIPE | {"epochs": 2}, **SHORT)
        if processes == 1:
            tuned(folder)
        else:
            run_stage(folder, "finetune", processes=processes)
        weights.append(load_file(folder / "models/finetuned/model.safetensors"))
    curves = [pd.read_csv(tmp_path / f"{processes}/reports/plots/finetune/finetune.csv") for processes in (1, 2)]
    pd.testing.assert_frame_equal(*curves, rtol=0, atol=1e-5)
    one, two = weights
    start = load_file(tmp_path / "1/models/pretrained/model.safetensors")
    (name,) = (key for key in start if key.endswith("embeddings.word_embeddings.weight"))
    change = (one["bert.embeddings.word_embeddings.weight"] - start[name]).abs().max()
    assert change > 1e-2
    # The softmax is invariant to a key's bias, so the gradient of this bias is a rounding error, which Adam scales up.
    compared = [key for key in one if not key.endswith("key.bias")]
    assert max(float((one[key] - two[key]).abs().max()) for key in compared) < 1e-4


def test_unused_parameters_are_detected(tiny_bert: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(tiny_bert).train()
    tokenizer, state = load_tokenizer(tiny_bert), torch.get_rng_state()
    example = {"input_ids": [2, 5, 3], "labels": 1}
    assert not finetune._has_unused_parameters(model, tokenizer, example)
    model.unused = torch.nn.Parameter(torch.ones(2))
    assert finetune._has_unused_parameters(model, tokenizer, example)
    model.unused.requires_grad_(False)
    assert not finetune._has_unused_parameters(model, tokenizer, example)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_processes_share_the_order_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    state, expected = torch.manual_seed(1).get_state(), torch.randperm(99)
    torch.manual_seed(2)
    monkeypatch.setattr(finetune, "broadcast_object_list", lambda _: [state])  # state of the first process
    finetune.TrainingGuard().on_epoch_begin(TrainingArguments(), None, None)
    assert not torch.equal(torch.randperm(99), expected)  # a single process keeps its own state
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    finetune.TrainingGuard().on_epoch_begin(TrainingArguments(), None, None)
    assert torch.equal(torch.randperm(99), expected)


@pytest.mark.long
def test_killed_training_resumes_to_identical_bytes(
    workspace: Workspace, tiny_bert: Path, threads_of_a_stage: None, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = tuned(prepared(workspace("undisturbed", finetune=RECIPE, **SHORT), tiny_bert))
    folder = prepared(workspace(finetune=RECIPE, **SHORT), tiny_bert)
    # Leave an incomplete checkpoint: weights without a training state.
    run_stage(folder, "finetune", kill_at="open .*checkpoint-14/trainer_state.json")
    (half,) = folder.glob(f"{UNFINISHED}/finetune/*/checkpoint-14")
    curves = pd.read_csv(folder / "reports/plots/finetune/finetune.csv")
    assert curves["step"].max() == 14, "the curves are not written during training"
    assert (half / "model.safetensors").exists()
    # Mark the first checkpoint's history with a loss value that training cannot produce.
    state_file = half.parent / "checkpoint-7/trainer_state.json"
    state = json.loads(state_file.read_text())
    state["log_history"][0]["loss"] = 101.0
    state_file.write_text(json.dumps(state))
    # Kill the stage during the removal of the oldest checkpoint; the newest is complete.
    log = run_stage(folder, "finetune", kill_at="os.remove .*trainer_state.json")
    assert "resumes from checkpoint-7\n" in log
    newest = max(folder.glob(f"{UNFINISHED}/finetune/*/checkpoint-*"), key=lambda path: int(path.name[11:]))
    # Kill the stage between publication and clean-up. Before the next run, remove the outputs, as DVC would.
    log = run_stage(folder, "finetune", kill_at=f"shutil.rmtree {UNFINISHED}/finetune/\\w+$")
    assert f"resumes from {newest.name}\n" in log
    for output in OUTPUTS:
        shutil.rmtree(folder / output)
    with caplog.at_level(logging.INFO):
        tuned(folder)
    assert any(message.endswith("resumes from checkpoint-56") for message in caplog.messages)
    for output in ("models/finetuned", "reports/metrics"):
        assert digest(folder / output) == digest(undisturbed / output), output
    curves, whole = (pd.read_csv(each / "reports/plots/finetune/finetune.csv") for each in (folder, undisturbed))
    assert curves["loss"][0] == 101.0, "the first epoch was repeated"
    curves.loc[0, "loss"] = whole["loss"][0]
    pd.testing.assert_frame_equal(curves, whole, check_exact=True)


@pytest.mark.parametrize("name", ["rng_state.pth", "optimizer.pt", "scheduler.pt"])
def test_damaged_checkpoint_is_not_resumed(tmp_path: Path, name: str) -> None:
    for number in (5, 10):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}", encoding="utf-8")
        for state in ("rng_state.pth", "optimizer.pt", "scheduler.pt"):
            torch.save({}, folder / state)
    damaged = tmp_path / "checkpoint-10" / name
    damaged.write_bytes(damaged.read_bytes()[:-30])
    trainer: Any = SimpleNamespace(args=SimpleNamespace(world_size=1), is_world_process_zero=lambda: True)
    assert finetune._find_last_complete_checkpoint(tmp_path, trainer) == str(tmp_path / "checkpoint-5")
    assert not damaged.parent.exists()


def test_curves_grow_during_training(workspace: Workspace, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(workspace(finetune=RECIPE | {"epochs": 2}, **SHORT), tiny_bert)
    file, versions = Path("reports/plots/finetune/finetune.csv"), list[bytes]()

    class Watched(finetune.GrowingCurves):
        def on_log(self, *arguments: Any, **options: Any) -> None:
            super().on_log(*arguments, **options)
            versions.append(file.read_bytes())

    monkeypatch.setattr(finetune, "GrowingCurves", Watched)
    finetune.main(read_parameters())
    assert len(set(versions)) > 3
    assert all(later.startswith(earlier) for earlier, later in pairwise(versions))
    assert file.read_bytes() == versions[-1]


def test_bf16_trains_on_every_machine(workspace: Workspace, tiny_bert: Path) -> None:
    folder = prepared(workspace(finetune=RECIPE | {"precision": "bf16", "epochs": 1}, **SHORT), tiny_bert)
    finetune.main(read_parameters())
    model = AutoModelForSequenceClassification.from_pretrained(folder / "models/finetuned")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("finetune", {"batch_size": 7}, r"finetune\.batch_size: 7 texts cannot be divided evenly among 2 p"),
    ("finetune", {"precision": "fp16"}, r"finetune\.precision: fp16 needs a GPU; allowed on this machine: fp"),
    ("finetune", {"max_length": 65}, r"finetune\.max_length: 65 exceeds the 64 tokens"),
    ("finetune", {"frozen_layers": 9}, r"finetune\.frozen_layers: 9, but the model has \d+ layers with separate"),
    # Settings of later stages.
    ("capture", {"documents": [500]}, r"capture\.documents: the test split has no row 500; allowed: 0 to \d+"),
    ("capture", {"max_length": 65}, r"capture\.max_length: 65 exceeds the 64 tokens"),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_settings_fail_before_training(
    workspace: Workspace, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, mistake: tuple[str, dict[str, Any], str]
) -> None:
    section, changes, expected = mistake
    parameters = {"finetune": RECIPE, **SHORT}
    prepared(workspace(**parameters | {section: parameters[section] | changes}), tiny_bert)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=expected):
        finetune.main(read_parameters())
    assert not Path(UNFINISHED).exists()


def test_diverging_loss_is_one_error(workspace: Workspace, tiny_bert: Path) -> None:
    prepared(workspace(finetune=RECIPE | {"learning_rate": 1e30, "epochs": 1}, **SHORT), tiny_bert)
    with pytest.raises(InputError, match=r"finetune\.learning_rate: 1e\+30 makes training diverge \(.* is (nan|inf)"):
        finetune.main(read_parameters())
    assert not Path("models/finetuned").exists()


def test_seconds_per_step_exclude_time_between_epochs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    seconds = iter([0, 10, 100, 110])  # two epochs of ten seconds, with evaluation and saving between them
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: next(seconds))
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, use_cpu=True)
    timer = step_timer.StepTimer()
    state = TrainerState()
    control = TrainerControl()
    for steps in (10, 20):
        timer.on_epoch_begin(arguments, state, control)
        state.global_step = steps
        timer.on_epoch_end(arguments, state, control)
    with caplog.at_level(logging.INFO):
        timer.on_train_end(arguments, state, control)
    assert caplog.messages == ["1 s per step of 4 texts without evaluation and saving (4 texts/s)"]
