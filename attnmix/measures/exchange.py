"""Exchange of input tokens: displacements of a token's vector if the token itself or all other tokens are replaced.

For the vector y_i of token i after a layer, and a donor text x' with the same special tokens at the same positions:

    o_i = |y_i(x'_i, x_others) - y_i(x)|      token i is replaced by the donor's token
    a_i = |y_i(x_i, x'_others) - y_i(x)|      all other tokens are replaced
    j_i = |y_i(x') - y_i(x)|                  all tokens are replaced
    own share = o_i / (o_i + a_i)

The model itself is unchanged and attention is recomputed. No rules for activations, norms or biases are needed, and all
families are supported. Equal tokens at the same position of both texts cause no displacement. The own share compares
two displacements; it is not additive, because tokens interact and are not independent. Ratios of squared displacements
have the form of the indices of variance-based sensitivity analysis (Sobol', 2001; Jansen, 1999) for two groups of
inputs, token i and the other tokens. o^2 / j^2 is the total effect of token i, a^2 / j^2 is the total effect of the
other tokens, and 1 - a^2 / j^2 is the first-order effect of token i. The ratios equal the indices only if token i is
independent of the other tokens, and if donors have the same distribution as the text.

Special tokens are not exchanged. The own share is undefined (NaN) for special tokens, for tokens that are equal in both
texts, and for a token that is the only one in which the texts differ. A donor shorter than the text is extended with
the next donor of its kind.

An exchanged text is the text after all its words have been replaced by those of a donor. A hybrid takes one token from
the text and all other tokens from an exchanged text, or vice versa.

Shapes: T tokens, S measured positions, K kinds of donors, L levels (the embeddings, then each layer), D hidden, X
exchanged texts, R texts of a batch (rows).

References:
    Geiger et al., Causal abstractions of neural networks, NeurIPS 2021 (interchange of internal states).
    Brunner et al., On identifiability in Transformers, ICLR 2020 (contribution of a token to its own vector).
    Jansen, Analysis of variance designs for model output, Computer Physics Communications 117, 1999.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmix.core.names import DECODER_INPUT, OTHER_CLASS, OTHER_TEXTS, OWN_SHARE, SAME_CLASS, Site
from attnmix.core.statistics import Doubles, Sums
from attnmix.measures.documents import Corpus, Document
from attnmix.measures.layers import Block
from attnmix.models.capture_points import Recording, recording
from attnmix.models.families import family_of, layer_counts

QUANTITIES = (
    OWN_SHARE,
    "own_share_squared",
    "own",
    "others",
    "joint",
    "total_own",
    "total_others",
    "first_order_own",
)
"""Quantities that `exchange_sums` computes from the displacements."""
ATTENTION_OUTPUT = "attention_output"
ROUNDING = 32  # smallest significant displacement, relative to the vector, in multiples of the dtype's precision
Ids = npt.NDArray[np.int32]
Documents = Sequence[Document] | Corpus
"""A sequence of texts, or a `Corpus`, which loads each text on access."""


class Displacements(NamedTuple):
    """Mean squared displacements of one text's vectors, and squared lengths of the undisplaced vectors.

    All arrays are `[K, L, T]`, with NaN for tokens that were not exchanged.
    """

    own: Doubles
    """The displacement if the vector's own token is replaced."""
    others: Doubles
    """The displacement if all other tokens are replaced."""
    joint: Doubles
    """The displacement if all tokens are replaced."""
    length: Doubles
    """The squared length |y|^2 of each vector of the unmodified text."""


def choose_positions(document: Document, number: int, seed: int) -> Ids:
    """Return at most `number` positions of tokens that are not special, spread evenly over the text.

    If more than `number` tokens are not special, one position is drawn from each of `number` sections of about equal
    length.
    """
    places = np.flatnonzero(document.words >= 0).astype(np.int32)
    if number >= len(places):
        return places
    generator = _create_generator(document, seed)
    drawn = [generator.choice(part) for part in np.array_split(places, number)]
    return np.array(drawn, np.int32)


def choose_donors(
    documents: Documents, number: int, classes: npt.NDArray[np.int64] | None, seed: int
) -> dict[str, list[int]]:
    """Return the indices of all other documents in random order, by kind of donor.

    Args:
        documents: All texts.
        number: Index of the document that receives tokens.
        classes: Class of each text; None if there are no classes.
        seed: Seed for the random order; it is combined with the name of the document.

    Returns:
        The indices of the other documents of the same class and of other classes or, if `classes` is None, of all other
        documents. Kinds without documents are omitted.
    """
    order_seed = seed + 1  # different from the seed of `choose_positions`
    others = _create_generator(documents[number], order_seed).permutation(len(documents))
    others = others[others != number]
    if classes is None:
        by_kind = {OTHER_TEXTS: others}
    else:
        is_same = classes[others] == classes[number]
        by_kind = {SAME_CLASS: others[is_same], OTHER_CLASS: others[~is_same]}
    return {kind: numbers.tolist() for kind, numbers in by_kind.items() if len(numbers)}


def exchange_words(document: Document, donors: Iterable[Document]) -> Ids:
    """Return the token IDs `[T]` of a document after its words have been replaced by those of the donors, in order.

    The tokens of the first donor are used first, then those of the second donor, and so on. Special tokens, whose index
    in `words` is -1, are kept. If the donors have fewer tokens than the document, their tokens are repeated. If the
    donors have no tokens, the token IDs of the document are returned unchanged.
    """
    places = np.flatnonzero(document.words >= 0)
    donated: list[int] = []
    for donor in donors:
        if len(donated) >= len(places):
            break
        donated += donor.ids[donor.words >= 0].tolist()
    ids = document.ids.copy()
    if not donated:
        return ids
    ids[places] = np.resize(np.array(donated, np.int32), len(places))
    return ids


def exchanged_texts(document: Document, texts: Documents, candidates: Sequence[int], number: int) -> list[Ids]:
    """Return, for each donor, the document's token IDs `[T]` with its words replaced by those of the donor.

    The donors are the texts with the first `number` indices in `candidates`, or with all indices if there are fewer. A
    donor that is shorter than the document is extended with the following candidates.
    """
    exchanged = []
    for first in range(min(number, len(candidates))):
        order = [*candidates[first:], *candidates[:first]]
        donors = (texts[index] for index in order)  # a generator, which only loads the required texts
        exchanged.append(exchange_words(document, donors))
    return exchanged


def draw_exchanged_texts(
    document: Document,
    texts: Documents,
    number: int,
    classes: npt.NDArray[np.int64] | None,
    *,
    donors: int,
    seed: int,
) -> dict[str, list[Ids]]:
    """Return, by kind of donor, the document's token IDs `[T]` with its words replaced by those of each random donor.

    The list is empty for a kind without donors.

    Args:
        document: The text with index `number`, or its first tokens.
        texts: All texts.
        number: Index of the text, which is excluded from the donors.
        classes: Class of each text; None if there are no classes.
        donors: Number of donors of each kind.
        seed: Seed of the draw.
    """
    kinds = [OTHER_TEXTS] if classes is None else [SAME_CLASS, OTHER_CLASS]
    drawn = choose_donors(texts, number, classes, seed)
    return {kind: exchanged_texts(document, texts, drawn.get(kind, []), donors) for kind in kinds}


def measure_exchange(
    base: PreTrainedModel,
    document: Document,
    donors: Mapping[str, Sequence[Ids]],
    positions: Ids,
    batch_tokens: int,
) -> Displacements:
    """Return the mean squared displacements and squared lengths of the vectors at `positions` of a document.

    An exchanged text is the document after all its words have been replaced by those of a donor. A displacement is the
    change of a token's vector if the token itself, all other tokens or all tokens are taken from an exchanged text.

    Args:
        base: The model without a task head, in eval mode.
        document: The text.
        donors: Token IDs of the exchanged texts (from `exchange_words`), by kind of donor.
        positions: Positions of the measured tokens.
        batch_tokens: Maximum number of tokens in a forward pass.

    Returns:
        For each kind of donor, level (the embeddings, then each layer) and token, `[K, L, T]`: the means over the
        exchanged texts that differ from the document at the token's position and at least at one other position; NaN
        if there is no such text, and for tokens that are not measured.
    """
    exchanged = list(chain.from_iterable(donors.values()))
    exchanged_XT = np.reshape(exchanged, (-1, len(document))).astype(np.int32)
    donors_per_kind = [len(kind) for kind in donors.values()]
    kind_X = np.repeat(np.arange(len(donors)), donors_per_kind)  # index of each exchanged text's kind of donor
    squares_XLS4 = _measure_squares(base, document.ids, exchanged_XT, positions, batch_tokens)

    # Axes: X exchanged texts, L levels, S measured positions, 4 fields of `Displacements`, K kinds of donors, T tokens.
    # Positions that are not measured remain NaN.
    fields = len(Displacements._fields)
    levels = squares_XLS4.shape[1]
    means_4KLT = np.full((fields, len(donors), levels, len(document)), np.nan)
    for kind in range(len(donors)):
        means_LS4 = _average_known(squares_XLS4[kind_X == kind])
        for field in range(fields):
            means_LT = means_4KLT[field, kind]  # a view
            means_LT[:, positions] = means_LS4[..., field]
    return Displacements(*means_4KLT)


def exchange_matrix(
    base: PreTrainedModel, document: Document, donors: Mapping[str, Sequence[Ids]], batch_tokens: int
) -> Doubles:
    """Return the displacement of each vector after replacement of one token, relative to the vector's length.

    Args:
        base: The model without a task head, in eval mode.
        document: The text.
        donors: Token IDs of the exchanged texts (from `exchange_words`), by kind of donor.
        batch_tokens: Maximum number of tokens in a forward pass.

    Returns:
        The relative displacement `[L, T, T]` of each token's vector (rows) by each source token (columns), as root mean
        square over all donors with a different token at the source's position; NaN for sources that were not exchanged.
    """
    ids_T = document.ids
    tokens = len(document)
    reader = _Reader(base, np.arange(tokens, dtype=np.int32))
    originals = reader.read_complete(ids_T[None])  # the vectors `[1, T, D]` of the unmodified text, by level
    length_LT = _copy_to_host([_compute_squared_length(level[0]) for level in originals])
    exchanged = list(chain.from_iterable(donors.values()))
    squares_XLTT = np.full((len(exchanged), len(originals), tokens, tokens), np.nan)
    texts_per_pass = max(1, batch_tokens // tokens)  # one text for each exchanged source
    for text, donor_T in enumerate(exchanged):
        squares_LTT = squares_XLTT[text]  # a view
        sources = np.flatnonzero(donor_T != ids_T)
        for start in range(0, len(sources), texts_per_pass):
            batch = sources[start : start + texts_per_pass]
            squares_LTT[:, :, batch] = _exchange_single_tokens(reader, ids_T, donor_T, batch, originals)
    return np.sqrt(_average_known(squares_XLTT) / length_LT[..., None])


def _exchange_single_tokens(
    reader: _Reader, ids_T: Ids, donor_T: Ids, sources: npt.NDArray[np.int64], originals: Sequence[Tensor]
) -> Doubles:
    """Return the squared displacements `[L, T, sources]` of each token's vectors if only one source is exchanged.

    `sources` contains the positions of the exchanged tokens, and `originals` the vectors `[1, T, D]` of the unmodified
    text at each level.
    """
    rows = np.arange(len(sources))
    texts_RT = np.repeat(ids_T[None], len(sources), 0)
    texts_RT[rows, sources] = donor_T[sources]  # one exchanged token per row
    displaced = reader.read_complete(texts_RT)
    squares = []
    for displaced_RTD, original_1TD in zip(displaced, originals, strict=True):
        squares.append(_compute_squared_distance(displaced_RTD, original_1TD))
    squares_LRT = _copy_to_host(squares)
    return squares_LRT.swapaxes(1, 2)


def exchange_sums(displacements: Displacements, precision: float) -> dict[str, Sums]:
    """Return the sums over tokens `[1 + K, L]` of each of the `QUANTITIES`, for K kinds of donors and L levels.

    The levels are the embeddings and the output of each layer. The first row covers all kinds of donors. Values of
    single tokens are averaged over the kinds, and then summed over tokens. The total and first-order effects are summed
    over the kinds and over tokens. If there is only one kind, this row is omitted, and the shape is `[1, L]`.

    Args:
        displacements: Displacements of one text.
        precision: Relative precision of the model's dtype; displacements of this order count as 0.
    """
    significant = _remove_rounding_errors(displacements, precision)
    sums = {}
    for name, values_KLT in _compute_token_quantities(significant).items():
        sums[name] = Sums.over_tokens(_prepend_mean_over_donors(values_KLT))
    sums.update(_sum_total_effects(significant))
    return sums


def _compute_token_quantities(displacements: Displacements) -> dict[str, Doubles]:
    """Return those of the `QUANTITIES` that are defined for each token, `[K, L, T]`, by name.

    They are computed from the displacements o, a and j of a token's vector y if the token itself, all other tokens or
    all tokens are replaced: the shares o / (o + a) and o^2 / (o^2 + a^2), and o / |y|, a / |y| and j / |y|.
    """
    own_squared, others_squared, joint_squared, length_squared = displacements
    return {
        OWN_SHARE: _compute_own_share(displacements),
        "own_share_squared": _divide(own_squared, own_squared + others_squared),
        "own": np.sqrt(_divide(own_squared, length_squared)),
        "others": np.sqrt(_divide(others_squared, length_squared)),
        "joint": np.sqrt(_divide(joint_squared, length_squared)),
    }


def _sum_total_effects(displacements: Displacements) -> dict[str, Sums]:
    """Return the total effects o^2 / j^2 and a^2 / j^2 and the first-order effect (j^2 - a^2) / j^2, by name.

    o, a and j are the displacements if a token itself, all other tokens or all tokens are replaced. The `Sums`
    `[1 + K, L]` (K kinds of donors, L levels) contain the numerators, summed over tokens, as values. Their divisors
    (`counts`) are the sums of j^2 instead of numbers of tokens. For K > 1, the first row is the sum over all kinds.
    """
    own_squared, others_squared, joint_squared, _length_squared = displacements
    numerators = {
        "total_own": own_squared,
        "total_others": others_squared,
        "first_order_own": joint_squared - others_squared,
    }
    divisors_KL = np.nansum(joint_squared, -1)
    sums = {}
    for name, numerators_KLT in numerators.items():
        values_KL = np.nansum(numerators_KLT, -1)
        sums[name] = Sums(_prepend_sum_over_donors(values_KL), _prepend_sum_over_donors(divisors_KL))
    return sums


def own_shares(displacements: Displacements, precision: float) -> Doubles:
    """Return the own share of each token `[L, T]`, as the mean over the kinds of donors.

    The share is NaN for tokens that were not exchanged, and for tokens whose displacements are 0.
    """
    significant = _remove_rounding_errors(displacements, precision)
    return _average_known(_compute_own_share(significant))


def _compute_own_share(displacements: Displacements) -> Doubles:
    """Return the own share o / (o + a) of each token, `[K, L, T]`.

    o is the displacement if the token itself is replaced, and a is the displacement if all other tokens are replaced.
    `displacements` contains o^2 and a^2, for K kinds of donors, L levels and T tokens.
    """
    own_KLT = np.sqrt(displacements.own)
    others_KLT = np.sqrt(displacements.others)
    return _divide(own_KLT, own_KLT + others_KLT)


def _remove_rounding_errors(displacements: Displacements, precision: float) -> Displacements:
    """Replace squared displacements below the rounding errors of the vectors by 0."""
    least = (ROUNDING * precision) ** 2 * displacements.length  # all fields of `Displacements` are squares
    return displacements._replace(
        own=np.where(displacements.own < least, 0, displacements.own),
        others=np.where(displacements.others < least, 0, displacements.others),
        joint=np.where(displacements.joint < least, 0, displacements.joint),
    )


def _prepend_mean_over_donors(values_KLT: Doubles) -> Doubles:
    """Prepend the mean over the kinds of donors, `[1 + K, L, T]`; for a single kind, return the values unchanged."""
    if len(values_KLT) == 1:
        return values_KLT
    mean_LT = _average_known(values_KLT)
    return np.concatenate([mean_LT[None], values_KLT])


def _prepend_sum_over_donors(values_KL: Doubles) -> Doubles:
    """Prepend the sum over the kinds of donors, `[1 + K, L]`; for a single kind, return the values unchanged."""
    if len(values_KL) == 1:
        return values_KL
    total_1L = values_KL.sum(0, keepdims=True)
    return np.concatenate([total_1L, values_KL])


class _Hybrids(NamedTuple):
    """Hybrids of a text and its exchanged texts, for the measured positions.

    A hybrid consists of the token at one position of the text and all other tokens of an exchanged text, or vice versa.
    There are no hybrids for a position at which the two texts have the same token. There are also none if all other
    tokens of the two texts are equal, because exchanging them has no effect.
    """

    ids_RT: Ids
    """Token IDs of two consecutive hybrids for each exchanged text and position.

    In the first hybrid, only the token at the position is exchanged; in the second, all other tokens are exchanged.
    """
    places_R: npt.NDArray[np.int64]
    """The measured position of each hybrid, as an index into `positions`."""
    has_hybrids_XS: npt.NDArray[np.bool_]
    """True for each exchanged text and position with hybrids."""

    def arrange(self, values_LR: Doubles) -> tuple[Doubles, Doubles]:
        """Return values of R hybrids at L levels as two arrays `[L, X, S]`, by exchanged text X and position S.

        The first array contains the values of the hybrids in which only the token at the position is exchanged; the
        second those in which all other tokens are exchanged. In `values_LR`, both kinds alternate; their pairs are
        ordered by exchanged text, then by position. Values are NaN where there are no hybrids.
        """
        shape = (len(values_LR), *self.has_hybrids_XS.shape)
        own_LXS = np.full(shape, np.nan)
        others_LXS = np.full(shape, np.nan)
        own_LXS[:, self.has_hybrids_XS] = values_LR[:, 0::2]
        others_LXS[:, self.has_hybrids_XS] = values_LR[:, 1::2]
        return own_LXS, others_LXS


def _build_hybrids(ids_T: Ids, exchanged_XT: Ids, positions: Ids) -> _Hybrids:
    """Return two hybrids per exchanged text and position, if the text and the exchanged text differ at this position.

    A hybrid consists of the token at the position of the text and all other tokens of the exchanged text, or vice
    versa. There are no hybrids if the two texts differ only at this position.
    """
    differs_XT = exchanged_XT != ids_T
    has_others_X = differs_XT.sum(-1) > 1
    has_hybrids_XS = differs_XT[:, positions] & has_others_X[:, None]
    hybrids = []
    places = []
    for text, place in np.argwhere(has_hybrids_XS):
        exchanged_T = exchanged_XT[text]
        position = positions[place]
        own_T = ids_T.copy()
        others_T = exchanged_T.copy()
        own_T[position] = exchanged_T[position]
        others_T[position] = ids_T[position]
        hybrids.extend([own_T, others_T])
        places.extend([place, place])
    ids_RT = np.reshape(hybrids, (-1, len(ids_T))).astype(np.int32)
    return _Hybrids(ids_RT, np.array(places, np.int64), has_hybrids_XS)


def _measure_squares(
    base: PreTrainedModel, ids_T: Ids, exchanged_XT: Ids, positions: Ids, batch_tokens: int
) -> Doubles:
    """Return the squared displacements and lengths of a text's vectors at S `positions`, `[X, L, S, 4]`.

    The axes are the exchanged texts X, the levels L (the embeddings, then each layer), the positions S, and the fields
    of `Displacements`. A hybrid consists of one token of the text and all other tokens of an exchanged text, or vice
    versa. Values are NaN at positions without hybrids: positions at which the two texts have the same token, and a
    position that is the only difference between them.
    """
    hybrids = _build_hybrids(ids_T, exchanged_XT, positions)
    texts_per_pass = max(1, batch_tokens // len(ids_T))
    squares = _run_passes(_Reader(base, positions), ids_T, exchanged_XT, hybrids, texts_per_pass)
    own_LXS, others_LXS = hybrids.arrange(squares.hybrids_LR)  # by the token itself, and by all other tokens
    joint_LXS = squares.joint_LXS
    joint_LXS[:, ~hybrids.has_hybrids_XS] = np.nan
    length_LXS = np.where(hybrids.has_hybrids_XS, squares.length_L1S, np.nan)
    squares_LXS4 = np.stack([own_LXS, others_LXS, joint_LXS, length_LXS], -1)  # in the order of `Displacements`
    return np.ascontiguousarray(squares_LXS4.swapaxes(0, 1))


class _Squares(NamedTuple):
    """Squared displacements and lengths of a text's vectors, by level L (the embeddings, then each layer)."""

    hybrids_LR: Doubles  # the displacement in each of R hybrids, at the measured position of the hybrid
    joint_LXS: Doubles  # the displacements in X exchanged texts, at S measured positions
    length_L1S: Doubles  # the lengths in the unmodified text


def _run_passes(reader: _Reader, ids_T: Ids, exchanged_XT: Ids, hybrids: _Hybrids, texts_per_pass: int) -> _Squares:
    """Return the squared displacements in the exchanged texts and hybrids of a text, from several forward passes.

    An exchanged text is the text with the words of a donor. A hybrid consists of one token of the text and all other
    tokens of an exchanged text, or vice versa; it is measured at the position of this token. The first pass contains
    the text, its exchanged texts and as many hybrids as fit, because short passes take almost as long as full ones. The
    other hybrids are read in further passes.
    """
    complete_ids = np.stack([ids_T, *exchanged_XT])
    in_first_pass = max(0, texts_per_pass - len(complete_ids))  # number of hybrids
    first_ids_RT = hybrids.ids_RT[:in_first_pass]
    first_places_R = hybrids.places_R[:in_first_pass]
    # By level, `complete` contains the vectors [1 + X, S, D] of the text and its X exchanged texts at the S measured
    # positions, and `first_vectors` one vector [R, D] of each of the first hybrids.
    complete, first_vectors = reader.read(complete_ids, first_ids_RT, first_places_R)
    originals = [level[0] for level in complete]
    joint_LXS = _copy_to_host([_compute_squared_distance(level[1:], level[:1]) for level in complete])
    length_L1S = _copy_to_host([_compute_squared_length(level[:1]) for level in complete])
    squares_by_pass = [_compute_hybrid_displacements(first_vectors, originals, first_places_R)]
    for start in range(in_first_pass, len(hybrids.ids_RT), texts_per_pass):
        batch = slice(start, start + texts_per_pass)
        places_R = hybrids.places_R[batch]
        hybrid_vectors = reader.read_hybrids(hybrids.ids_RT[batch], places_R)
        squares_by_pass.append(_compute_hybrid_displacements(hybrid_vectors, originals, places_R))
    return _Squares(np.concatenate(squares_by_pass, 1), joint_LXS, length_L1S)


def _compute_hybrid_displacements(
    hybrid_vectors: Sequence[Tensor], originals: Sequence[Tensor], places_R: npt.NDArray[np.int64]
) -> Doubles:
    """Return the squared distances `[L, R]` between the vectors of hybrids and of the text at the same positions.

    At each level, `hybrid_vectors` contains one vector per hybrid `[R, D]`, and `originals` the vectors of the text
    `[S, D]`. `places_R` contains the index of each hybrid's position on the axis S.
    """
    squares = []
    for hybrid_RD, original_SD in zip(hybrid_vectors, originals, strict=True):
        squares.append(_compute_squared_distance(hybrid_RD, original_SD[places_R]))
    return _copy_to_host(squares)


class _LastLayerError(Exception):
    """Raised to end a forward pass before the feed-forward network of the last layer."""


class _LevelCollector:
    """Collects N vectors of each level (the embeddings, then each layer) during a forward pass of R texts.

    `take` receives the vectors of each capture point as soon as they are computed.
    """

    recording_state: Recording
    """The recording that calls `take`: its current layer, and a switch to pause; set before the forward pass starts."""

    def __init__(self, rows: Tensor, columns: Tensor, last_layer: int | None) -> None:
        """Store the indices of each of the N vectors in the batch: its text (`rows`) and its position (`columns`).

        `last_layer` is the number of the layer in which the forward pass ends, directly after attention; None if the
        forward pass is not ended early.
        """
        self.rows = rows
        self.columns = columns
        self.last_layer = last_layer
        self.is_in_decoder = False
        self.levels: list[Tensor] = []  # the collected vectors [N, D]

    def take(self, site: Site, vectors_RTD: Tensor) -> None:
        """Collect the N selected vectors of each level: the embeddings, then the output of each layer.

        In a decoder, they are selected one position further right, because its inputs follow a start token. The output
        of `last_layer` is computed from the attention output, at the N positions only; the forward pass is then ended
        by a `_LastLayerError`. Attention outputs of other layers are ignored.
        """
        if site.point == DECODER_INPUT:
            self.is_in_decoder = True  # All later vectors are those of decoder layers.
        elif site.point == ATTENTION_OUTPUT:
            if site.layer == self.last_layer:
                attention_output_ND = vectors_RTD[self.rows, self.columns]
                output_ND = _finish_layer(self.recording_state, attention_output_ND, self.rows, self.columns)
                self.levels.append(output_ND)
                raise _LastLayerError
        elif self.is_in_decoder:
            self.levels.append(_select_shifted(vectors_RTD, self.rows, self.columns))
        else:
            self.levels.append(vectors_RTD[self.rows, self.columns])


class _Reader:
    """Reads the vectors after each layer at the measured positions.

    In models with a single stack, the last layer processes only these positions after attention. This saves most
    operations of the last layer.
    """

    def __init__(self, base: PreTrainedModel, positions: Ids) -> None:
        """Store the measured `positions` `[S]`, and the number of the layer in which forward passes end.

        They end after attention in the last layer, and `_finish_layer` computes the output of this layer.
        """
        self.base = base
        self.positions = torch.as_tensor(positions.astype(np.int64), device=base.device)
        # In encoder-decoder models, forward passes are complete (None), because `_finish_layer` does not support
        # cross-attention in a batch of texts.
        has_decoder = len(family_of(base.config).stacks) > 1
        self.last_layer = None if has_decoder else layer_counts(base)[0]

    def read_complete(self, ids_RT: Ids) -> list[Tensor]:
        """Return, for each level, the vectors `[R, S, D]` of R texts at all S measured positions."""
        no_hybrids_RT = ids_RT[:0]
        no_places_R = np.zeros(0, np.int64)
        vectors, _no_vectors = self.read(ids_RT, no_hybrids_RT, no_places_R)
        return vectors

    def read_hybrids(self, ids_RT: Ids, places_R: npt.NDArray[np.int64]) -> list[Tensor]:
        """Return, for each level (the embeddings, then each layer), one vector `[R, D]` of each of R hybrids.

        It is the vector at the hybrid's measured position. `places_R` contains this position as an index into the array
        of all measured positions.
        """
        no_complete_texts = ids_RT[:0]
        _no_vectors, hybrid_vectors = self.read(no_complete_texts, ids_RT, places_R)
        return hybrid_vectors

    def read(
        self, ids_XT: Ids, hybrid_ids_RT: Ids, places_R: npt.NDArray[np.int64]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the results of `read_complete` and `read_hybrids`, from a single forward pass.

        The first result contains the vectors `[X, S, D]` of the texts `ids_XT` at all S measured positions. The second
        result contains one vector `[R, D]` of each hybrid text in `hybrid_ids_RT`: the vector at the measured position
        with the index in `places_R`. Both are lists by level: the embeddings, then each layer.
        """
        device = self.base.device
        texts = len(ids_XT)
        positions = len(self.positions)
        all_ids = np.concatenate([ids_XT, hybrid_ids_RT])
        all_rows = torch.arange(len(all_ids), device=device)
        # Each vector to read has a row (text) and a column (position) in the batch. The first vectors are those at all
        # positions of each complete text; then follows one vector of each hybrid.
        complete_rows = all_rows[:texts].repeat_interleave(positions)
        complete_columns = self.positions.repeat(texts)
        hybrid_rows = all_rows[texts:]
        hybrid_columns = self.positions[torch.as_tensor(places_R, device=device)]
        rows = torch.cat([complete_rows, hybrid_rows])
        columns = torch.cat([complete_columns, hybrid_columns])
        vectors = []
        hybrid_vectors = []
        for level_ND in self._read_levels(all_ids, rows, columns):
            complete_ND = level_ND[: texts * positions]
            vectors.append(complete_ND.unflatten(0, (texts, positions)))
            hybrid_vectors.append(level_ND[texts * positions :])
        return vectors, hybrid_vectors

    @torch.inference_mode()
    def _read_levels(self, ids_RT: Ids, rows: Tensor, columns: Tensor) -> list[Tensor]:
        """Return selected vectors `[N, D]` of each level (the embeddings, then each layer) for a batch of texts.

        `rows` and `columns` `[N]` contain the text and the position of each vector.
        """
        ids = torch.as_tensor(ids_RT.astype(np.int64), device=self.base.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        # The levels are collected at the first and the last point. The two others tell the collector that the decoder
        # begins, and that the forward pass can be ended early.
        points = ["embedding_output", DECODER_INPUT, ATTENTION_OUTPUT, "layer_output"]
        collector = _LevelCollector(rows, columns, self.last_layer)
        with recording(self.base, points, taken=collector.take) as recording_state, suppress(_LastLayerError):
            collector.recording_state = recording_state  # The vectors themselves are only passed to `take`.
            self.base(**inputs)  # The collector may end the forward pass by raising a `_LastLayerError`.
        return collector.levels


def _select_shifted(vectors_RTD: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the decoder's vectors `[N, D]` for the tokens at the positions `columns` of the texts `rows`.

    Decoder inputs are shifted right by one, after a start token. The last token is not an input; its vector is NaN.
    """
    tokens = vectors_RTD.shape[1]
    shifted = vectors_RTD[rows, (columns + 1).clamp_max(tokens - 1)]
    is_input = (columns + 1 < tokens).unsqueeze(-1)
    return torch.where(is_input, shifted, torch.nan)


def _finish_layer(recording_state: Recording, attention_output: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the output `[N, D]` of the current layer at N positions, from its attention output `[N, D]`.

    The steps after attention (skip connections, norms, feed-forward network) are applied by `Block.rest`. The attribute
    `layer` of `recording_state` is the call of the current layer. `rows` and `columns` `[N]` contain the text and the
    position of each vector in the batch.
    """
    call = recording_state.layer
    assert call is not None
    layer_input_RTD = call.whole.hidden
    x_ND = layer_input_RTD[rows, columns]
    # Modules expect a batch of texts, so all positions are passed as one text. After attention, they are independent.
    x_1ND = x_ND.reshape(1, -1, x_ND.shape[-1])
    attention_output_1ND = attention_output.reshape(x_1ND.shape)
    with recording_state.pause():  # The calls of the layer's modules must not be recorded.
        block = Block(call.module, call.stack)
        output_1ND = block.rest(call, x_1ND, attention_output_1ND)
    return output_1ND.reshape(x_ND.shape)


def _compute_squared_distance(moved: Tensor, original: Tensor) -> Tensor:
    """Return |moved - original|^2 over the last axis, in float64."""
    return (moved.double() - original.double()).square().sum(-1)


def _compute_squared_length(vectors: Tensor) -> Tensor:
    """Return the squared length of vectors on the last axis, in float64."""
    return vectors.double().square().sum(-1)


def _copy_to_host(squares: Sequence[Tensor]) -> Doubles:
    """Return tensors of equal shape as one stacked array on the host, in a single transfer."""
    return np.asarray(torch.stack(list(squares)).cpu().numpy())


def _average_known(values: Doubles) -> Doubles:
    """Return the mean over the first axis, ignoring NaN; NaN if all values are NaN."""
    is_known = ~np.isnan(values)
    return _divide(np.nansum(values, 0), is_known.sum(0).astype(np.float64))


def _divide(numerator: Doubles, denominator: Doubles) -> Doubles:
    """Return the elementwise quotient; NaN where the denominator is 0 or NaN."""
    is_defined = denominator > 0
    return np.divide(numerator, denominator, out=np.full_like(denominator, np.nan), where=is_defined)


def _create_generator(document: Document, seed: int) -> np.random.Generator:
    """Return a generator that depends only on the seed and the name of the document."""
    return np.random.default_rng([seed, crc32(document.name.encode())])
