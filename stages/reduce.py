"""Project the captured vectors to two dimensions with UMAP or principal components, and score the maps.

    python -m stages reduce

Writes `features/reduce/`, `reports/plots/reduce/` and `reports/metrics/reduce.json`.
"""

from pathlib import Path

from attnmix.core.store.runs import Run
from attnmix.runs.reduce import reduce
from stages.common.parameters import Parameters


def main(parameters: Parameters) -> None:
    reduce(parameters.umap, Run(Path()))
