"""Write the interactive page of a few texts in one model, with no training and no data set."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from attnmix.core.names import ACTIVATIONS
from attnmix.core.settings import CaptureParameters, MeasureParameters, UmapParameters
from attnmix.models.checkpoint import load_config, longest_text
from attnmix.page.assembly import write_page
from attnmix.page.sentences import Subject
from attnmix.runs.capture import capture_texts
from attnmix.runs.measure import measure
from attnmix.runs.reduce import reduce
from attnmix.runs.tokens import free_texts, write_tokens
from attnmix.store.runs import Run

CHECKPOINT = "pretrained"
RESULTS = ("index.html", "plots", "features")
"""Names in the folder that `publish_page` writes to."""


def show_texts(
    texts: Sequence[str],
    run: Run,
    subject: Subject,
    *,
    capture: CaptureParameters,
    measured: MeasureParameters,
    umap: UmapParameters,
    seed: int,
    arithmetic: str,
) -> None:
    """Write `run.page` of `texts` in the model at `run.pretrained`, and all that it shows.

    Only a text longer than the model's positions, or than `capture.max_length`, is truncated.
    """
    length = min(capture.max_length, longest_text(load_config(run.pretrained)) or capture.max_length)
    own_texts = {"documents": [], "texts": list(texts), "max_length": length, "store": str(ACTIVATIONS)}
    capture = capture.model_copy(update=own_texts)
    measured = measured.model_copy(update={"documents": len(texts), "gradient_documents": 0})
    write_tokens(free_texts(texts, measured=True), length, run.pretrained, run)
    folders = [run.root / "unfinished" / name for name in ("capture", "measure")]
    for folder in folders:
        folder.mkdir(parents=True)
    capture_texts(capture, run.pretrained, run, folders[0])
    batch_tokens = capture.batch_tokens
    measure(measured, [CHECKPOINT], run, folders[1], seed=seed, batch_tokens=batch_tokens, arithmetic=arithmetic)
    reduce(umap, CHECKPOINT, run)
    write_page(run, subject)


def publish_page(run: Run, to: Path) -> None:
    """Move `RESULTS` of the run to the folder `to`, in place of an earlier page's."""
    to.mkdir(parents=True, exist_ok=True)
    for name, path in zip(RESULTS, (run.page, run.tables, run.activations.parent), strict=True):
        if (to / name).is_dir():
            shutil.rmtree(to / name)
        shutil.move(path, to / name)
