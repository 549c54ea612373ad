"""Note what data or a model of one's own are by content, so that `download` runs again when a file of them has changed.

    python -m stages sources

DVC can watch no path that may as well be a hub's identifier, so this stage runs at every `dvc repro` while there is
such a source; else dvc.yaml has no such stage. Writes `reports/sources.json`.
"""

from pathlib import Path

from attnmix.core.options import Parameters
from attnmix.store.runs import Run
from attnmix.store.writers import write_sources
from stages.common.source_hashes import look_at_sources


def main(parameters: Parameters) -> None:
    run = Run(Path())
    write_sources(look_at_sources(parameters, run), run.sources_file)
