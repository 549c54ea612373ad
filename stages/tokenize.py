"""Choose, truncate and tokenise the texts that all later stages work on, each once.

    python -m stages tokenize

Writes `features/tokenize/`; `attnmix.store.texts` says what is in it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnmix.data.draw import stratified_draw, typical_reviews
from attnmix.models.checkpoint import check_max_length
from attnmix.runs.tokens import Text, free_texts, with_texts, write_tokens
from attnmix.store import texts as store
from attnmix.store.files import read_table
from attnmix.store.runs import Run
from stages.common.parameters import Parameters


def main(parameters: Parameters) -> None:
    run = Run(Path())
    check_max_length("capture.max_length", parameters.capture.max_length, run.finetuned)
    write_tokens(chosen_texts(parameters, run), parameters.capture.max_length, run.finetuned, run)


def chosen_texts(parameters: Parameters, run: Run) -> Iterator[Text]:
    """Yield every text that a stage needs: captured reviews (named, then drawn), free texts, then other reviews.

    Without any choice `typical_reviews` are captured.
    """
    capture, folder = parameters.capture, run.reviews
    reviews = store.read_split("test", folder, ["label", "label_name"])
    capture.check_documents(len(reviews))
    predictions = read_table(run.test_predictions_file, "finetune")
    numbers = typical_reviews(predictions) if capture.typical else capture.documents
    named = np.array(numbers, np.int64)
    drawn, measured, removed = (
        stratified_draw(reviews["label"].to_numpy(), size, parameters.seed) if size else named[:0]
        for size in (capture.drawn, parameters.measure.documents, parameters.faithfulness.documents)
    )
    captured = np.union1d(named, drawn)
    chosen = {"captured": captured, "measured": measured, "removed": removed}
    flags = {name: reviews.index.isin(rows) for name, rows in chosen.items()}
    names = "test/" + reviews.index.astype(str)
    reviews = reviews.assign(document=names, predicted_label=predictions["predicted"], **flags)

    by_number = dict(zip(sorted(numbers), with_texts(np.sort(named), "test", reviews, folder), strict=True))
    yield from (by_number[number] for number in numbers)
    yield from with_texts(np.setdiff1d(drawn, named), "test", reviews, folder)
    yield from free_texts(capture.texts)
    yield from with_texts(np.setdiff1d(measured, captured), "test", reviews, folder)
    yield from with_texts(np.setdiff1d(removed, np.union1d(captured, measured)), "test", reviews, folder)
