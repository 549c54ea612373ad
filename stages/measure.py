"""Measure how much attention mixes the tokens of the drawn test reviews and of the captured texts.

    python -m stages.measure
    torchrun --nproc-per-node 4 -m stages.measure

Streams batches of documents through each checkpoint in float32, and the captured documents
one by one in float64. Writes `features/mixing/`, `reports/plots/{mixing*,geometry,steps}.csv` and
`reports/metrics/mixing.json`; `docs/measures.md` says what each number is.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import PartialState

from stages.errors import run_stage
from stages.mixing.datafree import attention_gain
from stages.mixing.documents import Document, chosen_documents, drawn_reviews
from stages.mixing.report import collect, write_reports
from stages.mixing.single import SingleMeasurer
from stages.mixing.storage import MIXING, write_tokens
from stages.mixing.streaming import Measurer
from stages.mixing.work import Share, Work
from stages.models.capture_points import POINT_NAMES, taps
from stages.models.loading import FINETUNED, PRETRAINED, check_max_length, load_base, load_tokenizer
from stages.parameters import Parameters
from stages.resume import publish, unfinished_folder
from stages.reviews.splits import REVIEWS, chosen_texts, read_split

FOLDERS = {"pretrained": PRETRAINED, "finetuned": FINETUNED}


def main(parameters: Parameters) -> None:
    mixing, capture = parameters.mixing, parameters.capture
    folders = {str(checkpoint): FOLDERS[checkpoint] for checkpoint in mixing.checkpoints}
    for folder in folders.values():
        check_max_length("mixing.max_length", mixing.max_length, folder)
        check_max_length("mixing.gradient_max_length", mixing.gradient_max_length, folder)
        check_max_length("capture.max_length", capture.max_length, folder)
    drawn = drawn_reviews(read_split("test"), mixing.documents, parameters.seed)
    captured = chosen_texts(capture.documents, capture.texts)
    tokenizer = load_tokenizer(folders[mixing.checkpoints[0]])
    documents = chosen_documents(tokenizer, drawn, captured, mixing.max_length, capture.max_length)

    state = PartialState(cpu=not torch.cuda.is_available())  # without it, processes on CPUs do not see each other
    share = Share(state.process_index, state.num_processes)
    chosen = capture.model_dump(include={"documents", "texts", "max_length"})
    settings = {"seed": parameters.seed, "mixing": mixing.model_dump(), "capture": chosen}
    folder = unfinished_folder("measure", settings, [*folders.values(), REVIEWS / "test.parquet"])
    gains = {}
    for checkpoint, weights in folders.items():
        base = load_base(weights).to(state.device)
        work = Work(folder, checkpoint)
        measurer = Measurer(base, weights, mixing.methods, tokenizer.pad_token_id)
        gains[checkpoint] = [attention_gain(layer) for layer in measurer.weights]
        work.stream(measurer, documents, mixing.batch_tokens, share)
        single = SingleMeasurer(base, weights)
        work.contributions(single, documents, share)
        work.gradients(single, documents, mixing, parameters.seed, share)
    state.wait_for_everyone()
    if state.is_main_process:
        works = {checkpoint: Work(folder, checkpoint) for checkpoint in folders}
        sums = {checkpoint: collect(work, documents, mixing) for checkpoint, work in works.items()}
        sites = [tap.site for tap in taps(base.config.model_type, base.config.num_hidden_layers, POINT_NAMES)]
        write_reports(sums, gains, sites, mixing, parameters.seed)
        write_tokens(folder / "mixing", mixing.methods, _ratios(works, documents, tokenizer))
        publish(folder / "mixing", MIXING)
        shutil.rmtree(folder)
        logging.info("measured %d documents in %s", len(documents), " and ".join(folders))


def _ratios(
    works: Mapping[str, Work], documents: Sequence[Document], tokenizer: Any
) -> Iterator[tuple[str, Document, list[str], npt.NDArray[np.float32]]]:
    for checkpoint, work in works.items():
        for i, document in enumerate(documents):
            yield checkpoint, document, tokenizer.convert_ids_to_tokens(document.ids.tolist()), work.load(i).ratios


if __name__ == "__main__":
    run_stage(main)
