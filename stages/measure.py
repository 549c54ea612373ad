"""Measure how much attention mixes the tokens of the drawn test reviews and of the captured texts.

    python -m stages.measure
    torchrun --nproc-per-node 4 -m stages.measure

Streams batches of documents through each checkpoint in float32, and the captured documents
one by one in float64. Writes `features/mixing/`, the tables of the measures under `reports/plots/` and
`reports/metrics/mixing.json`; `docs/measures.md` says what each number is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from stages.arithmetic.kernels import computed_on, use
from stages.command import run_stage
from stages.errors import InputError
from stages.mixing.batches import BatchMeasurer
from stages.mixing.by_review import review_tables
from stages.mixing.control_passes import random_base
from stages.mixing.control_tables import control_tables
from stages.mixing.controls import RANDOM, SAME_PASS, shuffled_words
from stages.mixing.derivatives import DocumentDerivatives
from stages.mixing.documents import CLASSES, Document, chosen_documents
from stages.mixing.levels import derivative_tables
from stages.mixing.ratios import RATIOS
from stages.mixing.room import check_room
from stages.mixing.statistics import mean_product_across
from stages.mixing.summary import Sums, add_up, metrics, overall_means, plot_tables
from stages.mixing.unfinished import CheckpointMeasures
from stages.mixing.whole_document import DocumentMeasurer
from stages.models.families import family_of
from stages.models.loading import check_max_length, load_base, load_tokenizer
from stages.outputs.checkpoints import CHECKPOINT_FOLDERS
from stages.outputs.mixing import MIXING, TokenRatios, write_ratios
from stages.outputs.reports import write_metrics, write_plot
from stages.parameters import MixingParameters, Parameters
from stages.resume import clear, publish, unfinished_folder
from stages.reviews.chosen import chosen_texts, drawn_reviews, review_labels, stratified_part


def main(parameters: Parameters) -> None:
    use(parameters.arithmetic)
    documents = _documents(parameters)
    counted = _counted(documents)
    chosen = stratified_part(counted["document"].tolist(), parameters.mixing.gradient_documents, parameters.seed)
    measure(parameters, documents, counted, chosen)


def measure(
    parameters: Parameters, documents: Sequence[Document], counted: pd.DataFrame, chosen: Sequence[str]
) -> None:
    """Write what is measured; `counted` is `document, label, tokens` of the statistics, `chosen` have derivatives."""
    mixing, seed = parameters.mixing, parameters.seed
    weights = {checkpoint: CHECKPOINT_FOLDERS[checkpoint] for checkpoint in mixing.checkpoints}
    tokenizer = load_tokenizer(weights[mixing.checkpoints[0]])
    state = PartialState(cpu=not torch.cuda.is_available())  # without it, processes on CPUs do not see each other
    folder = unfinished_folder("measure", parameters)
    measured: dict[str, CheckpointMeasures] = {}
    sums: dict[str, Sums] = {}
    controls: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
    shuffled = [shuffled_words(document, seed) for document in documents]
    derivatives: dict[str, dict[str, DocumentDerivatives]] = {}
    for checkpoint, path in weights.items():
        base = load_base(path).to(state.device)
        mixing = _present(mixing, base)
        check_room(base, mixing, documents, folder)
        work = CheckpointMeasures(folder, checkpoint, documents, state.process_index, state.num_processes)
        batches = BatchMeasurer(base, path, mixing.methods, tokenizer.pad_token_id)
        work.measure(batches, mixing.batch_tokens)
        work.control("shuffled_words", batches, shuffled, mixing.batch_tokens)
        whole = DocumentMeasurer(base, path, mixing.methods, mixing.matrices)
        work.contributions(whole)
        work.gradients(whole, chosen, mixing, seed)
        state.wait_for_everyone()
        if state.is_main_process:
            measured[checkpoint] = work
            sites, of_documents = batches.sites, map(work.load, range(len(documents)))
            controls[checkpoint] = {name: work.load_control(name) for name in ("shuffled_words", *SAME_PASS)}
            across = mean_product_across(work.load_unit_sums, counted["tokens"].to_numpy(np.float64))
            sums[checkpoint] = add_up(documents, of_documents, whole.gains(), across)
            derivatives[checkpoint] = work.load_derivatives(chosen)
    work = CheckpointMeasures(folder, RANDOM, documents, state.process_index, state.num_processes)
    batches = _random_weights(weights[mixing.checkpoints[0]], batches, state.device, seed)
    work.control("random_weights", batches, documents, mixing.batch_tokens)
    state.wait_for_everyone()
    if state.is_main_process:
        controls[RANDOM] = {"random_weights": work.load_control("random_weights")}
        means = overall_means(sums, mixing, seed)
        tables = plot_tables(sums, means, sites, mixing, seed) | derivative_tables(derivatives, mixing, seed)
        tables |= control_tables(controls, documents, means, mixing, seed) | review_tables(sums, counted, mixing, seed)
        for name, table in tables.items():
            write_plot(name, table)
        write_metrics("mixing", metrics(sums, means, mixing) | {"computed_on": computed_on(parameters.arithmetic)})
        write_ratios(folder / "mixing", mixing.methods, _ratios(measured, tokenizer))
        publish(folder / "mixing", MIXING)
        clear(folder)
        logging.info("measured %d documents in %s", len(documents), " and ".join(weights))


def _random_weights(path: Path, trained: BatchMeasurer, device: torch.device, seed: int) -> BatchMeasurer:
    """The same of the architecture at `path` with random weights."""
    base: PreTrainedModel = random_base(path, seed)
    base.to(device)  # type: ignore[arg-type]  # its annotation knows no device
    return BatchMeasurer(base, path, trained.methods, trained.pad_token_id)


def _present(mixing: MixingParameters, base: PreTrainedModel) -> MixingParameters:
    """Without the methods and matrices that the model's family does not have, and why is said."""
    family = family_of(base.config)
    for name in (*mixing.methods, *mixing.matrices):
        if name in family.absent():
            logging.info("%s: absent in the model family %s: %s", name, family.model_type, family.absent()[name])
    methods, matrices = family.present(mixing.methods), family.present(mixing.matrices)
    if not methods:
        raise InputError(
            f"mixing.methods: the model family {family.model_type} has none of {', '.join(mixing.methods)}; "
            f"allowed: {', '.join(family.present(RATIOS))}"
        )
    return mixing.model_copy(update={"methods": methods, "matrices": matrices})


def _documents(parameters: Parameters) -> list[Document]:
    """The captured and the drawn documents; `InputError` where a model does not take texts of their length."""
    mixing, capture = parameters.mixing, parameters.capture
    weights = [CHECKPOINT_FOLDERS[checkpoint] for checkpoint in mixing.checkpoints]
    for path in weights:
        check_max_length("mixing.max_length", mixing.max_length, path)
        check_max_length("mixing.gradient_max_length", mixing.gradient_max_length, path)
        check_max_length("capture.max_length", capture.max_length, path)
    captured = chosen_texts(capture)
    drawn = drawn_reviews(mixing.documents, parameters.seed)
    return chosen_documents(load_tokenizer(weights[0]), drawn, captured, mixing.max_length, capture.max_length)


def _counted(documents: Sequence[Document]) -> pd.DataFrame:
    """`document`, `label` and `tokens` of those that enter the statistics, in their order."""
    rows = [(document.name, document.counted) for document in documents if document.counted]
    table = pd.DataFrame(rows, columns=["document", "tokens"])
    return table.assign(label=review_labels(table["document"].tolist()))


def _ratios(measured: Mapping[str, CheckpointMeasures], tokenizer: PreTrainedTokenizerFast) -> Iterator[TokenRatios]:
    for checkpoint, work in measured.items():
        for i, document in enumerate(work.documents):
            tokens = list(tokenizer.convert_ids_to_tokens(document.ids.tolist()))
            classes = [CLASSES[number] for number in document.classes]
            counted = np.arange(len(document)) < document.counted
            words = [None if number < 0 else number for number in document.words.tolist()]
            yield TokenRatios(checkpoint, document.name, tokens, words, classes, counted, work.load(i).ratios)


if __name__ == "__main__":
    run_stage(main)
