"""Controls, swaps, class shares and sinks of texts in memory: sums over the tokens of each text.

Means, intervals and paired differences are computed from the sums and their counts (`attnmix.core.statistics`). Shapes:
N texts, L layers, M methods.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from attnmix.core.errors import InputError
from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS, Sums
from attnmix.measures.controls import classes_without_others
from attnmix.measures.documents import Document, Texts
from attnmix.measures.engine import SEED, Measurements, corpus_sample
from attnmix.measures.exchange import TOTAL_EFFECTS
from attnmix.measures.geometry_tables import attention_moments
from attnmix.measures.sinks import SINK_MEASURES
from attnmix.measures.variance_shares import PARTS, class_share_null, draw_texts, products
from attnmix.results.measure_names import CLASS_SHARE, CONTROL_NAMES, SHARES

CLASS_SHARE_PERMUTED = "class_share_permuted"
STANDARD_ERRORS = 3  # margin of a total effect above 1 before a warning
MIN_EXCESS = 0.005  # minimum excess beyond this margin, because equal vectors differ by rounding errors


def control_quantities(controls: Collection[str]) -> list[str]:
    """Return the quantities that `Engine.add_sums` must measure for `controls`."""
    quantities = [name for name in controls if name != CLASS_SHARE]
    if CLASS_SHARE in controls:
        quantities += ["others", "lengths"]
    return quantities


def select_controls(controls: Collection[str], sums_by_name: Mapping[str, Sums]) -> dict[str, Sums]:
    """Return the sums of `controls` in a fixed order, `[N, L, M]` for ratios and `[N, L]` for shares.

    A share can have several sums: `swap` has one for each kind of donor, `class_share` another for permuted classes.
    """
    selected: dict[str, Sums] = {}
    for name in CONTROL_NAMES:
        if name not in controls:
            continue
        for key, sums in sums_by_name.items():
            if key == name or (name in SHARES and key.startswith(f"{name}_")):
                selected[key] = sums
    return selected


def texts_without_corpus_value(documents: Sequence[Document]) -> dict[int, str]:
    """Return the texts that have no `corpus_value`: for each index, the first token class that no other text has.

    Raise `InputError` if no text has a `corpus_value`.
    """
    sample = corpus_sample(Texts(documents), SEED)
    left_out = classes_without_others(documents, sample)
    if len(left_out) == len(documents):
        number, token_class = next(iter(left_out.items()))
        raise InputError(
            f"controls: corpus_value is undefined for all texts, because each has a token class that no other text has "
            f"({token_class} in text {number}); pass more texts, or omit corpus_value"
        )
    return left_out


def sink_totals(measurements: Measurements) -> dict[str, Sums]:
    """Return the sums `[N, L]` of `attention_to_first` and of `SINK_MEASURES`; the keys are these names."""
    totals = {"attention_to_first": measurements.sums["to_first"]}
    values, counts = measurements.sums["sinks"]
    for place, name in enumerate(SINK_MEASURES):
        totals[name] = Sums(values[..., place], counts[..., place])
    return totals


def warn_of_total_effects(sums_by_name: Mapping[str, Sums]) -> None:
    """Warn if exchanging a part of a text displaces vectors further than replacing the whole text."""
    for name, exchanged in TOTAL_EFFECTS.items():
        if name not in sums_by_name or len(sums_by_name[name].values) < MIN_INTERVAL_DOCUMENTS:
            continue
        values_NL, counts_NL = sums_by_name[name]
        totals_L = np.maximum(counts_NL.sum(0), np.finfo(np.float64).tiny)
        index_L = values_NL.sum(0) / totals_L
        # Standard error of a ratio of sums over texts: sqrt(sum_n (values_n - index * counts_n)^2) / sum_n counts_n
        residuals_NL = values_NL - index_L * counts_NL
        sum_of_squares_L = np.square(residuals_NL).sum(0)
        errors_L = np.sqrt(sum_of_squares_L) / totals_L
        excess_L = index_L - 1 - STANDARD_ERRORS * errors_L
        layer = int(excess_L.argmax())
        if excess_L[layer] > MIN_EXCESS:
            warnings.warn(
                f"own_share: exchanging {exchanged} moves vectors further than replacing the whole text (ratio of "
                f"squares {index_L[layer]:.2f} in layer {layer + 1}); exchanged texts may be unlike real texts",
                stacklevel=4,
            )


def add_class_shares(measurements: Measurements) -> None:
    """Add the class share of other tokens' contributions (squared lengths), and its 95 % quantile for permuted classes.

    A class share depends on products of pairs of texts. The value of a text is therefore its jackknife pseudo-value: N
    times the share minus N - 1 times the share without the text. The mean of the pseudo-values has the jackknife
    variance. Pseudo-values are resampled over texts, like the means over tokens.
    """
    texts = measurements.texts
    drawn = draw_texts(texts.predicted, SEED)
    classes_N = texts.predicted[drawn]
    moments, is_kept_N = attention_moments(measurements.sums, drawn.tolist(), classes_N)
    kept_classes = classes_N[is_kept_N]
    whole, without = products(moments, kept_classes)
    class_part = PARTS.index("class")
    number = len(kept_classes)
    whole_L = whole.shares()[..., class_part]
    without_NL = without.shares()[..., class_part]
    pseudo_NL = number * whole_L - (number - 1) * without_NL
    pseudo_NL += whole_L - pseudo_NL.mean(0)  # their mean is the share itself, without jackknife bias correction
    kept_sums = Sums(pseudo_NL, np.ones_like(pseudo_NL))
    kept_texts = drawn[is_kept_N].tolist()
    share = kept_sums.scatter(kept_texts, len(texts))
    permuted_L = class_share_null(moments, kept_classes, SEED)
    measurements.sums[CLASS_SHARE] = share
    measurements.sums[CLASS_SHARE_PERMUTED] = Sums(share.counts * permuted_L, share.counts)
