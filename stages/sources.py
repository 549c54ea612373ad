"""Note the hashes of the user's own data or model, so that `download` runs again when a file of them has changed.

    python -m stages sources

DVC cannot watch a path that may as well be a hub identifier, so this stage runs at every `dvc repro` while there is
such a source; else dvc.yaml has no such stage. Writes `reports/sources.json`.
"""

from pathlib import Path

from attnmix.core.options import Parameters
from attnmix.store.runs import Run
from attnmix.store.writers import write_sources
from stages.common.source_hashes import hash_sources


def main(parameters: Parameters) -> None:
    run = Run(Path())
    write_sources(hash_sources(parameters, run), run.sources_file)
