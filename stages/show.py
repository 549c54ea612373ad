"""Look into a model with a text of one's own: the interactive page of that text, with no training and no data set.

    python -m stages show --text "time flies like an arrow" [--model bert-base-uncased] [--to reports/show]

The parameters are those of `params.yaml` but for reviews and classifier. The stages run in a temporary folder, so that
nothing of the pipeline's is touched; the page, and beside it `features/` and `plots/`, go to a folder of their own.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attnmix.arithmetic.kernels import use
from attnmix.core.errors import InputError
from attnmix.core.options import ModelParameters, Parameters
from attnmix.models.compatibility import prove_model
from attnmix.models.fetching import fetch_model
from attnmix.models.loading import longest_text
from attnmix.page.assembly import write_page
from attnmix.page.told import of_texts
from attnmix.store.checkpoints import PRETRAINED
from attnmix.store.features import ACTIVATIONS
from attnmix.store.reports import PAGE, PLOTS, SHOWN
from stages.capture import capture_texts
from stages.common.cli import as_command
from stages.common.parameters import read_parameters
from stages.common.stage_lock import check_folder
from stages.measure import measure
from stages.reduce import reduce
from stages.tokenize import free_texts, write_tokens

CHECKPOINT = "pretrained"
KEPT = {"index.html": PAGE, "plots": PLOTS, "features": ACTIVATIONS.parent}
"""What is in the folder of the page, and where the stages leave it."""


def main(parameters: Parameters, texts: Sequence[str], to: Path) -> None:
    """Write the page of `texts` in `parameters.model` to the folder `to`."""
    empty = [text for text in texts if not text.strip()]
    if empty:
        raise InputError(f'--text, or TEXT="..." of make: {empty[0]!r} is empty; it needs at least one word')
    check_folder("--to", to, KEPT)
    use(parameters.arithmetic)
    to = to.absolute()
    with tempfile.TemporaryDirectory() as folder, _in_words_of(parameters.model.name):
        fetch_model(parameters.model, Path(folder) / PRETRAINED)
        with _working_in(Path(folder)):
            prove_model(PRETRAINED, texts)
            _run(_for_texts(parameters, texts))
            to.mkdir(parents=True, exist_ok=True)
            for name, made in KEPT.items():
                if (to / name).is_dir():
                    shutil.rmtree(to / name)
                shutil.move(made, to / name)


def _for_texts(parameters: Parameters, texts: Sequence[str]) -> Parameters:
    """Without reviews and classifier; texts are cut only where the model's positions end before theirs."""
    capture, mixing = parameters.capture, parameters.measure
    length = min(capture.max_length, longest_text(PRETRAINED) or capture.max_length)
    captured = {"documents": [], "texts": list(texts), "max_length": length, "store": str(ACTIVATIONS)}
    measured = {"documents": len(texts), "gradient_documents": 0}
    return parameters.model_copy(
        update={"capture": capture.model_copy(update=captured), "measure": mixing.model_copy(update=measured)}
    )


def _run(parameters: Parameters) -> None:
    write_tokens(free_texts(parameters.capture, measured=True), parameters.capture.max_length, PRETRAINED)
    capture_texts(parameters, PRETRAINED)
    measure(parameters, [CHECKPOINT])
    reduce(parameters.umap, CHECKPOINT)
    write_page(parameters, of_texts)


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _in_words_of(model: str) -> Iterator[None]:
    """Errors name the `model` as the user did."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("model.name: ", "--model: ").replace(str(PRETRAINED), model)) from error


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stages show", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", action="append", required=True, help="several: once for each")
    parser.add_argument("--model", help="as model.name in params.yaml, which is the default")
    parser.add_argument("--revision", help="of a hub's model")
    parser.add_argument("--to", type=Path, default=SHOWN, help="folder of the page")
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
