"""Controls, swaps, class shares and own shares of texts in memory, by the formulas that the stage `measure` uses.

Each comes as sums over the tokens of each text and what they are divided by, from which means, intervals and paired
differences are made (`attnmix.core.statistics`). Shapes: N texts, L layers, M methods.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from attnmix.core.errors import InputError
from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS, Sums
from attnmix.core.terminal import shorten
from attnmix.measure_names import CLASS_SHARE, CONTROL_NAMES, SWAP, check_name
from attnmix.measures.controls import classes_without_others
from attnmix.measures.documents import Document, Texts
from attnmix.measures.engine import OWN_SHARE_WAYS, Measurements, OwnShareSample, corpus_sample
from attnmix.measures.exchange import TOTAL_EFFECTS
from attnmix.measures.geometry_tables import attention_moments
from attnmix.measures.sinks import SINK_MEASURES
from attnmix.measures.variance_shares import MAX_TEXTS, PARTS, class_share_null, products

CLASS_SHARE_PERMUTED = "class_share_permuted"
MIN_CLASS_TEXTS = 3
OWN_SHARE_SAMPLE = OwnShareSample()
STANDARD_ERRORS = 3  # by which a total effect exceeds 1 before it is reported


def check_own_share_sample(by: Any, max_texts: Any, max_length: Any, *arguments: str) -> OwnShareSample:
    """Return a sample of numbers that a user gave as `arguments`; raise `InputError` for others."""
    check_name("by", by, OWN_SHARE_WAYS)
    names = arguments or ("max_texts", "max_length")
    for argument, number in zip(names, (max_texts, max_length), strict=True):
        if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
            raise InputError(f"{argument}: {shorten(repr(number))}; allowed: a whole number, 1 or more")
    return OwnShareSample(int(max_texts), int(max_length), by)


def check_control_names(controls: Any, labels: Any) -> None:
    """Raise `InputError` for an unknown control, and for one that needs labels without any."""
    if not isinstance(controls, list):
        raise InputError(f"controls: {shorten(repr(controls))}; allowed: a list of {', '.join(CONTROL_NAMES)}")
    for name in controls:
        check_name("controls", name, CONTROL_NAMES)
    if CLASS_SHARE in controls and labels is None:
        raise InputError("controls: class_share needs `labels`, a class for each text")


def check_controls(controls: Any, classes: npt.NDArray[np.int64] | None, texts: int) -> None:
    """Raise `InputError` for an unknown control, and for one that needs more texts or classes than are given."""
    check_control_names(controls, classes)
    for name in controls:
        if name in ("corpus_value", SWAP) and texts < 2:
            raise InputError(f"controls: {name} needs other texts, and one is given; allowed: two texts or more")
    if classes is None or CLASS_SHARE not in controls:
        return
    sizes = np.unique(classes, return_counts=True)[1]
    if len(sizes) < 2 or sizes.min() < MIN_CLASS_TEXTS:
        raise InputError(
            f"labels: {len(sizes)} classes, of which the smallest has {sizes.min()} texts; class_share needs two "
            f"classes or more, each of {MIN_CLASS_TEXTS} texts or more"
        )


def texts_without_corpus_value(documents: Sequence[Document], seed: int) -> dict[int, str]:
    """Return the token class that no other text has, by the number of each text that has no `corpus_value`.

    Raise `InputError` where that is every text.
    """
    left_out = classes_without_others(documents, corpus_sample(Texts(documents), seed))
    if len(left_out) == len(documents):
        number, token_class = next(iter(left_out.items()))
        raise InputError(
            f"controls: corpus_value has no value for any text: no other text has a token of text {number}'s class "
            f"{token_class}; allowed: texts of which at least one has no token class to itself, or other controls"
        )
    return left_out


def control_quantities(controls: Collection[str]) -> list[str]:
    """Return the quantities that `Engine.add_sums` measures for the named `controls`."""
    quantities = [name for name in controls if name != CLASS_SHARE]
    return [*quantities, "others", "lengths"] if CLASS_SHARE in controls else quantities


def control_totals(controls: Collection[str], measurements: Measurements, seed: int) -> dict[str, Sums]:
    """Return the sums of the named `controls`, `[N, L, M]` of ratios and `[N, L]` of shares, in a fixed order."""
    totals: dict[str, Sums] = {}
    for name in CONTROL_NAMES:
        if name == CLASS_SHARE and name in controls:
            totals.update(_class_shares(measurements, seed))
        elif name in controls:
            totals.update((key, sums) for key, sums in measurements.sums.items() if _is_of(key, name))
    return totals


def _is_of(key: str, control: str) -> bool:
    """Return True for the sums of a control; swaps have one for each kind of donor."""
    return key.startswith(SWAP) if control == SWAP else key == control


def sink_totals(measurements: Measurements) -> dict[str, Sums]:
    """Return the sums `[N, L]` of attention to the first token and of `SINK_MEASURES`, by name."""
    totals = {"attention_to_first": measurements.sums["to_first"]}
    values, counts = measurements.sums["sinks"]
    for place, name in enumerate(SINK_MEASURES):
        totals[name] = Sums(values[..., place], counts[..., place])
    return totals


def warn_of_total_effects(sums_by_name: Mapping[str, Sums]) -> None:
    """Warn if exchanging a part of a text moves vectors further than replacing the whole text by another does."""
    for name, exchanged in TOTAL_EFFECTS.items():
        if name not in sums_by_name or len(sums_by_name[name].values) < MIN_INTERVAL_DOCUMENTS:
            continue
        values_NL, counts_NL = sums_by_name[name]
        totals_L = np.maximum(counts_NL.sum(0), np.finfo(np.float64).tiny)
        index_L = values_NL.sum(0) / totals_L
        errors_L = np.sqrt(np.square(values_NL - index_L * counts_NL).sum(0)) / totals_L
        excess_L = index_L - 1 - STANDARD_ERRORS * errors_L
        layer = int(excess_L.argmax())
        if excess_L[layer] > 0:
            warnings.warn(
                f"own_share: exchanging {exchanged} moves vectors further than replacing the whole text (ratio of "
                f"squares {index_L[layer]:.2f} in layer {layer + 1}); the exchanged texts may be unlike real texts",
                stacklevel=4,
            )


def _class_shares(measurements: Measurements, seed: int) -> dict[str, Sums]:
    """Return the class's share in the squared length of what others give, and its level with permuted classes.

    A share is a function of products of pairs of texts, so that each text enters by its jackknife pseudo-value, N times
    the share less N - 1 times the share without the text: their mean has the jackknife's variance, and they are drawn
    again together with the means over tokens.
    """
    texts = measurements.texts
    classes_N = texts.predicted[:MAX_TEXTS]
    moments, kept = attention_moments(measurements.sums, classes_N)
    whole, without = products(moments, classes_N[kept])
    place, number = PARTS.index("class"), int(kept.sum())
    whole_L, without_NL = whole.shares()[..., place], without.shares()[..., place]
    pseudo_NL = number * whole_L - (number - 1) * without_NL
    pseudo_NL += whole_L - pseudo_NL.mean(0)
    numbers = np.flatnonzero(kept).tolist()
    share = Sums(pseudo_NL, np.ones_like(pseudo_NL)).scatter(numbers, len(texts))
    permuted_L = class_share_null(moments, classes_N[kept], seed)
    return {CLASS_SHARE: share, CLASS_SHARE_PERMUTED: Sums(share.counts * permuted_L, share.counts)}
