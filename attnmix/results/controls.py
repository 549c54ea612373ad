"""Controls, swaps, class shares and sinks of texts in memory, as sums over the tokens of each text.

Means, intervals and paired differences are computed from these sums and their counts (`attnmix.core.statistics`).
Shapes: N texts, L layers, M methods.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from attnmix.core.errors import InputError
from attnmix.core.names import OWN_SHARE, TOTAL_EFFECTS
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Draws, Sums
from attnmix.measures.controls import classes_without_others
from attnmix.measures.documents import Document, Texts
from attnmix.measures.engine import SEED, Measurements, corpus_sample
from attnmix.measures.geometry_tables import attention_moments
from attnmix.measures.sample_tables import own_share_table
from attnmix.measures.sinks import SINK_MEASURES
from attnmix.measures.total_effects import find_excess
from attnmix.measures.variance_shares import PARTS, Moments, class_share_null, draw_texts, products
from attnmix.results.measure_names import CLASS_SHARE, CLASS_SHARE_PERMUTED, CONTROL_NAMES, SHARES

MODEL = "model"  # name of the model in a table of a single model


def control_quantities(controls: Collection[str]) -> list[str]:
    """Return the names of the quantities that `Engine.add_sums` must measure for `controls`."""
    quantities = [name for name in controls if name != CLASS_SHARE]
    if CLASS_SHARE in controls:
        # The class share is computed from the contributions of other tokens and from their squared lengths.
        quantities += ["others", "lengths"]
    return quantities


def select_controls(controls: Collection[str], sums_by_name: Mapping[str, Sums]) -> dict[str, Sums]:
    """Return the sums of `controls` in the order of `CONTROL_NAMES`, `[N, L, M]` for ratios and `[N, L]` for shares.

    The axes are N texts, L layers and M methods. A share can have several sums, whose names begin with the name of the
    share: `swap` has sums for each kind of donor, and `class_share` has sums for permuted classes.
    """
    selected: dict[str, Sums] = {}
    for name in CONTROL_NAMES:
        if name not in controls:
            continue
        for key, sums in sums_by_name.items():
            is_variant = name in SHARES and key.startswith(f"{name}_")
            if key == name or is_variant:
                selected[key] = sums
    return selected


def texts_without_corpus_value(documents: Sequence[Document]) -> dict[int, str]:
    """Return the texts for which the control `corpus_value` is undefined.

    The control replaces values by the mean over tokens of the same class in other texts. The keys are the indices of
    the texts with a token class that no other text has; each value is the first such class. Raise `InputError` if the
    control is undefined for all texts.
    """
    sample = corpus_sample(Texts(documents), SEED)
    excluded = classes_without_others(documents, sample)
    if len(excluded) == len(documents):
        number, token_class = next(iter(excluded.items()))
        raise InputError(
            f"controls: corpus_value is undefined for all texts, because each has a token class that no other text has "
            f"({token_class} in text {number}); pass more texts, or omit corpus_value"
        )
    return excluded


def sink_totals(measurements: Measurements) -> dict[str, Sums]:
    """Return the sums `[texts, layers]` of `attention_to_first` and of each measure in `SINK_MEASURES`, by name."""
    totals = {"attention_to_first": measurements.sums["to_first"]}
    values, counts = measurements.sums["sinks"]  # [texts, layers, measures]
    for index, name in enumerate(SINK_MEASURES):
        totals[name] = Sums(values[..., index], counts[..., index])
    return totals


def warn_of_total_effects(sums_by_name: Mapping[str, Sums]) -> None:
    """Warn if exchanging only some tokens of a text displaces vectors further than exchanging all tokens.

    `sums_by_name` contains the sums `[N, L]` of own shares and, if measured, those of the total effects.
    """
    texts = len(sums_by_name[OWN_SHARE].values)
    table = own_share_table({MODEL: sums_by_name}, Draws(texts, BOOTSTRAP_SAMPLES, SEED))
    excess = find_excess(table)
    if excess is not None:
        warnings.warn(
            f"own_share: exchanging {TOTAL_EFFECTS[excess['quantity']]} moves vectors further than replacing the whole "
            f"text (ratio of squares {excess['mean']:.2f} in layer {excess['layer']}); exchanged texts may be unlike "
            "real texts",
            stacklevel=4,
        )


def add_class_shares(measurements: Measurements) -> None:
    """Add the sums of `class_share` and of `class_share_permuted` to the measurements.

    The contributions of other tokens have a part that is common to the texts of a class. The class share is the squared
    length of this part, divided by that of the contributions. The share for permuted classes is the 95 % quantile over
    random permutations of the classes. Axes: N sampled texts, U usable texts among them, L layers.
    """
    texts = measurements.texts
    sampled_N = draw_texts(texts.predicted, SEED)  # indices of texts
    classes_N = texts.predicted[sampled_N]
    # Usable texts have two or more tokens, and a class with three or more such texts.
    moments, is_usable_N = attention_moments(measurements.sums, sampled_N.tolist(), classes_N)
    classes_U = classes_N[is_usable_N]
    pseudo_values_UL = _compute_pseudo_values(moments, classes_U)
    sums_of_usable = Sums(pseudo_values_UL, np.ones_like(pseudo_values_UL))  # a text counts once
    usable_texts = sampled_N[is_usable_N].tolist()
    share = sums_of_usable.scatter(usable_texts, len(texts))  # all other texts have sums and counts of 0
    # The quantile is a single value per layer, which every usable text receives.
    permuted_L = class_share_null(moments, classes_U, SEED)
    measurements.sums[CLASS_SHARE] = share
    measurements.sums[CLASS_SHARE_PERMUTED] = Sums(share.counts * permuted_L, share.counts)


def _compute_pseudo_values(moments: Moments, classes_N: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the jackknife pseudo-value `[N, L]` of the class share for each text: N s - (N - 1) s_n.

    Here, s is the share of all N texts in each of L layers, and s_n the share without text n. A class share is computed
    from products between the vectors of two texts, so it is undefined for a single text. Pseudo-values can be resampled
    over texts like other values, and the variance of their mean is the jackknife variance. They are shifted so that
    their mean is s, without a correction for bias.
    """
    all_texts, leave_one_out = products(moments, classes_N)
    class_index = PARTS.index("class")
    share_L = all_texts.shares()[..., class_index]
    shares_without_NL = leave_one_out.shares()[..., class_index]
    number = len(classes_N)
    pseudo_values_NL = number * share_L - (number - 1) * shares_without_NL
    pseudo_values_NL += share_L - pseudo_values_NL.mean(0)
    return pseudo_values_NL
