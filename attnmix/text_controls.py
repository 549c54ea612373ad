"""Controls, swaps, class shares and own shares of texts in memory, by the formulas that the stage `measure` uses.

Each comes as sums over the tokens of each text and what they are divided by, from which means, intervals and paired
differences are made (`attnmix.core.statistics`). Shapes: N texts, L layers, M methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from attnmix.core.draw import stratified_draw
from attnmix.core.errors import InputError
from attnmix.core.statistics import Doubles
from attnmix.core.terminal import shorten
from attnmix.measure_names import CLASS_SHARE, CONTROL_NAMES, OWN_SHARE, SWAP, check_name
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.controls import SAME_PASS, classes_without_others, random_model, shuffled_words
from attnmix.measures.documents import Document
from attnmix.measures.input_parts import QUANTITIES, PartsReader, by_token, parts_obstacle
from attnmix.measures.mixing_tables import stack_rows
from attnmix.measures.sinks import SINK_MEASURES
from attnmix.measures.swaps import DONORS, SWAPS, document_swaps, next_donors
from attnmix.measures.variance_shares import MAX_TEXTS, PARTS, Moments, class_share_null, products, usable
from attnmix.models.encoding import batches_by_tokens, padded
from attnmix.models.families import family_of
from attnmix.models.segments import read_segments

CLASS_SHARE_PERMUTED = "class_share_permuted"
SAMPLE_TEXTS = 20  # texts whose own shares and swaps are computed, as they cost the square of the number of tokens
OWN_SHARE_TOKENS = 48
SWAP_TOKENS = 24
MIN_CLASS_TEXTS = 3


class OwnShareSample(NamedTuple):
    """The sample of the texts of which own shares are computed, as they cost the square of the number of tokens."""

    max_texts: int = SAMPLE_TEXTS
    max_length: int = OWN_SHARE_TOKENS
    """The number of tokens to which a text is truncated."""

    @classmethod
    def checked(cls, max_texts: Any, max_length: Any, *arguments: str) -> OwnShareSample:
        """Return a sample of numbers that a user gave as `arguments`; raise `InputError` for others."""
        for argument, number in zip(arguments or cls._fields, (max_texts, max_length), strict=True):
            if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
                raise InputError(f"{argument}: {shorten(repr(number))}; allowed: a whole number, 1 or more")
        return cls(int(max_texts), int(max_length))


OWN_SHARE_SAMPLE = OwnShareSample()


class TextTotals(NamedTuple):
    """Sums over the tokens of each text, and what they are divided by; 0 of a text that was left out."""

    sums: Doubles  # [N, L, ...]
    counts: Doubles  # of a shape that broadcasts to the sums


class Given(NamedTuple):
    """Texts in memory, and how they are read."""

    documents: Sequence[Document]
    tokenizer: Any
    pairs: bool
    batch_tokens: int
    seed: int

    def batches(self) -> list[list[Document]]:
        """Return the documents in batches, longest ones together."""
        lengths = [len(document) for document in self.documents]
        return [
            [self.documents[number] for number in numbers] for numbers in batches_by_tokens(lengths, self.batch_tokens)
        ]

    def sample(self, max_texts: int = SAMPLE_TEXTS) -> list[int]:
        """Return the numbers of at most `max_texts` texts, in which every class has its share."""
        classes = np.array([document.predicted for document in self.documents])
        return [int(number) for number in stratified_draw(classes, max_texts, self.seed)]


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
    left_out = classes_without_others(documents, _corpus_sample(documents, seed))
    if len(left_out) == len(documents):
        number, token_class = next(iter(left_out.items()))
        raise InputError(
            f"controls: corpus_value has no value for any text: no other text has a token of text {number}'s class "
            f"{token_class}; allowed: texts of which at least one has no token class to itself, or other controls"
        )
    return left_out


def control_totals(controls: Sequence[str], measurer: BatchMeasurer, given: Given) -> dict[str, TextTotals]:
    """Return the totals of the named `controls` by name, `[N, L, M]` of ratios and `[N, L]` of shares."""
    totals: dict[str, TextTotals] = {}
    names = [name for name in SAME_PASS if name in controls]
    if names or CLASS_SHARE in controls:
        if "corpus_value" in names:
            measurer.read_corpus(_corpus_batches(given))
        arrays = _same_pass(measurer, given, [*names, "others", "lengths"])
        for name in names:
            totals[name] = TextTotals(arrays[name], arrays[f"{name}_counts"])
        if CLASS_SHARE in controls:
            totals.update(_class_shares(arrays, given))
    if "shuffled_words" in controls:
        shuffled = [shuffled_words(document, given.seed) for document in given.documents]
        totals["shuffled_words"] = _own_pass("shuffled_words", measurer, given._replace(documents=shuffled))
    if "random_weights" in controls:
        random: Any = random_model(measurer.base.config, given.seed)
        random.to(measurer.base.device)
        read_segments(random, given.tokenizer, given.pairs)
        random_measurer = BatchMeasurer(random, measurer.methods, measurer.pad_token_id)
        totals["random_weights"] = _own_pass("random_weights", random_measurer, given)
    if SWAP in controls:
        totals.update(_swaps(measurer.base, given))
    return {name: totals[name] for name in _in_order(totals)}


def sink_totals(measurer: BatchMeasurer, given: Given) -> dict[str, TextTotals]:
    """Return the totals `[N, L]` of attention to the first token and of `SINK_MEASURES`, by name."""
    arrays = _same_pass(measurer, given, ["to_first", "sinks"])
    totals = {"attention_to_first": TextTotals(arrays["to_first"], arrays["to_first_counts"])}
    for place, name in enumerate(SINK_MEASURES):
        totals[name] = TextTotals(arrays["sinks"][..., place], arrays["sinks_counts"][..., place])
    return totals


def own_share_obstacle(base: PreTrainedModel) -> str | None:
    """Return why a model's vectors cannot be taken apart, if so."""
    family = family_of(base.config)
    obstacle = parts_obstacle(family)
    return None if obstacle is None else f"the model family {family.model_type} cannot be taken apart: {obstacle}"


def own_share_totals(base: PreTrainedModel, given: Given, sample: OwnShareSample = OWN_SHARE_SAMPLE) -> TextTotals:
    """Return the totals of `own_share` after each layer `[N, L]` of a sample of the texts, cut to some tokens."""
    reader = PartsReader(base)
    sums, counts = np.zeros(()), np.zeros(())
    for number in given.sample(sample.max_texts):
        document = given.documents[number].cut(sample.max_length)
        parts = reader.read(padded([document.ids.tolist()], 0, base.device))
        shares_LT = by_token(parts)[QUANTITIES.index(OWN_SHARE), 1:].double().cpu().numpy()
        if not sums.ndim:
            sums, counts = np.zeros((2, len(given.documents), len(shares_LT)))
        sums[number] = shares_LT.sum(-1)
        counts[number] = len(document)
    return TextTotals(sums, counts)


def _in_order(totals: Mapping[str, Any]) -> list[str]:
    """Return the names in the order of `CONTROL_NAMES`, those that begin with one after it."""
    order = {name: place for place, name in enumerate(CONTROL_NAMES)}
    return sorted(totals, key=lambda name: max(place for known, place in order.items() if name.startswith(known)))


def _corpus_batches(given: Given) -> list[list[Document]]:
    """Return the batches of the texts from which the control `corpus_value` takes its values."""
    drawn = _corpus_sample(given.documents, given.seed)
    return given._replace(documents=[given.documents[number] for number in drawn]).batches()


def _corpus_sample(documents: Sequence[Document], seed: int) -> list[int]:
    """Return the numbers of at most `MAX_TEXTS` texts, in which every class has its share."""
    classes = np.array([document.predicted for document in documents])
    return [int(number) for number in stratified_draw(classes, MAX_TEXTS, seed)]


def _same_pass(measurer: BatchMeasurer, given: Given, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return what one forward pass says of each text `[N, ...]`: the sums that are named, and their counts."""
    by_text: dict[str, dict[str, Any]] = {}
    for batch in given.batches():
        in_statistics = [replace(document, measured=True) for document in batch]
        for measures in measurer.measures(in_statistics):
            sums = measures.sums()
            keys = [*names, *(f"{name}_counts" for name in names)]
            by_text[measures.document.name] = {key: sums[key] for key in keys}
    return stack_rows([by_text[document.name] for document in given.documents])


def _own_pass(name: str, measurer: BatchMeasurer, given: Given) -> TextTotals:
    """Return the totals of a control that is a forward pass of its own."""
    by_text: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for batch in given.batches():
        for document, arrays in zip(batch, measurer.control_sums(name, batch), strict=True):
            by_text[document.name] = arrays
    rows = stack_rows([by_text[document.name] for document in given.documents])
    return TextTotals(rows[name], rows[f"{name}_counts"])


def _class_shares(arrays: Mapping[str, npt.NDArray[Any]], given: Given) -> dict[str, TextTotals]:
    """Return the class's share in the squared length of what others give, and its level with permuted classes.

    A share is a function of products of pairs of texts, so that each text enters by its jackknife pseudo-value, N times
    the share less N - 1 times the share without the text: their mean has the jackknife's variance, and they are drawn
    again together with the means over tokens.
    """
    classes_N = np.array([document.predicted for document in given.documents])[:MAX_TEXTS]
    tokens_N = arrays["others_counts"].ravel()[:MAX_TEXTS]
    kept = usable(classes_N, tokens_N)
    squares_NL = arrays["lengths"][:MAX_TEXTS, :, 0]
    moments = Moments.from_sums(arrays["others"][:MAX_TEXTS], squares_NL, tokens_N)
    texts = Moments(*(part[kept] for part in moments))
    whole, without = products(texts, classes_N[kept])
    place, number = PARTS.index("class"), int(kept.sum())
    whole_L, without_NL = whole.shares()[..., place], without.shares()[..., place]
    pseudo_NL = number * whole_L - (number - 1) * without_NL
    pseudo_NL += whole_L - pseudo_NL.mean(0)
    sums = np.zeros((len(given.documents), len(whole_L)))
    counts = np.zeros_like(sums)
    rows = np.flatnonzero(kept)
    sums[rows], counts[rows] = pseudo_NL, 1
    permuted_L = class_share_null(texts, classes_N[kept], given.seed)
    return {
        CLASS_SHARE: TextTotals(sums, counts),
        CLASS_SHARE_PERMUTED: TextTotals(counts * permuted_L, counts),
    }


def _swaps(base: PreTrainedModel, given: Given) -> dict[str, TextTotals]:
    """Return the swap ratio by the donor's class, or with the next text where no classes are given."""
    classes = np.array([document.predicted for document in given.documents])
    known = bool((classes >= 0).all())
    names = [f"{SWAP}_{donor}" for donor in DONORS] if known else [SWAP]
    totals: dict[str, TextTotals] = {}
    for number in given.sample():
        ids = given.documents[number].cut(SWAP_TOKENS).ids
        for name, donor in zip(names, next_donors(number, classes), strict=False):
            if donor is None:
                continue
            donor_ids = given.documents[donor].cut(SWAP_TOKENS).ids
            ratios_LT = document_swaps(base, ids, donor_ids)[:, SWAPS.index("swap")]
            if name not in totals:
                empty = np.zeros((2, len(given.documents), len(ratios_LT)))
                totals[name] = TextTotals(empty[0], empty[1])
            totals[name].sums[number] = np.nansum(ratios_LT, -1)
            totals[name].counts[number] = (~np.isnan(ratios_LT)).sum(-1)
    return totals
