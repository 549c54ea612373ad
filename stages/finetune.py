"""Fine-tune the pretrained model to tell the classes of reviews apart, and test it.

    python -m stages finetune
    torchrun --nproc-per-node 4 -m stages finetune

AdamW, a constant learning rate after warm-up, and the epoch with the lowest validation
loss is kept. A killed run goes on from its last whole epoch. Without epochs, a classifier
that is trained already is tested as it is. Writes `models/finetuned/`, `reports/metrics/finetune.json`,
`reports/plots/finetune/finetune.csv` and `reports/plots/finetune/finetune_by_class.csv`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import pandas as pd
import torch
from accelerate.utils import broadcast_object_list
from scipy.stats import binomtest
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PredictionOutput

from attnmix.arithmetic.kernels import computed_on, use
from attnmix.core.errors import InputError
from attnmix.core.options import FinetuneParameters, Parameters
from attnmix.models.encoding import encode
from attnmix.models.loading import check_max_length, load_classifier, load_tokenizer
from attnmix.models.trained_classifier import ONE_OF_THEM, load_trained
from attnmix.store.reviews import read_split
from attnmix.store.runs import Run
from attnmix.store.writers import write_metrics, write_plot
from stages.common.resume import clear, publish, unfinished_folder


def main(parameters: Parameters) -> None:
    use(parameters.arithmetic)
    finetune, seed = parameters.finetune, parameters.seed
    run = Run(Path())
    own = run.initial
    _check(parameters, own)
    splits = {split: read_split(split, run.reviews) for split in ("train", "validation", "test")}
    parameters.capture.check_documents(len(splits["test"]))
    folder = unfinished_folder("finetune", parameters, run.root)

    set_seed(seed)
    names = splits["train"].groupby("label")["label_name"].first().to_dict()
    numbers = {name: label for label, name in names.items()}
    classes: dict[str, Any] = {"id2label": names, "label2id": numbers, "problem_type": ONE_OF_THEM}
    model = load_classifier(own, **classes) if finetune.epochs else load_trained(own, names)
    tokenizer = load_tokenizer(own)
    trainer = Trainer(
        model=model,
        args=_training_arguments(finetune, seed, folder),
        train_dataset=_examples(tokenizer, splits["train"], finetune.max_length),
        eval_dataset=_examples(tokenizer, splits["validation"], finetune.max_length),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=_scores,
        preprocess_logits_for_metrics=_logits,
    )
    trainer.remove_callback(PrinterCallback)
    if finetune.epochs:
        trainer.add_callback(_StopWhereTheLossExplodes)
        trainer.add_callback(SameOrderInAll)
        trainer.train(resume_from_checkpoint=_last_whole_checkpoint(folder, trainer))
    else:
        trainer.state.epoch = 0
        trainer.evaluate()
    # The library's annotation asks for a torch Dataset; it takes one of `datasets` as well.
    prediction = trainer.predict(_examples(tokenizer, splits["test"], finetune.max_length))  # type: ignore[arg-type]
    if not trainer.is_world_process_zero():
        return
    model.save_pretrained(folder / "best")
    tokenizer.backend_tokenizer.no_truncation()  # it would keep this stage's max_length as its own
    tokenizer.save_pretrained(folder / "best")
    write_plot("finetune/finetune", _curves(trainer.state.log_history), run.tables)
    write_plot("finetune/finetune_by_class", _by_class(prediction, names), run.tables)
    metrics = _metrics(prediction.metrics or {}, splits, trainer.state.log_history)
    write_metrics("finetune", metrics | {"computed_on": computed_on(parameters.arithmetic)}, run.metrics_folder)
    publish(folder / "best", run.finetuned)
    clear(folder)


def _check(parameters: Parameters, own: Path) -> None:
    """`InputError` for what this machine, the model or a later stage would refuse, before the time is spent."""
    finetune, processes = parameters.finetune, int(os.environ.get("WORLD_SIZE", "1"))  # said by torchrun and accelerate
    for key, max_length in parameters.lengths().items():  # those of later stages too
        check_max_length(key, max_length, own)
    if finetune.batch_size % processes:
        raise InputError(
            f"finetune.batch_size: {finetune.batch_size} texts cannot be dealt out evenly to {processes} processes; "
            f"allowed: a multiple of {processes}, or as many processes as divide it"
        )
    if finetune.precision == "fp16" and not torch.cuda.is_available():
        raise InputError("finetune.precision: fp16 needs a GPU; allowed on this machine: fp32, bf16")


class _StopWhereTheLossExplodes(TrainerCallback):
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_others: Any,
    ) -> None:
        for name, value in (logs or {}).items():
            if name in ("loss", "grad_norm", "eval_loss") and not np.isfinite(value):
                raise InputError(
                    f"finetune.learning_rate: {args.learning_rate} makes the training fail, {name} is {value} after "
                    f"step {state.global_step}; allowed: a smaller one (2e-5 to 1e-4 are usual)"
                )


class SameOrderInAll(TrainerCallback):
    """Each process draws the order of an epoch's texts itself, and dropout brings their generators out of step."""

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_others: Any
    ) -> None:
        if args.world_size > 1:
            torch.set_rng_state(broadcast_object_list([torch.get_rng_state()])[0])


def _training_arguments(finetune: FinetuneParameters, seed: int, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        seed=seed,
        num_train_epochs=finetune.epochs,
        per_device_train_batch_size=finetune.batch_size,  # of all processes together, which split each batch
        per_device_eval_batch_size=2 * finetune.batch_size,
        accelerator_config={"split_batches": True},
        optim="adamw_torch_fused",
        learning_rate=finetune.learning_rate,
        weight_decay=finetune.weight_decay,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=finetune.warmup_fraction,
        use_cpu=not torch.cuda.is_available(),
        bf16=finetune.precision == "bf16",
        fp16=finetune.precision == "fp16",
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,  # besides the best
        logging_nan_inf_filter=False,  # it would log the mean of the others instead
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        logging_steps=0.05 if finetune.epochs < 5 else 0.02,
        # Else the loss is multiplied by the number of processes: classifiers average over their own texts.
        average_tokens_across_devices=False,
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def _examples(tokenizer: PreTrainedTokenizerFast, reviews: pd.DataFrame, max_length: int) -> list[dict[str, Any]]:
    encoded = encode(tokenizer, reviews["text"].tolist(), max_length)
    return [{"input_ids": ids, "labels": int(label)} for ids, label in zip(encoded, reviews["label"], strict=True)]


def _logits(outputs: torch.Tensor | tuple[torch.Tensor, ...], _labels: torch.Tensor) -> torch.Tensor:
    """Without what else a model gives, like the encoder's vectors of one with a decoder."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _scores(prediction: EvalPrediction) -> dict[str, float]:
    chosen = np.argmax(prediction.predictions, axis=-1)
    return {
        "accuracy": float(accuracy_score(prediction.label_ids, chosen)),
        "macro_f1": float(f1_score(prediction.label_ids, chosen, average="macro")),
    }


def _by_class(prediction: PredictionOutput, names: Mapping[Any, str]) -> pd.DataFrame:
    """`finetune_by_class.csv`: no precision of a class that is never chosen, no recall of one that is not there."""
    truth, chosen = prediction.label_ids, np.argmax(prediction.predictions, axis=-1)
    scores = precision_recall_fscore_support(truth, chosen, labels=list(names), zero_division=np.nan)
    table = pd.DataFrame({"label": list(names), "label_name": list(names.values()), "reviews": scores[3]})
    table = table.assign(chosen=np.bincount(chosen, minlength=len(names)))
    return table.assign(precision=scores[0], recall=scores[1], f1=scores[2])


def _last_whole_checkpoint(folder: Path, trainer: Trainer) -> str | None:
    """The first process of all removes the others, which a killed run left half, or as many processes did not write."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = [path for path in checkpoints if _is_whole(path, trainer.args.world_size)]
    for path in set(checkpoints) - set(whole):
        if trainer.is_world_process_zero():
            shutil.rmtree(path)
    if whole:
        logging.info("going on from %s", whole[-1].name)
    return str(whole[-1]) if whole else None


def _is_whole(checkpoint: Path, processes: int) -> bool:
    """The first process writes the training's state last, and removes older checkpoints only then.

    Each process writes its random generators; without those of one, the library would go on with others. They are a zip
    file, whose end is written last.
    """
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    generators = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
    return all(is_zipfile(checkpoint / name) for name in generators)


def _curves(history: list[dict[str, Any]]) -> pd.DataFrame:
    """A row for each logged step (`train`) and each epoch (`validation`)."""
    rows = []
    for entry in history:
        for split, prefix in (("train", ""), ("validation", "eval_")):
            if f"{prefix}loss" in entry:
                loss, accuracy = entry[f"{prefix}loss"], entry.get(f"{prefix}accuracy")
                rows.append((entry["step"], entry["epoch"], split, loss, accuracy))
    return pd.DataFrame(rows, columns=["step", "epoch", "split", "loss", "accuracy"])


def _metrics(
    tested: dict[str, float], splits: dict[str, pd.DataFrame], history: list[dict[str, Any]]
) -> dict[str, Any]:
    """Accuracy of the test with its 95 % interval (Wilson), beside that of always naming the larger class."""
    majority = splits["train"]["label"].mode()[0]
    tests = len(splits["test"])
    interval = binomtest(round(tested["test_accuracy"] * tests), tests).proportion_ci(0.95, method="wilson")
    best = min((entry for entry in history if "eval_loss" in entry), key=lambda entry: entry["eval_loss"])
    return {
        "test": {
            "accuracy": tested["test_accuracy"],
            "accuracy_ci_low": float(interval.low),
            "accuracy_ci_high": float(interval.high),
            "macro_f1": tested["test_macro_f1"],
            "loss": tested["test_loss"],
            "majority_accuracy": float((splits["test"]["label"] == majority).mean()),
        },
        "best_epoch": round(best["epoch"]),
    }
