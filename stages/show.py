"""Look into a model with a text of one's own: the interactive page of that text, with no training and no data set.

    python -m stages show --text "time flies like an arrow" [--model bert-base-uncased] [--to reports/show]

The parameters are those of `params.yaml` but for reviews and classifier. The stages run on a temporary folder, so that
nothing of the pipeline's is touched; the page, and beside it `features/` and `plots/`, go to a folder of their own.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnmix.arithmetic.kernels import use
from attnmix.core.errors import InputError
from attnmix.core.options import ModelParameters, Parameters
from attnmix.models.fetching import fetch_model
from attnmix.models.loading import longest_text, prove_model
from attnmix.page.assembly import write_page
from attnmix.page.sentences import Subject
from attnmix.store.layout import ACTIVATIONS, Layout
from attnmix.store.runs import Run
from stages.capture import capture_texts
from stages.common.cli import as_command
from stages.common.parameters import read_parameters
from stages.common.stage_lock import check_folder
from stages.measure import measure
from stages.reduce import reduce
from stages.render import changed_parameters
from stages.tokenize import free_texts, write_tokens

CHECKPOINT = "pretrained"
KEPT = ("index.html", "plots", "features")
"""What is in the folder of the page."""
REVIEW_PARAMETERS = (
    *("dataset.", "finetune.", "faithfulness.", "capture.documents", "capture.drawn"),
    *("measure.documents", "measure.gradient_"),
)
"""Beginnings of the parameters that say nothing about a page of texts alone."""


def main(parameters: Parameters, texts: Sequence[str], to: Path) -> None:
    """Write the page of `texts` in `parameters.model` to the folder `to`."""
    empty = [text for text in texts if not text.strip()]
    if empty:
        raise InputError(f'--text, or TEXT="..." of make: {empty[0]!r} is empty; it needs at least one word')
    check_folder("--to", to, KEPT)
    use(parameters.arithmetic)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        with _named(run.pretrained, parameters.model.name):
            fetch_model(parameters.model.name, run.pretrained, parameters.model.revision)
            prove_model(run.pretrained, texts)
            _run_stages(_for_texts(parameters, texts, run), run)
        to.mkdir(parents=True, exist_ok=True)
        for name, path in zip(KEPT, (run.page, run.tables, run.activations.parent), strict=True):
            if (to / name).is_dir():
                shutil.rmtree(to / name)
            shutil.move(path, to / name)


def _for_texts(parameters: Parameters, texts: Sequence[str], run: Run) -> Parameters:
    """Return the parameters without reviews and classifier; only a text longer than the model's positions is cut."""
    capture, mixing = parameters.capture, parameters.measure
    length = min(capture.max_length, longest_text(run.pretrained) or capture.max_length)
    captured = {"documents": [], "texts": list(texts), "max_length": length, "store": str(ACTIVATIONS)}
    measured = {"documents": len(texts), "gradient_documents": 0}
    return parameters.model_copy(
        update={"capture": capture.model_copy(update=captured), "measure": mixing.model_copy(update=measured)}
    )


def _run_stages(parameters: Parameters, run: Run) -> None:
    texts = free_texts(parameters.capture, measured=True)
    write_tokens(texts, parameters.capture.max_length, run.pretrained, run)
    capture_texts(parameters, run.pretrained, run)
    measure(parameters, [CHECKPOINT], run)
    reduce(parameters.umap, CHECKPOINT, run)
    changed = [row for row in changed_parameters(parameters) if not row[0].startswith(REVIEW_PARAMETERS)]
    name, revision = parameters.model.name, parameters.model.revision
    write_page(run, Subject(name, revision, changed=changed, origins=[f"The model comes from {name}."]))


@contextmanager
def _named(checkpoint: Path, model: str) -> Iterator[None]:
    """Name the `model` in errors as the user did."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("model.name: ", "--model: ").replace(str(checkpoint), model)) from error


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stages show", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", action="append", required=True, help="several: once for each")
    parser.add_argument("--model", help="as model.name in params.yaml, which is the default")
    parser.add_argument("--revision", help="of a hub's model")
    parser.add_argument("--to", type=Path, default=Layout(Path()).shown, help="folder of the page")
    return parser.parse_args(arguments)


def run(arguments: Sequence[str]) -> None:
    """Run the command with these arguments."""
    with as_command(lambda: "nothing is kept"):
        given = read_parameters()
        options = _options(arguments)
        if options.model is not None:
            model = ModelParameters(name=options.model, revision=options.revision)
            given = given.model_copy(update={"model": model})
        logging.getLogger().setLevel(logging.WARNING)
        main(given, options.text, options.to)
        print(f"open {options.to / 'index.html'}")
