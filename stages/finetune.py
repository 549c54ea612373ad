"""Fine-tune the pretrained model to classify texts, and test it.

    python -m stages finetune
    torchrun --nproc-per-node 4 -m stages finetune

Training uses AdamW and a constant learning rate after warm-up. It updates all weights, or only adapters (LoRA) and the
classification head; adapters are merged into the weights at the end. By default, the weights of the epoch with the
lowest validation loss are saved. If `load_best_model_at_end` is false or labels are permuted, the weights of the last
epoch are saved instead. A killed run resumes from its last complete epoch. With 0 epochs, an already trained classifier
is tested without changes. Writes
`models/finetuned/`, `reports/metrics/finetune.json` and
`reports/plots/finetune/{finetune,finetune_by_class,finetune_fit}.csv`; finetune.csv is updated during training.
"""

import json
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
import transformers
from accelerate.utils import broadcast_object_list
from scipy.special import softmax
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support
from transformers import (
    EvalPrediction,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from attnmix.core.arithmetic.kernels import computed_on, set_arithmetic
from attnmix.core.device import check_precision, chosen_device, process_count
from attnmix.core.disk import publish_output, remove_unfinished
from attnmix.core.errors import InputError
from attnmix.core.settings import FinetuneParameters
from attnmix.core.store.files import write_table
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import read_split, texts_of
from attnmix.core.store.writers import write_metrics, write_plot
from attnmix.models.checkpoint import check_max_length, load_config, load_tokenizer
from attnmix.models.encoding import encode
from attnmix.models.families import family_of
from attnmix.models.loading import freeze_layers, load_classifier, load_trained
from attnmix.models.segments import read_segments
from stages.common.parameters import Parameters
from stages.common.resume import unfinished_folder
from stages.common.step_timer import StepTimer

Doubles = npt.NDArray[np.float64]

WEIGHT_DECAY = 0.01
WARMUP_FRACTION = 0.2  # as a fraction of all steps
CURVES = "finetune/finetune"
MAX_FIT_TEXTS = 1000  # maximum number of training texts for finetune_fit.csv
MAX_OVERFLOWS = 10
"""Maximum number of consecutive logged steps with non-finite gradients in fp16.

The loss scale grows until gradients overflow; the step with the overflow is skipped, and the scale is halved. Longer
sequences of such steps indicate divergence.
"""


def main(parameters: Parameters) -> None:
    """Train and test the classifier, and publish the model, the training curves and the scores."""
    set_arithmetic(parameters.arithmetic)
    finetune = parameters.finetune
    run = Run(Path())
    _check_settings(parameters, run.initial)
    splits = _read_splits(parameters, run)
    parameters.capture.check_documents(len(splits["test"]))

    transformers.set_seed(parameters.seed)
    class_names = splits["train"].groupby("label")["label_name"].first().to_dict()
    model, tokenizer = _load_model(finetune, run.initial, class_names, pairs="text_pair" in splits["train"])
    folder = unfinished_folder("finetune", parameters, run.root)
    train, validation, test = (_tokenize_examples(tokenizer, split, finetune.max_length) for split in splits.values())
    trainer = _create_trainer(model, tokenizer, train, validation, folder, parameters)
    _train(trainer, finetune.epochs, folder, run.tables)

    # All processes predict together; the first one writes the results.
    test_logits, test_scores = _predict(trainer, test)
    fits = [
        _measure_fit(trainer, "train", _draw_examples(train, parameters.seed)),
        _measure_fit(trainer, "validation", validation),
        _fit_row("test", test_logits, test),
    ]
    if not trainer.is_world_process_zero():
        return
    predictions = _tabulate_predictions(test_logits, test)
    write_table(run.test_predictions_file, predictions)
    merged = model.merge_and_unload() if finetune.lora else model
    _save_classifier(merged, tokenizer, folder / "best")
    write_plot(CURVES, _tabulate_curves(trainer.state.log_history), run.tables)
    write_plot("finetune/finetune_by_class", _score_by_class(predictions, class_names), run.tables)
    write_plot("finetune/finetune_fit", pd.DataFrame(fits), run.tables)
    most_frequent = splits["train"]["label"].mode()[0]
    metrics = {
        "test": _compute_test_metrics(test_scores, predictions["label"], most_frequent),
        "best_epoch": _find_kept_epoch(trainer),
        "computed_on": computed_on(parameters.arithmetic, chosen_device()),
    }
    write_metrics("finetune", metrics, run.metrics_folder)
    publish_output(folder / "best", run.finetuned)
    remove_unfinished(folder)


def _read_splits(parameters: Parameters, run: Run) -> dict[str, pd.DataFrame]:
    """Return the splits by name; if `finetune.labels` is `permuted`, only the test split keeps its labels."""
    splits = {split: read_split(split, run.reviews) for split in ("train", "validation", "test")}
    if parameters.finetune.labels == "permuted":
        for split in ("train", "validation"):
            splits[split] = permuted_labels(splits[split], parameters.seed)
    return splits


def _load_model(
    finetune: FinetuneParameters, checkpoint: Path, names: Mapping[Any, str], pairs: bool
) -> tuple[Any, PreTrainedTokenizerFast]:
    """Return the classifier to train and its tokenizer; adapters (LoRA) and frozen layers are prepared if configured.

    `names` maps class indices to names. If `pairs` is True, the texts are pairs, and a model with segment embeddings
    derives the segment of each token from the token IDs. With 0 epochs, the checkpoint must contain a trained
    classification head.
    """
    load = load_classifier if finetune.epochs else load_trained
    model: Any = load(checkpoint, names)
    tokenizer = load_tokenizer(checkpoint)
    # This call changes the model: it registers a hook that adds the segments of pairs in every forward pass, if the
    # model has segment embeddings. The returned handle is not needed, because the hook is never removed.
    read_segments(model.base_model, tokenizer, pairs)
    if finetune.lora:
        from attnmix.models.adapters import with_lora  # slow import

        model = with_lora(model, **finetune.lora.model_dump())
    freeze_layers(model.base_model, finetune.frozen_layers)
    return model, tokenizer


def _create_trainer(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    train: Any,
    validation: Any,
    folder: Path,
    parameters: Parameters,
) -> Trainer:
    """Return the trainer of `model`, which writes checkpoints to `folder`.

    `train` and `validation` are tokenized examples.
    """
    # DDP's search for unused parameters, which runs at every step, is enabled only if there are unused parameters.
    find_unused = process_count() > 1 and _has_unused_parameters(model, tokenizer, train[0])
    trainer = Trainer(
        model=model,
        args=_create_arguments(parameters, folder, find_unused),
        train_dataset=train,
        eval_dataset=validation,
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_metrics=_compute_scores,
        preprocess_logits_for_metrics=_select_logits,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _create_arguments(parameters: Parameters, folder: Path, find_unused: bool) -> TrainingArguments:
    """Return the settings of a trainer that writes checkpoints to `folder`.

    If `find_unused` is True, DDP searches for unused parameters of the model. The trainer keeps the weights of the
    epoch with the lowest validation loss. If `load_best_model_at_end` is False or the labels are permuted, it keeps
    those of the last epoch.
    """
    finetune = parameters.finetune
    # The labels of the validation texts are permuted, too, so their loss does not show which epoch is the best.
    has_meaningful_validation_loss = finetune.labels == "given"
    return OneDeviceArguments(
        output_dir=str(folder),
        seed=parameters.seed,
        num_train_epochs=finetune.epochs,
        per_device_train_batch_size=finetune.batch_size,  # texts of all processes, because `split_batches` is True
        per_device_eval_batch_size=2 * finetune.batch_size,
        accelerator_config={"split_batches": True},
        learning_rate=finetune.learning_rate,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP_FRACTION,  # transformers interprets values below 1 as a fraction of all steps
        use_cpu=chosen_device().type == "cpu",
        ddp_find_unused_parameters=find_unused,
        bf16=finetune.precision == "bf16",
        fp16=finetune.precision == "fp16",
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,  # in addition to the best checkpoint
        logging_nan_inf_filter=False,  # the filter would hide non-finite losses from `TrainingGuard`
        load_best_model_at_end=finetune.load_best_model_at_end and has_meaningful_validation_loss,
        logging_steps=0.05 if finetune.epochs < 5 else 0.02,  # fractions of all steps: 20 or 50 points on a curve
        # True would multiply the loss by the number of processes, as each process averages over its own texts.
        average_tokens_across_devices=False,
        disable_tqdm=not sys.stderr.isatty(),
    )


def _train(trainer: Trainer, epochs: int, folder: Path, tables: Path) -> None:
    """Train a classifier, or only evaluate it if `epochs` is 0.

    Training resumes from the last complete checkpoint in `folder`, if there is one. The training curves are written to
    the folder `tables` at each logged step.
    """
    if not epochs:
        trainer.state.epoch = 0
        trainer.evaluate()
        return
    trainer.add_callback(TrainingGuard)
    trainer.add_callback(StepTimer)
    trainer.add_callback(GrowingCurves(tables))
    trainer.train(resume_from_checkpoint=_find_last_complete_checkpoint(folder, trainer))


def _save_classifier(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a classifier and its tokenizer to `folder`."""
    model.save_pretrained(folder)
    tokenizer.backend_tokenizer.no_truncation()  # otherwise, the max_length of this stage would be saved
    tokenizer.save_pretrained(folder)


def _select_logits(outputs: Any, _labels: Any) -> Any:
    """Return only the logits from a model's outputs; encoder-decoder models also return the encoder's vectors."""
    if isinstance(outputs, tuple):
        logits, *_ = outputs
        return logits
    return outputs


def _predict(trainer: Trainer, examples: Sequence[Mapping[str, Any]]) -> tuple[Doubles, dict[str, float]]:
    """Return the logits `[texts, classes]` in the order of `examples`, and the scores that the trainer computes."""
    lengths = np.array([len(example["input_ids"]) for example in examples])
    # Grouping by length would return predictions in random order; sorting by length avoids as much padding as grouping.
    order = np.argsort(-lengths, kind="stable")
    trainer.args.train_sampling_strategy = "sequential"
    # The type annotation of transformers requires a torch Dataset, but a list is sufficient.
    prediction = trainer.predict([examples[row] for row in order])  # type: ignore[arg-type]
    logits = np.asarray(prediction.predictions, np.float64)
    # `argsort` of a permutation is the inverse permutation, which restores the order of `examples`.
    return logits[np.argsort(order)], prediction.metrics or {}


def _tabulate_predictions(logits: Doubles, examples: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return one row per example: label, predicted class, probability of this class, and number of tokens."""
    probabilities = softmax(logits, axis=-1)
    columns = {
        "label": [example["labels"] for example in examples],
        "predicted": probabilities.argmax(-1),
        "probability": probabilities.max(-1),
        "tokens": [len(example["input_ids"]) for example in examples],
    }
    return pd.DataFrame(columns)


def _draw_examples(examples: Sequence[Any], seed: int) -> list[Any]:
    """Return a random sample of at most `MAX_FIT_TEXTS` examples, in their original order."""
    rows = np.random.default_rng(seed).permutation(len(examples))[:MAX_FIT_TEXTS]
    return [examples[row] for row in sorted(rows)]


def _measure_fit(trainer: Trainer, split: str, examples: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Predict the classes of `examples`, and return their row of `finetune_fit.csv`."""
    logits, _ = _predict(trainer, examples)
    return _fit_row(split, logits, examples)


def _fit_row(split: str, logits: Doubles, examples: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return a row of `finetune_fit.csv`: the accuracy and the mean margin of the predictions for `examples`.

    The margin is the logit of the label minus the largest logit of another class. `logits` has the shape
    `[texts, classes]`.
    """
    labels = np.array([example["labels"] for example in examples])
    classes = np.arange(logits.shape[1])
    is_label = classes == labels[:, None]  # [texts, classes]; each row has one True value
    logit_of_label = logits[is_label]  # [texts]
    largest_other = np.where(is_label, -np.inf, logits).max(-1)
    margins = logit_of_label - largest_other
    is_correct = logits.argmax(-1) == labels
    return {
        "split": split,
        "texts": len(labels),
        "accuracy": float(is_correct.mean()),
        "margin": float(margins.mean()),
    }


def _find_kept_epoch(trainer: Trainer) -> int:
    """Return the epoch of the saved weights: the epoch with the lowest validation loss, or the last epoch."""
    # The validation loss is logged after each epoch; with 0 epochs, it is logged once.
    epochs = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    kept = epochs[-1]
    if trainer.args.load_best_model_at_end:
        kept = min(epochs, key=itemgetter("eval_loss"))
    return round(kept["epoch"])


def _check_settings(parameters: Parameters, checkpoint: Path) -> None:
    """Raise `InputError` for settings that this machine, the model or a later stage does not support."""
    finetune = parameters.finetune
    processes = process_count()
    for name in ("finetune", "capture", "faithfulness"):
        check_max_length(f"{name}.max_length", getattr(parameters, name).max_length, checkpoint)
    if finetune.batch_size % processes:
        problem = f"{finetune.batch_size} texts cannot be divided evenly among {processes} processes"
        raise InputError(f"finetune.batch_size: {problem}; allowed: a multiple of {processes}")
    check_precision("finetune.precision", finetune.precision, chosen_device())
    family_of(load_config(checkpoint)).check_precision("finetune.precision", finetune.precision)


def _has_unused_parameters(model: Any, tokenizer: PreTrainedTokenizerFast, example: dict[str, Any]) -> bool:
    """Return True if a trainable parameter does not contribute to the loss of an example."""
    model.eval()  # disables dropout, which would consume random numbers
    batch = transformers.DataCollatorWithPadding(tokenizer)([example])
    model(**batch).loss.backward()
    unused = any(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    model.zero_grad()
    model.train()
    return unused


class OneDeviceArguments(TrainingArguments):
    """Training arguments for one device per process; by default, a single process would use all GPUs."""

    @cached_property
    def _setup_devices(self) -> torch.device:
        """The device of this process; a single process uses the chosen device instead of all GPUs."""
        device: torch.device = super()._setup_devices
        if self.world_size == 1:
            device = chosen_device()
            if device.index:  # None and 0 need no change, because 0 is the default
                torch.accelerator.set_device_index(device)  # accelerate uses the current device
            self._n_gpu = min(self._n_gpu, 1)
        return device


class TrainingGuard(transformers.TrainerCallback):
    """A callback that stops a diverging training run, and synchronises the random states of the run's processes."""

    def __init__(self) -> None:
        self.overflows = 0

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **options: Any) -> None:
        """Raise `InputError` if a logged loss or gradient norm indicates divergence."""
        for name, value in options["logs"].items():
            if name in ("loss", "grad_norm", "eval_loss") and not self._is_usual(name, value, args.fp16):
                problem = f"makes training diverge ({name} is {value} after step {state.global_step})"
                advice = "use a smaller one (2e-5 to 1e-4 are usual)"
                raise InputError(f"finetune.learning_rate: {args.learning_rate} {problem}; {advice}")

    def _is_usual(self, name: str, value: float, fp16: bool) -> bool:
        """Return True for finite numbers; in fp16 also for up to `MAX_OVERFLOWS` consecutive non-finite gradients."""
        if name == "grad_norm" and fp16:
            self.overflows = 0 if np.isfinite(value) else self.overflows + 1
            return self.overflows <= MAX_OVERFLOWS
        return bool(np.isfinite(value))

    def on_epoch_begin(self, args: TrainingArguments, *_: Any, **_options: Any) -> None:
        # Each process draws the order of an epoch's texts, but dropout desynchronises the processes' random generators.
        # All processes therefore copy the state of the first one.
        if args.world_size > 1:
            torch.set_rng_state(broadcast_object_list([torch.get_rng_state()])[0])


class GrowingCurves(transformers.TrainerCallback):
    """A callback that rewrites `finetune.csv` at each logged step, for monitoring.

    The callback also logs the training loss at the end of each epoch, before the checkpoint is saved. Checkpoints do
    not contain the losses since the last logged step, so a resumed run would otherwise log a mean without these losses.
    DVCLive is not used because it appends to separate files; in a resumed run, these files would contain the steps
    since the last checkpoint twice.
    """

    def __init__(self, tables: Path) -> None:
        self.tables = tables

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_options: Any
    ) -> None:
        control.should_log = True

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **_options: Any) -> None:
        if state.is_world_process_zero:
            write_plot(CURVES, _tabulate_curves(state.log_history), self.tables)


def permuted_labels(reviews: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return a split with randomly permuted labels; the name of a label is permuted with the label."""
    order = np.random.default_rng(seed).permutation(len(reviews))
    numbers = reviews["label"].to_numpy(int)
    names = reviews["label_name"].to_numpy(object)
    return reviews.assign(label=numbers[order], label_name=names[order])


def _tokenize_examples(
    tokenizer: PreTrainedTokenizerFast, reviews: pd.DataFrame, max_length: int
) -> list[dict[str, Any]]:
    """Return the `input_ids` and the class index (`labels`) of each text, truncated to `max_length` tokens."""
    encoded = encode(tokenizer, texts_of(reviews), max_length)
    examples = []
    for ids, label in zip(encoded, reviews["label"], strict=True):
        examples.append({"input_ids": ids, "labels": int(label)})
    return examples


def _compute_scores(prediction: EvalPrediction) -> dict[str, float]:
    """Return the accuracy and the macro F1 of predictions, which are given as logits `[texts, classes]`."""
    classes = np.argmax(prediction.predictions, axis=-1)
    macro_f1 = float(f1_score(prediction.label_ids, classes, average="macro"))
    return {"accuracy": float(accuracy_score(prediction.label_ids, classes)), "macro_f1": macro_f1}


def _score_by_class(predictions: pd.DataFrame, names: Mapping[Any, str]) -> pd.DataFrame:
    """Return the table `finetune_by_class.csv`, with the scores of each class; `names` maps class indices to names.

    The precision of classes that are never predicted and the recall of classes without texts are missing.
    """
    truth = predictions["label"]
    predicted = predictions["predicted"]
    labels = list(names)
    precision, recall, f1, reviews = precision_recall_fscore_support(
        truth, predicted, labels=labels, zero_division=np.nan
    )
    columns = {
        "label": labels,
        "label_name": list(names.values()),
        "reviews": reviews,
        "chosen": np.bincount(predicted, minlength=len(names)),
        "precision": precision,
        "recall": recall,
        "f1": f1,
    }
    return pd.DataFrame(columns)


def _find_last_complete_checkpoint(folder: Path, trainer: Trainer) -> str | None:
    """Return the newest complete checkpoint of a killed run, or None; newer, incomplete checkpoints are deleted.

    The first process writes the trainer state last, and only then deletes older checkpoints. torch writes the other
    states as zip files, which end with a directory and are therefore only valid if they are complete. If one of these
    files were missing, transformers would resume with a different state.
    """
    newest_first = sorted(folder.glob("checkpoint-*"), key=_read_step, reverse=True)
    for checkpoint in newest_first:
        if _is_complete(checkpoint, trainer.args.world_size):
            logging.info("training resumes from %s", checkpoint.name)
            return str(checkpoint)
        if trainer.is_world_process_zero():
            shutil.rmtree(checkpoint)
    return None


def _read_step(checkpoint: Path) -> int:
    """Return the number of training steps at the end of the name of a checkpoint folder."""
    _, _, step = checkpoint.name.rpartition("-")
    return int(step)


def _is_complete(checkpoint: Path, processes: int) -> bool:
    """Return True if the states of the trainer, optimizer, scheduler and random generators are complete."""
    generators = ["rng_state.pth"]
    if processes > 1:
        generators = [f"rng_state_{rank}.pth" for rank in range(processes)]
    states = ["optimizer.pt", "scheduler.pt", *generators]
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        return all(is_zipfile(checkpoint / name) for name in states)
    except (OSError, ValueError):
        return False


def _tabulate_curves(history: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the table `finetune.csv` from the trainer's log.

    Rows of the split `train` refer to logged steps and ends of epochs, rows of `validation` to ends of epochs.
    """
    prefixes = {"train": "", "validation": "eval_"}
    rows = []
    for entry in history:
        for split, prefix in prefixes.items():
            loss = entry.get(f"{prefix}loss")
            if loss is not None:
                accuracy = entry.get(f"{prefix}accuracy")  # only for `validation`
                rows.append((entry["step"], entry["epoch"], split, loss, accuracy))
    return pd.DataFrame(rows, columns=["step", "epoch", "split", "loss", "accuracy"])


def _compute_test_metrics(scores: Mapping[str, float], labels: pd.Series, majority: int) -> dict[str, float]:
    """Return the test scores, with Wilson's 95 % interval of the accuracy.

    `majority_accuracy` is the accuracy of predicting the class `majority` for every text.
    """
    correct = round(scores["test_accuracy"] * len(labels))
    interval = binomtest(correct, len(labels)).proportion_ci(0.95, method="wilson")
    return {
        "accuracy": scores["test_accuracy"],
        "accuracy_ci_low": float(interval.low),
        "accuracy_ci_high": float(interval.high),
        "macro_f1": scores["test_macro_f1"],
        "loss": scores["test_loss"],
        "majority_accuracy": float((labels == majority).mean()),
    }
