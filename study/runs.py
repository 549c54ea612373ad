"""Run one experiment for each seed in DVC's queue, and wait for them; the workspace stays as it is."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnmix.core.errors import InputError
from study.store import Experiment, find, is_by_this_code, name_of, parameters, read_yaml

LEFT_OUT = ("render",)  # its figures and page are of one run; the study draws its own
NOT_ALWAYS = "sources"  # DVC has it before `download` where it is there
ROW = re.compile(r"(?P<task>[0-9a-f]{7})\s+(?P<name>\S+)\s.*\s(?P<state>Queued|Running|Success|Failed)")
PLAIN = re.compile(r"[\w./:+-]+|\[[\w.,-]*\]")
POLL_SECONDS = 5
UNFINISHED = ("Queued", "Running")

Run = Callable[..., str]


class Plan(NamedTuple):
    """What every seed's experiment runs."""

    overrides: dict[str, str]  # of params.yaml, as they stand in the profile
    stages: list[str]


def read_plan(folder: Path, profile: Path, dataset: str) -> Plan:
    """The profile's `key=value` lines with `dataset.name`, and every stage of dvc.yaml but `render`.

    A local `dataset` becomes an absolute path, since the queue works in folders of its own.
    """
    overrides = {}
    for line in profile.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            key, equals, value = line.strip().partition("=")
            if not equals:
                raise InputError(f"{profile}: {line!r} is no key=value")
            overrides[key] = value
    local = folder / dataset
    overrides["dataset.name"] = str(local.resolve()) if local.exists() else dataset
    pipeline = read_yaml((folder / "dvc.yaml").read_text(encoding="utf-8"))
    return Plan(overrides, [stage for stage in pipeline["stages"] if stage not in (NOT_ALWAYS, *LEFT_OUT)])


def wanted(plan: Plan, seed: int, folder: Path) -> dict[str, Any]:
    """params.yaml with the plan's values and the seed, as the experiment will have it."""
    values: dict[str, Any] = read_yaml((folder / "params.yaml").read_text(encoding="utf-8"))
    for key, text in {**plan.overrides, "seed": str(seed)}.items():
        *path, last = key.split(".")
        section = values
        for name in path:
            section = section.get(name, {})
        if last not in section:
            raise InputError(f"{key} is no key of params.yaml")
        section[last] = text if key == "dataset.name" else read_yaml(text)
    return values


def missing_reason(experiment: Experiment | None, plan: Plan, seed: int, folder: Path) -> str | None:
    """Why this seed's experiment has to run; None where it is finished, by this code and these parameters."""
    if experiment is None:
        return f"there is no finished experiment {name_of(seed)}"
    if parameters(experiment, folder) != wanted(plan, seed, folder):
        return f"{experiment.name} had other parameters"
    if not is_by_this_code(experiment, folder):
        return f"{experiment.name} ran other code"
    return None


def check_cache(folder: Path, cache: Path) -> None:
    """`InputError` where DVC could not finish an experiment, which it would notice only after all the work.

    At an experiment's end DVC looks up every file under `plots` of dvc.yaml, also those of the stages left out.
    """
    lock = read_yaml((folder / "dvc.lock").read_text(encoding="utf-8")) if (folder / "dvc.lock").exists() else {}
    for stage in LEFT_OUT:
        for out in lock.get("stages", {}).get(stage, {}).get("outs", []):
            if not (cache / "files/md5" / out["md5"][:2] / out["md5"][2:]).exists():
                raise InputError(
                    f"{out['path']}, as dvc.lock names it, is not in DVC's cache, and DVC ends no experiment without "
                    "it; run `make repro` once before the study"
                )


def run_missing(plan: Plan, seeds: Sequence[int], folder: Path, jobs: int) -> dict[str, str]:
    """Queue what is missing, wait until it is through; what failed, by name, with the last line of its log."""
    run = dvc_in(folder)
    before = queue_status(run("queue", "status"))
    names = []
    check_cache(folder, folder / run("cache", "dir").strip())
    for seed in seeds:
        experiment, name = find(seed, folder), name_of(seed)
        reason = missing_reason(experiment, plan, seed, folder)
        if reason is None:
            print(f"{name}: finished before, kept", flush=True)
            continue
        names.append(name)
        if before.get(name) in UNFINISHED:
            print(f"{name}: in the queue already", flush=True)
            continue
        if name in before:
            run("queue", "remove", name)
        if experiment is not None:  # a name stands for one experiment
            run("exp", "remove", name)
        _queue(run, name, {**plan.overrides, "seed": str(seed)}, plan.stages)
        print(f"{name}: queued, as {reason}", flush=True)
    return wait(run, names, jobs) if names else {}


def _queue(run: Run, name: str, overrides: Mapping[str, str], stages: Sequence[str]) -> None:
    settings = [part for key, value in overrides.items() for part in ("-S", f"{key}={_quoted(value)}")]
    run("exp", "run", "--queue", "--name", name, *settings, *stages)


def _quoted(value: str) -> str:
    """As the override's grammar takes it: a path may hold characters that mean something there."""
    if PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def wait(run: Run, names: Sequence[str], jobs: int, pause: float = POLL_SECONDS) -> dict[str, str]:
    """Until none of the experiments is queued or running; the failed ones with the last line that they said."""
    run("queue", "start", "--jobs", str(jobs))
    said: dict[str, str] = {}
    while True:
        text = run("queue", "status")
        states = queue_status(text)
        for name in names:
            state = _with_stage(run, name, states.get(name, "not in the queue"))
            if said.get(name) != state:
                said[name] = state
                print(f"{time.strftime('%H:%M:%S')} {name}: {state}", flush=True)
        if not any(states.get(name) in UNFINISHED for name in names):
            break
        if not workers(text) and "Running" not in states.values():  # a worker ends when it is killed, or idle
            run("queue", "start", "--jobs", str(jobs))
        time.sleep(pause)
    return {name: last_words(run("queue", "logs", name)) for name in names if states.get(name) == "Failed"}


def queue_status(text: str) -> dict[str, str]:
    """Name to state, from what `dvc queue status` prints."""
    rows = filter(None, (ROW.fullmatch(line.strip()) for line in text.splitlines()))
    return {row["name"]: row["state"] for row in rows}


def workers(text: str) -> int:
    """How many workers there are, from what `dvc queue status` prints."""
    counts = re.search(r"Worker status: (\d+) active, (\d+) idle", text)
    return int(counts[1]) + int(counts[2]) if counts else 0


def last_words(log: str) -> str:
    """The last line of a log that names a stage's own error, else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it left no log"])[-1]


def _with_stage(run: Run, name: str, state: str) -> str:
    if state != "Running":
        return state.lower()
    stages = re.findall(r"Running stage '(\w+)'", run("queue", "logs", name))
    return f"running {stages[-1]}" if stages else "running"


def dvc_in(folder: Path) -> Run:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "dvc", *arguments]
        # Files, not pipes: the queue's worker keeps open what it inherits, and a pipe is waited for until it ends.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(command, cwd=folder, stdout=out, stderr=err, check=False)
            for file in (out, err):
                file.seek(0)
            said = out.read()
            if done.returncode:
                raise InputError(f"dvc {' '.join(arguments[:2])}: {last_words(err.read() + said)}")
        return said

    return run
