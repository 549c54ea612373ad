"""Measure how much attention mixes the tokens of the drawn test reviews and of the captured texts.

    python -m stages.measure
    torchrun --nproc-per-node 4 -m stages.measure

Streams batches of documents through each checkpoint in float32, and the captured documents
one by one in float64. Writes `features/mixing/`, the tables of the measures under `reports/plots/` and
`reports/metrics/mixing.json`; `docs/measures.md` says what each number is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerFast

from stages.command import run_stage
from stages.mixing.batches import BatchMeasurer
from stages.mixing.documents import CLASSES, Document, chosen_documents
from stages.mixing.layers import attention_gain, layer_weights
from stages.mixing.summary import Sums, add_up, metrics, overall_means, plot_tables
from stages.mixing.unfinished import CheckpointMeasures
from stages.mixing.whole_document import DocumentMeasurer
from stages.models.capture_points import taps
from stages.models.loading import check_max_length, load_base, load_tokenizer
from stages.outputs.checkpoints import CHECKPOINT_FOLDERS
from stages.outputs.mixing import MIXING, TokenRatios, write_ratios
from stages.outputs.reports import write_metrics, write_plot
from stages.parameters import Parameters
from stages.resume import clear, publish, unfinished_folder
from stages.reviews.chosen import chosen_texts, drawn_reviews
from stages.sites import POINTS


def main(parameters: Parameters) -> None:
    mixing, seed = parameters.mixing, parameters.seed
    weights = {checkpoint: CHECKPOINT_FOLDERS[checkpoint] for checkpoint in mixing.checkpoints}
    tokenizer = load_tokenizer(weights[mixing.checkpoints[0]])
    documents = _documents(parameters, weights, tokenizer)
    state = PartialState(cpu=not torch.cuda.is_available())  # without it, processes on CPUs do not see each other
    folder = unfinished_folder("measure", parameters)
    measured: dict[str, CheckpointMeasures] = {}
    sums: dict[str, Sums] = {}
    for checkpoint, path in weights.items():
        base = load_base(path).to(state.device)
        work = CheckpointMeasures(folder, checkpoint, documents, state.process_index, state.num_processes)
        work.measure(BatchMeasurer(base, path, mixing.methods, tokenizer.pad_token_id), mixing.batch_tokens)
        whole = DocumentMeasurer(base, path, mixing.methods, mixing.matrices)
        work.contributions(whole)
        work.gradients(whole, mixing, seed)
        state.wait_for_everyone()
        if state.is_main_process:
            measured[checkpoint] = work
            gains = np.array([attention_gain(layer) for layer in layer_weights(base)])
            of_documents = map(work.load, range(len(documents)))
            sums[checkpoint] = add_up(documents, of_documents, gains, work.load_agreement(mixing))
    if state.is_main_process:
        sites = [tap.site for tap in taps(base.config.model_type, base.config.num_hidden_layers, POINTS)]
        means = overall_means(sums, mixing, seed)
        for name, table in plot_tables(sums, means, sites, mixing, seed).items():
            write_plot(name, table)
        write_metrics("mixing", metrics(sums, means, mixing))
        write_ratios(folder / "mixing", mixing.methods, _ratios(measured, tokenizer))
        publish(folder / "mixing", MIXING)
        clear(folder)
        logging.info("measured %d documents in %s", len(documents), " and ".join(weights))


def _documents(
    parameters: Parameters, weights: Mapping[str, Path], tokenizer: PreTrainedTokenizerFast
) -> list[Document]:
    """The captured and the drawn documents; `InputError` where a model does not take texts of their length."""
    mixing, capture = parameters.mixing, parameters.capture
    for path in weights.values():
        check_max_length("mixing.max_length", mixing.max_length, path)
        check_max_length("mixing.gradient_max_length", mixing.gradient_max_length, path)
        check_max_length("capture.max_length", capture.max_length, path)
    captured = chosen_texts(capture.documents, capture.texts)
    drawn = drawn_reviews(mixing.documents, parameters.seed)
    return chosen_documents(tokenizer, drawn, captured, mixing.max_length, capture.max_length)


def _ratios(measured: Mapping[str, CheckpointMeasures], tokenizer: PreTrainedTokenizerFast) -> Iterator[TokenRatios]:
    for checkpoint, work in measured.items():
        for i, document in enumerate(work.documents):
            tokens = list(tokenizer.convert_ids_to_tokens(document.ids.tolist()))
            classes = [CLASSES[number] for number in document.classes]
            counted = np.arange(len(document)) < document.counted
            yield TokenRatios(checkpoint, document.name, tokens, classes, counted, work.load(i).ratios)


if __name__ == "__main__":
    run_stage(main)
