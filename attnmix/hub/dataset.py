"""A data set of the hub as a folder, so that a checked copy is read as a user's own folder is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnmix.core.errors import InputError, first_line, innermost
from attnmix.hub.repository import Repository

DESCRIPTIONS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
"""Files that say which other files make which configuration and split."""


@contextmanager
def dataset_folder(
    name: str, revision: str | None, configuration: str | None = None, work: Path | None = None
) -> Iterator[Path]:
    """Yield a temporary folder in `work` with the files of the configuration, checked, and all others empty.

    `datasets` finds out which files a configuration has, from the names of all and the repository's descriptions.
    """
    import datasets

    repository = Repository("dataset", name, revision)
    with tempfile.TemporaryDirectory(dir=work) as parent:
        folder = Path(parent).resolve() / name.rpartition("/")[2]
        for path in repository.paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).touch()
        _fill(folder, repository, [path for path in repository.paths if path in DESCRIPTIONS])
        try:
            builder = datasets.load_dataset_builder(str(folder), configuration, cache_dir=parent)
        except Exception as error:  # the library raises dozens of types
            reason = first_line(innermost(error)).replace(str(folder), name)
            raise InputError(f"dataset.name: {name} cannot be loaded: {reason}") from error
        files = [Path(file) for split in (builder.config.data_files or {}).values() for file in split]
        outside = [str(file) for file in files if not file.is_relative_to(folder)]
        if outside:
            raise InputError(f"dataset.name: {name} names {outside[0]}, which is not in it; download it yourself")
        wanted = {file.relative_to(folder).as_posix() for file in files}
        _fill(folder, repository, sorted(wanted.difference(DESCRIPTIONS)))
        yield folder


def _fill(folder: Path, repository: Repository, paths: list[str]) -> None:
    for path, file in repository.fetch(paths).items():
        (folder / path).unlink()
        (folder / path).symlink_to(file.resolve())
