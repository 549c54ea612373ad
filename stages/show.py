"""Look into a model with a text of your own: the interactive page of that text, with no training and no data set.

    python -m stages show --text "time flies like an arrow" [--model bert-base-uncased] [--to reports/show]

The parameters are those of `params.yaml` but for reviews and classifier. The stages run in a temporary folder, so that
no file of the pipeline is touched; the page, `features/` and `plots/` go to the folder `--to`.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attnmix.arithmetic.kernels import use
from attnmix.core.errors import InputError
from attnmix.core.names import ACTIVATIONS
from attnmix.models.checkpoint import longest_text
from attnmix.models.fetching import fetch_model
from attnmix.models.loading import prove_model
from attnmix.page.assembly import write_page
from attnmix.page.sentences import Subject
from attnmix.store.runs import Run
from stages.capture import capture_texts
from stages.common.parameters import ModelParameters, Parameters
from stages.common.resources import check_folder
from stages.measure import measure
from stages.reduce import reduce
from stages.render import changed_parameters
from stages.tokenize import free_texts, write_tokens

CHECKPOINT = "pretrained"
RESULTS = ("index.html", "plots", "features")
"""The content of the folder `--to`."""
REVIEW_PARAMETERS = (
    *("dataset.", "finetune.", "faithfulness.", "capture.documents", "capture.drawn"),
    *("measure.documents", "measure.gradient_"),
)
"""Beginnings of the parameters that say nothing about a page of texts alone."""


def run(parameters: Parameters, arguments: Sequence[str]) -> None:
    """Run the command with these arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m stages show", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", action="append", required=True, help="several: once for each")
    parser.add_argument("--model", help="as model.name in params.yaml, which is the default")
    parser.add_argument("--revision", help="of a hub's model")
    parser.add_argument("--to", type=Path, default=Run(Path()).shown, help="folder of the page")
    options = parser.parse_args(arguments)
    if options.model is not None:
        model = ModelParameters(name=options.model, revision=options.revision)
        parameters = parameters.model_copy(update={"model": model})
    logging.getLogger().setLevel(logging.WARNING)
    main(parameters, options.text, options.to)
    print(f"open {options.to / RESULTS[0]}")


def main(parameters: Parameters, texts: Sequence[str], to: Path) -> None:
    """Write the page of `texts` in `parameters.model` to the folder `to`."""
    if empty := [text for text in texts if not text.strip()]:
        raise InputError(f'--text, or TEXT="..." of make: {empty[0]!r} is empty; it needs at least one word')
    check_folder("--to", to, RESULTS)
    use(parameters.arithmetic)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        try:
            _write_run(parameters, texts, run)
        except InputError as error:  # names the model as the user did
            message = str(error).replace("model.name: ", "--model: ")
            raise InputError(message.replace(str(run.pretrained), parameters.model.name)) from error
        to.mkdir(parents=True, exist_ok=True)
        for name, path in zip(RESULTS, (run.page, run.tables, run.activations.parent), strict=True):
            if (to / name).is_dir():
                shutil.rmtree(to / name)
            shutil.move(path, to / name)


def _write_run(parameters: Parameters, texts: Sequence[str], run: Run) -> None:
    """Run the stages without reviews and classifier; only a text longer than the model's positions is truncated."""
    name, revision = parameters.model.name, parameters.model.revision
    fetch_model(name, run.pretrained, revision)
    prove_model(run.pretrained, texts)
    capture, mixing = parameters.capture, parameters.measure
    length = min(capture.max_length, longest_text(run.pretrained) or capture.max_length)
    captured = {"documents": [], "texts": list(texts), "max_length": length, "store": str(ACTIVATIONS)}
    measured = {"documents": len(texts), "gradient_documents": 0}
    changed = {"capture": capture.model_copy(update=captured), "measure": mixing.model_copy(update=measured)}
    parameters = parameters.model_copy(update=changed)
    write_tokens(free_texts(parameters.capture, measured=True), length, run.pretrained, run)
    capture_texts(parameters, run.pretrained, run)
    measure(parameters, [CHECKPOINT], run)
    reduce(parameters.umap, CHECKPOINT, run)
    rows = [row for row in changed_parameters(parameters) if not row[0].startswith(REVIEW_PARAMETERS)]
    write_page(run, Subject(name, revision, changed=rows, origins=[f"The model comes from {name}."]))
