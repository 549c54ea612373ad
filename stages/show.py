"""Look into a model with a text of your own: the interactive page of that text, with no training and no data set.

    python -m stages show --text "time flies like an arrow" [--model bert-base-uncased] [--to reports/show]

The parameters are those of `params.yaml` but for reviews and classifier. The stages run in a temporary folder, so that
no file of the pipeline is touched; the page, `features/` and `plots/` go to the folder `--to`.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attnmix.arithmetic.kernels import use
from attnmix.core.disk import check_folder
from attnmix.core.errors import InputError
from attnmix.core.settings import ModelParameters
from attnmix.models.fetching import fetch_model
from attnmix.models.loading import check_model
from attnmix.page.sentences import Subject
from attnmix.runs.show import RESULTS, publish_page, show_texts
from attnmix.store.runs import Run
from stages.common.parameters import Parameters
from stages.render import changed_parameters

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
    name, revision = parameters.model.name, parameters.model.revision
    rows = [row for row in changed_parameters(parameters) if not row[0].startswith(REVIEW_PARAMETERS)]
    subject = Subject(name, revision, changed=rows, origins=[f"The model comes from {name}."])
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        try:
            fetch_model(name, run.pretrained, revision)
            check_model(run.pretrained, texts)
            show_texts(
                texts,
                run,
                subject,
                capture=parameters.capture,
                measured=parameters.measure,
                umap=parameters.umap,
                seed=parameters.seed,
                arithmetic=parameters.arithmetic,
            )
        except InputError as error:  # names the model as the user did
            message = str(error).replace("model.name: ", "--model: ")
            raise InputError(message.replace(str(run.pretrained), name)) from error
        publish_page(run, to)
