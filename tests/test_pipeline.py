"""The pipeline on tiny input: dvc.yaml names the parameters that a stage reads and the files that it writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from conftest import REPOSITORY, toy_reviews, write_parameters, write_tiny_bert

from attnmix.core.options import Parameters
from stages.common.parameters import read_parameters
from stages.common.resume import UNFINISHED, unfinished_folder

PIPELINE: dict[str, Any] = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))
STAGES = {name: stage.get("do", stage) for name, stage in PIPELINE["stages"].items()}
ONLY_FOR_A_HUB = {"dataset.revision", "model.revision"}


def all_keys(section: str) -> set[str]:
    fields = getattr(Parameters.model_fields[section].annotation, "model_fields", None)
    return {f"{section}.{key}" for key in fields} if fields else {section}


ALL_KEYS = {key for section in Parameters.model_fields for key in all_keys(section)}


def declared_keys(stage: str) -> set[str]:
    """The parameters that dvc.yaml names for a stage; a section stands for its keys, the file for all."""
    names = STAGES[stage]["params"]
    if {"params.yaml": None} in names:
        return ALL_KEYS
    return set().union(*(all_keys(name) if name in Parameters.model_fields else {name} for name in names))


def outputs(stage: str) -> list[str]:
    kinds = ("outs", "metrics", "plots")
    outs = [out for kind in kinds for out in STAGES[stage].get(kind, ())]
    return [out if isinstance(out, str) else next(iter(out)) for out in outs]


def is_in(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


class Recorder:
    """The parameters, or a section of them, that note which keys are read."""

    def __init__(self, section: Any, prefix: str, seen: set[str]) -> None:
        self._section, self._prefix, self._seen = section, prefix, seen

    def __getattr__(self, key: str) -> Any:
        said = getattr(type(self._section), key, None)
        if isinstance(said, property):  # which reads keys itself
            return said.fget(self) if said.fget else None
        value = getattr(self._section, key)
        if isinstance(value, Recorder):
            return value
        if key in type(self._section).model_fields:
            if hasattr(type(value), "model_fields"):
                return Recorder(value, f"{key}.", self._seen)
            self._seen.add(self._prefix + key)
        return value

    def model_copy(self, update: dict[str, Any]) -> Any:
        return Recorder(self._section.model_copy(update=update), self._prefix, self._seen)

    def model_dump(self) -> Any:
        self._seen |= all_keys(self._prefix.removesuffix(".")) if self._prefix else ALL_KEYS
        return self._section.model_dump()


class Opened:
    """Files under the working folder that were there and are opened from now on, as far as Python opens them."""

    def __init__(self) -> None:
        self.paths: set[str] | None = None
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.paths is not None and isinstance(arguments[0], (str, os.PathLike)):
            path = Path(os.path.abspath(arguments[0]))  # noqa: PTH100 (without following links)
            if path.is_relative_to(Path.cwd()) and path.is_file():
                self.paths.add(path.relative_to(Path.cwd()).as_posix())


class Observed(NamedTuple):
    """What a stage did on tiny input."""

    keys: set[str]
    opened: set[str]
    written: set[str]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Observed]:
    """Every stage, run on tiny input in one folder, in turn; its name has spaces, a quote and letters of all kinds."""
    folder = tmp_path_factory.mktemp("Möbius' Ordner 模型 ")
    checkpoint = write_tiny_bert(folder / "bert", layers=2)
    toy_reviews(40, 0).to_csv(folder / "reviews.csv", index=False)
    write_parameters(
        folder,
        dataset={"name": "reviews.csv"},
        model={"name": str(checkpoint)},
        finetune={"epochs": 1, "max_length": 40},
        capture={"documents": [0, 1], "max_length": 40},
        measure={"documents": 3, "gradient_documents": 1},
        faithfulness={"documents": 2, "max_length": 20},
        render={"dpi": 50},
    )
    found = {}
    opened = Opened()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        parameters = read_parameters()
        for name in STAGES:
            module = import_module(f"stages.{name}")
            if hasattr(module, "unfinished_folder"):
                # It takes what dvc.yaml names out of all parameters; that is no use of them.
                patch.setattr(
                    module, "unfinished_folder", lambda name, _, root: unfinished_folder(name, parameters, root)
                )
            before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
            keys: set[str] = set()
            opened.paths = set()
            recorder: Any = Recorder(parameters, "", keys)
            module.main(recorder)
            read, opened.paths = opened.paths, None
            after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
            written = {str(path.relative_to(folder)) for path, time in after.items() if before.get(path) != time}
            assert before.keys() <= after.keys()
            found[name] = Observed(keys, read, written)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_stage_names_exactly_the_parameters_that_it_reads(observed: dict[str, Observed], stage: str) -> None:
    keys = observed[stage].keys - ONLY_FOR_A_HUB
    if stage == "reduce":  # no tensor of torch: its arithmetic is what `prepare_process` puts into the environment
        keys |= {"arithmetic"}
    assert declared_keys(stage) - ONLY_FOR_A_HUB == keys


@pytest.mark.parametrize("stage", STAGES)
def test_stage_writes_every_output_that_it_names_and_nothing_else(observed: dict[str, Observed], stage: str) -> None:
    written = observed[stage].written
    assert [out for out in outputs(stage) if not any(is_in(path, [out]) for path in written)] == []
    # Until the stage `sources` is there, `download` says what is to be watched.
    beside = ["reports/sources.json"] if stage == "download" else []
    assert {path for path in written if not is_in(path, [*outputs(stage), *beside])} == set()


@pytest.mark.parametrize("stage", STAGES)
def test_stage_opens_no_file_that_it_does_not_name(observed: dict[str, Observed], stage: str) -> None:
    named = [*STAGES[stage]["deps"], *outputs(stage), str(UNFINISHED)]
    source = ["reviews.csv", "bert"] if stage in ("sources", "download") else []  # named in params.yaml
    assert {path for path in observed[stage].opened if not is_in(path, [*named, *source])} == set()
    assert observed[stage].opened


@pytest.mark.parametrize("profile", sorted((REPOSITORY / "profiles").glob("*.txt")), ids=lambda path: path.stem)
def test_profile_is_a_valid_choice_of_known_parameters(tmp_path: Path, profile: Path) -> None:
    """As `dvc exp run -S` writes it into params.yaml, by DVC's own writer."""
    from dvc.utils.hydra import apply_overrides

    lines = profile.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    chosen = [line for line in lines if not line.startswith("#")]
    assert [line for line in chosen if any(map(str.isspace, line)) or not line] == []  # a shell parts them
    write_parameters(tmp_path)
    apply_overrides(tmp_path / "params.yaml", chosen)
    parameters = read_parameters(tmp_path / "params.yaml")
    for key, value in (line.split("=", 1) for line in chosen):
        assert key in ALL_KEYS
        section, name = key.split(".")
        assert getattr(getattr(parameters, section), name) == yaml.safe_load(value)
    texts = parameters.dataset.test_limit
    assert texts is None or max(parameters.capture.documents) < texts
