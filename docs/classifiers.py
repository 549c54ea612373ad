"""Run the pipeline with a tiny random model of each classifier architecture on the hub; write docs/classifiers.csv.

    PYTHONPATH=tests python -m docs.classifiers [ARCHITECTURE ...]

`docs/classifiers.yaml` lists the architectures. Each model has the tokenizer type, the pooling and the head of its
architecture (`tests/tiny_families.yaml`). The pipeline either runs from fine-tuning to the page, or rejects the model.
`make docs` creates the table in docs/classifiers.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

from attnmix.core.arithmetic import environment

environment.set_variables(environment.PORTABLE)  # must be set before NumPy is imported, as in the tests

# ruff: noqa: E402  # the imports below must come after the lines above
import pandas as pd
import yaml
from families import run_family, write_family
from transformers import AutoConfig

from attnmix.core.errors import InputError
from attnmix.core.names import POINTS
from attnmix.core.store.files import read_results
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.models.families import family_of

RESULTS = Path("docs/classifiers.csv")
CLASSIFIERS: dict[str, dict[str, Any]] = yaml.safe_load(Path("docs/classifiers.yaml").read_text("utf-8"))
WORKS = "works"
COUNTED = {"points": POINTS, "ratios": RATIOS, "matrices": LAYER_MATRICES}
"""The columns of the results that contain counts, with the names that are counted in each column."""


def outcome(architecture: str) -> dict[str, object]:
    """Return the row of one architecture: the outcome `works` and the counts, or the error message as the outcome."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        own_code = CLASSIFIERS[architecture].get("own_code", False)
        config = write_family("bert" if own_code else architecture, Path("model")) / "config.json"
        if own_code:
            values = json.loads(config.read_text("utf-8")) | {"model_type": architecture, "auto_map": {}}
            config.write_text(json.dumps(values), "utf-8")
        try:
            run_family(Path())
        except InputError as error:
            return {"architecture": architecture, "outcome": refusal(error)}
        family = family_of(AutoConfig.from_pretrained("model"))
        if not Path("reports/index.html").is_file():
            raise FileNotFoundError(f"{architecture}: the pipeline made no page")
    return {
        "architecture": architecture,
        "outcome": WORKS,
        **{column: len(family.present(names)) for column, names in COUNTED.items()},
    }


def refusal(error: InputError) -> str:
    """Return the error message without the list of allowed values."""
    return str(error).partition(";")[0]


def main(names: list[str]) -> None:
    """Run the architectures `names`, or all architectures, and write the row of each one immediately after its run."""
    for name in names or CLASSIFIERS:
        row = outcome(name)
        old = read_results(RESULTS).to_dict("records") if RESULTS.is_file() else []
        made = {each["architecture"]: each for each in [*old, row]}
        rows = [made[each] for each in CLASSIFIERS if each in made]
        table = pd.DataFrame(rows, columns=["architecture", "outcome", *COUNTED])
        table.astype(dict.fromkeys(COUNTED, "Int64")).to_csv(RESULTS, index=False, lineterminator="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
