"""Which experiments are compared, and which of them differ in nothing but the seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from attnmix.core.errors import InputError
from study.runs import Run, dvc_in, last_words
from study.store import Experiment, finished, git, parameters, plot

SEED = "seed"
LONGEST_LABEL = 60  # characters
WANTED = ("mixing", "mixing_overall")
"""Of `reports/plots/`; an experiment without one of them cannot be compared."""
NONE = (
    "no finished experiment {which}; `dvc exp run --queue -S model.name=A,B -S seed=0,1,2`, then `dvc queue start`, "
    "make some"
)


class Group(NamedTuple):
    """Experiments that differ in nothing but the seed."""

    values: tuple[str, ...]
    """Of the parameters in which the groups differ."""
    tables: dict[str, dict[int, pd.DataFrame]]
    """Each of `WANTED` by seed."""


class Compared(NamedTuple):
    """All groups, and why an experiment is in none."""

    keys: list[str]
    """The parameters in which the groups differ."""
    groups: list[Group]
    left_out: list[str]

    def differing(self, group: Group) -> list[str]:
        """`key=value` of each parameter in which the groups differ."""
        return [f"{key}={value}" for key, value in zip(self.keys, group.values, strict=True)]

    def label(self, group: Group) -> str:
        """The same in one line; a number where that would be long for any of them."""
        labels = [", ".join(self.differing(each)) or "all" for each in self.groups]
        place = self.groups.index(group)
        return labels[place] if max(map(len, labels)) <= LONGEST_LABEL else f"group {place + 1}"


def compared(folder: Path, names: Sequence[str] = ()) -> Compared:
    """The finished experiments of the current commit, or those `names` and commits; `InputError` where there is none.

    What failed, is not finished, lacks a table, or repeats another's parameters and seed is left out with its reason.
    """
    commits, left_out = _chosen(folder, names)
    there: dict[tuple[tuple[str, str], ...], _Found] = {}
    for name, commit in commits.items():
        each = _read(Experiment(0, name, commit), folder)
        same = there.setdefault(tuple(each.values.items()), each)
        lacking = [wanted for wanted in WANTED if wanted not in each.tables]
        if same is not each:
            left_out.append(f"{name} has the parameters and the seed of {same.name}")
        elif lacking:
            del there[tuple(each.values.items())]
            left_out.append(f"{name} has no table {' and no table '.join(lacking)}")
    if not there:
        which = f"named {', '.join(names)}" if names else "of the current commit"
        raise InputError("; ".join([NONE.format(which=which), *left_out]))
    known = dict.fromkeys(key for each in there.values() for key in each.values)
    keys = [key for key in known if key != SEED and len({each.values.get(key) for each in there.values()}) > 1]
    groups: dict[tuple[str, ...], Group] = {}
    for each in there.values():
        own = tuple(each.values.get(key, "absent") for key in keys)
        group = groups.setdefault(own, Group(own, {wanted: {} for wanted in WANTED}))
        for wanted, table in each.tables.items():
            group.tables[wanted][int(each.values[SEED])] = table
    return Compared(keys, [groups[own] for own in sorted(groups)], left_out)


class _Found(NamedTuple):
    """One finished experiment: its parameters, by key, and those of `WANTED` that it has."""

    name: str
    values: dict[str, str]
    tables: dict[str, pd.DataFrame]


def _read(experiment: Experiment, folder: Path) -> _Found:
    read = {wanted: plot(experiment, wanted, folder) for wanted in WANTED}
    tables = {wanted: table for wanted, table in read.items() if table is not None}
    return _Found(experiment.name, _flat(parameters(experiment, folder)), tables)


def _chosen(folder: Path, names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Commit of each experiment by name, and what is not finished."""
    listed = finished(folder)
    if names:
        newest = {name: commit for _, name, commit in reversed(listed)}
        return {name: newest.get(name) or _commit(folder, name, newest) for name in dict.fromkeys(names)}, []
    here = git(folder, "rev-parse", "HEAD").strip()
    found = {name: commit for base, name, commit in sorted(listed, key=lambda each: each[1]) if base == here}
    return found, _unfinished(dvc_in(folder), here)


def _commit(folder: Path, name: str, known: Mapping[str, str]) -> str:
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    except InputError:
        there = f"there are {', '.join(sorted(known))}" if known else "there are none"
        raise InputError(f"{name} is no finished experiment and no commit; {there}") from None


def _unfinished(dvc: Run, base: str) -> list[str]:
    """What is queued, runs or failed on the commit `base`, with the last words of what failed."""
    shown = next(each for each in json.loads(dvc("exp", "show", "--json")) if each["rev"] == base)
    said = []
    for each in shown["experiments"] or []:
        executor = each["executor"] or {}
        state, name = executor.get("state"), each["name"] or each["revs"][0]["rev"][:7]
        if state == "failed":
            log = Path((executor.get("local") or {}).get("log") or "")
            words = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            said.append(f"{name} failed: {last_words(words)}")
        elif state in ("queued", "running"):
            said.append(f"{name} is not finished: {state}")
    return sorted(said)


def _flat(values: Mapping[str, Any]) -> dict[str, str]:
    """By `section.key`, as text."""
    flat: dict[str, str] = {}
    for section, value in values.items():
        pairs = value.items() if isinstance(value, Mapping) else [("", value)]
        flat |= {f"{section}.{key}".rstrip("."): _plain(each) for key, each in pairs}
    return flat


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
