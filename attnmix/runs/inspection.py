"""Inspection of captured texts one by one: ratios of every token, matrices, attention heads, and token scores.

The stage `inspect` writes `features/inspect/`. Ratios, matrices and heads are computed in float64. The texts are
divided among the processes. The results of each text are written to intermediate files, from which an interrupted run
resumes.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.core.device import measuring_device, process_state
from attnmix.core.disk import publish_output, remove_unfinished
from attnmix.core.names import IMPORTANCE_NAMES, OWN_SHARE
from attnmix.core.settings import MeasureParameters
from attnmix.core.store import writers
from attnmix.core.store.files import atomic_path, write_table
from attnmix.core.store.runs import Run, arrays_folder
from attnmix.core.torch_state import torch_state
from attnmix.faithfulness.attributions import ATTRIBUTIONS, Review
from attnmix.faithfulness.classifier import Classifier
from attnmix.measures.documents import Document, Texts, read_documents
from attnmix.measures.engine import MEASURES, PRECISION, Engine, Measurements
from attnmix.measures.exchange import (
    choose_positions,
    draw_exchanged_texts,
    measure_exchange,
    own_shares,
)
from attnmix.measures.matrices import TOKEN_POSITIONS
from attnmix.measures.ratios import RATIOS
from attnmix.measures.token_ratios import labelled_ratio_rows
from attnmix.models.checkpoint import check_max_length, load_tokenizer
from attnmix.models.families import family_of, present_names
from attnmix.models.loading import load_base
from attnmix.models.segments import read_segments

MAX_DONORS = 256  # maximum number of candidate donors for exchanged texts
PUBLISHED = "published"  # folder that is renamed to `features/inspect` at the end


@torch_state()
def inspect(
    parameters: MeasureParameters,
    checkpoints: Sequence[str],
    run: Run,
    folder: Path,
    *,
    seed: int,
    batch_tokens: int,
    device: torch.device,
) -> None:
    """Measure the captured texts with all `checkpoints`, and write the measures and the classifier's token scores.

    Each process inspects some of the texts: it measures them with each checkpoint, and scores their tokens with the
    fine-tuned classifier. The main process then combines the results of all processes.

    `batch_tokens` is the maximum number of tokens in a batch of the classifier or of exchanged texts. Intermediate
    files are stored in `folder`. If `device` does not support float64, the CPU is used.
    """
    device = measuring_device(device)
    state = process_state(device)
    share = slice(state.process_index, None, state.num_processes)  # the indices of the texts of this process
    tokenizer = load_tokenizer(run.checkpoints[checkpoints[0]])
    longest = int(run.documents["tokens"].max())
    # Measuring a token's own share requires donors: texts whose tokens replace those of the inspected text.
    donors = list(islice(read_documents(run.drawn_reviews), MAX_DONORS))
    methods = parameters.methods
    matrices = parameters.matrices
    for name in checkpoints:
        path = run.checkpoints[name]
        check_max_length("capture.max_length", longest, path)
        base = _load_model(path, tokenizer, run.captured.pairs, device)
        # Remove and log the names that the family of this checkpoint lacks. The checkpoints have the same family, so
        # usually only the first one removes names.
        family = family_of(base.config)
        methods = present_names("measure.methods", methods, family, RATIOS)
        matrices = present_names("measure.matrices", matrices, family)
        engine = Engine(base, methods, tokenizer.pad_token_id)
        token_shares = partial(_compute_token_shares, base, donors, seed, batch_tokens)
        _measure_texts(name, engine, token_shares, matrices, run, folder, share)
    classifier = Classifier(run.finetuned, device, batch_tokens, run.captured.pairs)
    _score_tokens(classifier, run, folder, share, seed)
    state.wait_for_everyone()
    if state.is_main_process:
        columns = [*methods, OWN_SHARE]
        _publish_results(checkpoints, columns, tokenizer, run, folder)
        logging.info("inspected %d texts with the checkpoints %s", len(run.documents), " and ".join(checkpoints))


def _load_model(path: Path, tokenizer: PreTrainedTokenizerFast, pairs: bool, device: torch.device) -> PreTrainedModel:
    """Return the base model of a checkpoint on `device`.

    If `pairs` is True, the model derives the segment of each token from the token IDs.
    """
    base: Any = load_base(path)
    base.to(device)
    read_segments(base, tokenizer, pairs)
    model: PreTrainedModel = base
    return model


def _publish_results(
    checkpoints: Sequence[str], columns: Sequence[str], tokenizer: PreTrainedTokenizerFast, run: Run, folder: Path
) -> None:
    """Combine the intermediate files of all processes into tables, and move all results to the output of the stage.

    `columns` are the names of the ratios and of the own share.
    """
    published = folder / PUBLISHED
    writers.write_ratios(published, columns, _tabulate_ratios(checkpoints, columns, tokenizer, run, folder))
    _write_scores(run, folder)
    publish_output(published, run.inspected)
    remove_unfinished(folder)


def _iterate_texts(run: Run, share: slice, description: str) -> Iterator[tuple[int, Document]]:
    """Yield the index and the content of each captured text in `share` (a slice of indices), with a progress bar."""
    numbered_texts = enumerate(read_documents(run.captured))
    share_of_texts = islice(numbered_texts, share.start, share.stop, share.step)
    total = len(range(len(run.documents))[share])
    yield from tqdm(share_of_texts, desc=description, total=total, unit="text", disable=None)


def _compute_token_shares(
    base: PreTrainedModel, donors: Sequence[Document], seed: int, batch_tokens: int, document: Document
) -> npt.NDArray[np.float32]:
    """Return the own share o / (o + a) `[layers, tokens]` of each token, averaged over up to two donor texts.

    o is the displacement of the token's vector if the token itself is replaced by a token of a donor text; a is the
    displacement if all other tokens are replaced by tokens of the donor text. One donor has the same predicted class,
    and one has another class; both are drawn from the candidates `donors`. The share is NaN for tokens that were not
    exchanged.
    """
    other_documents = [donor for donor in donors if donor.name != document.name]
    texts = [document, *other_documents]
    classes = np.array([text.predicted for text in texts])
    exchanged = draw_exchanged_texts(document, texts, 0, classes, donors=1, seed=seed)  # 0 is the index of `document`
    positions = choose_positions(document, TOKEN_POSITIONS, seed)
    displacements = measure_exchange(base, document, exchanged, positions, batch_tokens)
    shares_by_level = own_shares(displacements, PRECISION)  # [1 + layers, tokens], the first layer's input first
    shares_LT: npt.NDArray[np.float32] = shares_by_level[1:].astype(np.float32)
    return shares_LT


def _measure_texts(
    checkpoint: str,
    engine: Engine,
    token_shares: Callable[[Document], npt.NDArray[np.float32]],
    matrices: Sequence[str],
    run: Run,
    folder: Path,
    share: slice,
) -> None:
    """Measure the captured texts selected by `share` with one checkpoint, and write the measures.

    The matrices and the attention heads are written in their final format; the ratios `[methods, layers, tokens]` are
    written to intermediate files. `share` selects texts by index; `token_shares` is a function that returns the own
    share `[layers, tokens]` of the tokens of a text.
    """
    # All results except the own share are in float64. `engine` has a float64 copy of the model, but uses it for
    # matrices and contributions only. The second engine uses the copy for the ratios, too.
    float64_copy = engine.single.base
    float64_engine = Engine(float64_copy, engine.methods, engine.batches.pad_token_id)
    for number, document in _iterate_texts(run, share, f"{checkpoint}: captured texts"):
        heads = arrays_folder("heads", checkpoint, document.name, folder / PUBLISHED)
        if heads.is_dir():  # created last, after all other files of the text
            continue
        measurements = Measurements(Texts([document]))
        float64_engine.add_sums(measurements, [MEASURES])  # the ratios
        engine.add_matrices(measurements, 0, matrices, with_heads=True)
        engine.add_input_parts(measurements, 0)
        shares_1LT = token_shares(document)[None]
        ratios_MLT = np.concatenate([measurements.ratios[0], shares_1LT])  # the own share is the last method
        with atomic_path(_locate_ratios(folder, checkpoint, number)) as part, part.open("wb") as file:
            np.save(file, ratios_MLT)
        _write_matrices(measurements.matrices[0], checkpoint, document, folder)
        incomplete_heads = heads.with_name(f"{heads.name}.part")
        writers.write_heads(incomplete_heads, measurements.heads[0])
        incomplete_heads.rename(heads)  # marks the text as finished


def _write_matrices(
    matrices: Mapping[str, npt.NDArray[Any]], checkpoint: str, document: Document, folder: Path
) -> None:
    """Write the matrices `[layers, tokens, sources]` of a text, by method, in their final format."""
    contributions = arrays_folder("contributions", checkpoint, document.name, folder / PUBLISHED)
    contributions.mkdir(parents=True, exist_ok=True)
    for method, matrix in matrices.items():
        attributes = {"method": method, "checkpoint": checkpoint, "document": document.name}
        array = matrix.astype(np.float32)
        writers.write_matrix(contributions, method, array, ("layer", "token", "source"), attributes)


def _score_tokens(classifier: Classifier, run: Run, folder: Path, share: slice, seed: int) -> None:
    """Write the predicted class and the token scores `IMPORTANCE_NAMES` of each captured text selected by `share`.

    The results of each text are written to a separate intermediate file in `folder`.
    """
    generator = np.random.default_rng(seed)  # required by `Review`, but these scores are deterministic
    for number, document in _iterate_texts(run, share, "token scores"):
        file = _locate_scores(folder, number)
        if file.exists():
            continue
        review = Review(classifier, document, generator)
        arrays: dict[str, Any] = {}
        for name in IMPORTANCE_NAMES:
            (scores_T,) = ATTRIBUTIONS[name].scores(review)  # random scores would have several draws
            arrays[name] = scores_T
        arrays["predicted"] = classifier.classes[review.predicted]
        arrays["probability"] = review.probability
        arrays["read_position"] = review.gradients.read_position  # position that the head reads; -1 for several
        with atomic_path(file) as part, part.open("wb") as opened:
            np.savez(opened, **arrays)


def _tabulate_ratios(
    checkpoints: Sequence[str], methods: Sequence[str], tokenizer: PreTrainedTokenizerFast, run: Run, folder: Path
) -> Iterator[pd.DataFrame]:
    """Yield a table of the ratios of all tokens for each checkpoint and text, read from the intermediate files.

    The files contain arrays `[methods, layers, tokens]`.
    """
    for checkpoint in checkpoints:
        for number, document in enumerate(read_documents(run.captured)):
            ratios_MLT = np.load(_locate_ratios(folder, checkpoint, number))
            yield labelled_ratio_rows(checkpoint, document, methods, ratios_MLT, tokenizer)


def _write_scores(run: Run, folder: Path) -> None:
    """Write `predictions.parquet` and `token_scores.parquet`, from the intermediate files of `_score_tokens`."""
    predictions = []
    tables = []
    for number, document in enumerate(run.documents["document"]):
        with np.load(_locate_scores(folder, number)) as arrays:
            prediction = {
                "document": document,
                "predicted": str(arrays["predicted"]),
                "probability": float(arrays["probability"]),
                "read_position": int(arrays["read_position"]),
            }
            predictions.append(prediction)
            for name in IMPORTANCE_NAMES:
                positions = np.arange(len(arrays[name]), dtype=np.int32)
                columns = {"document": document, "position": positions, "method": name, "score": arrays[name]}
                tables.append(pd.DataFrame(columns))
    write_table(folder / PUBLISHED / run.predictions_file.name, pd.DataFrame(predictions))
    write_table(folder / PUBLISHED / run.token_scores_file.name, pd.concat(tables, ignore_index=True))


def _locate_ratios(folder: Path, checkpoint: str, number: int) -> Path:
    """Return the intermediate file of the ratios of the text with index `number`."""
    return folder / checkpoint / f"ratios-{number}.npy"


def _locate_scores(folder: Path, number: int) -> Path:
    """Return the intermediate file of the token scores of the text with index `number`."""
    return folder / f"scores-{number}.npz"
