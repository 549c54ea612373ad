"""Variance components of token vectors: shares of corpus, class, text and token.

A token's vector is the sum of the corpus mean and of the deviations of its class, of its text, and of the token. The
mean squared length of the vectors v of N texts is decomposed accordingly. Squares of noisy means would be biased.
Except for E[v.v], the mean squared length, the estimates therefore use only products of different tokens or texts. The
estimates are variance components, as in a nested analysis of variance:

    token    E[v.v] - W       W   mean of v.v' over pairs of different tokens of a text, then over texts
    text     W - S            S   mean of m.m' over pairs of different texts of a class; m is the mean of a text
    class    S - C            C   |sum_k p_k m_k|^2 by products of different texts; p_k, m_k: share and mean of class k
    corpus   C

Texts have equal weights, regardless of their length. For vectors of length 1, products are mean cosines: W within a
text, S between texts of the same class, O between texts of different classes. Shapes: N texts, X layers or sites (layer
and capture point), D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnmix.core.draw import RowNumbers, stratified_draw
from attnmix.core.statistics import Doubles

Array = npt.NDArray[Any]

PARTS = ("corpus", "class", "text", "token")
COSINES = ("within_text", "same_class", "other_class")
MAX_TEXTS = 256  # maximum number of texts, to limit the memory for the products of all pairs of texts
PERMUTATIONS = 200
NULL_LEVEL = 0.95


def draw_texts(classes_N: npt.NDArray[np.int64], seed: int) -> RowNumbers:
    """Return the sorted indices of a sample of at most `MAX_TEXTS` texts, stratified by class."""
    return stratified_draw(classes_N, MAX_TEXTS, seed)


class Moments(NamedTuple):
    """The moments of each text's vectors at each site; they are the input of the decomposition."""

    means_NXD: Doubles
    within_NX: Doubles  # mean product of two different tokens of a text; NaN for texts of one token
    squares_NX: Doubles  # mean squared length

    @staticmethod
    def from_sums(sums_NXD: npt.ArrayLike, squares_NX: npt.ArrayLike, tokens_N: npt.ArrayLike) -> Moments:
        """Return the moments from each text's sum of vectors, sum of squared lengths and number of tokens.

        Axes: N texts, X sites (layer and capture point), D width of the vectors.
        """
        sums = np.asarray(sums_NXD, np.float64)
        squares = np.asarray(squares_NX, np.float64)
        tokens = np.asarray(tokens_N, np.float64)[:, None]
        # |sum_t v_t|^2 is the sum of the products of all pairs of tokens, including each token with itself.
        sum_over_pairs = np.square(sums).sum(-1) - squares  # products of two different tokens
        pairs = tokens * (tokens - 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            within = sum_over_pairs / pairs
        return Moments(sums / tokens[..., None], within, squares / tokens)


class Products(NamedTuple):
    """Mean products of vectors `[..., X]`. A leading axis, if present, contains the leave-one-out samples."""

    square: Doubles  # squared length of a vector
    within: Doubles  # W: two tokens of a text
    same: Doubles  # S: two texts of the same class
    other: Doubles  # O: two texts of different classes; NaN for a single class
    corpus: Doubles  # C: the whole corpus

    def shares(self) -> Doubles:
        """Return the shares `[..., X, 4]` of `PARTS` in the mean squared length. Unbiased estimates may be negative.

        X are the sites. The levels are: same token (`square`), same text (`within`), same class (`same`), whole corpus
        (`corpus`). Each part is the mean product of two vectors at one level minus the mean product at the next level;
        the part `corpus` is the mean product at the last level.
        """
        of_class = self.same - self.corpus
        of_text = self.within - self.same
        of_token = self.square - self.within
        parts = np.stack([self.corpus, of_class, of_text, of_token], -1)
        return parts / self.square[..., None]

    def cosines(self) -> Doubles:
        """Return `COSINES` `[..., X, 3]`. All vectors must have length 1."""
        return np.stack([self.within, self.same, self.other], -1)


def products(texts: Moments, classes_N: npt.ArrayLike) -> tuple[Products, Products]:
    """Return the mean products `[X]` of all texts, and those of each leave-one-out sample, `[N, X]`.

    The products are those of two token vectors: of the same token, text or class, of different classes, or of the whole
    corpus. A leave-one-out sample contains all N texts except one. X are the sites (layer and capture point). Each
    class must have at least three texts, because a pair of texts of each class must remain if one text is left out.
    """
    gram_XNN = _compute_gram(texts)
    same_class_NN = _mark_pairs_of_class(np.asarray(classes_N))
    different_NN = _mark_pairs(len(same_class_NN))
    sums_in_class_XN = (gram_XNN * same_class_NN).sum(-1)
    sums_over_others_XN = (gram_XNN * different_NN).sum(-1)
    class_others_N = same_class_NN.sum(-1)  # number of other texts of the same class
    whole = _average_all_texts(texts, sums_in_class_XN, sums_over_others_XN, class_others_N)
    # In the sample without text u, the sums for text t exclude the product of t and u. The second-to-last axis of the
    # following arguments is that of the texts u.
    without = _average_products(
        sums_in_class=sums_in_class_XN[:, None] - gram_XNN * same_class_NN,
        sums_over_others=sums_over_others_XN[:, None] - gram_XNN,
        class_others=class_others_N - same_class_NN,
        squares=texts.squares_NX.T[:, None],
        within=texts.within_NX.T[:, None],
        is_kept=different_NN,
    )
    return _move_sites_last(whole), _move_sites_last(without)


def _mark_pairs(texts: int) -> npt.NDArray[np.bool_]:
    """Return a mask `[N, N]` of the pairs of different texts."""
    return ~np.eye(texts, dtype=bool)


def _mark_pairs_of_class(classes_N: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask `[N, N]` of the pairs of different texts of the same class."""
    same_class_NN = np.asarray(classes_N[:, None] == classes_N)
    np.fill_diagonal(same_class_NN, False)
    return same_class_NN


def _move_sites_last(means: Products) -> Products:
    """Return the mean products with the axis of sites last instead of first."""
    return Products(*(mean.T for mean in means))


def _average_all_texts(
    texts: Moments, sums_in_class_XN: Doubles, sums_over_others_XN: Doubles, class_others_N: Array
) -> Products:
    """Return the mean products `[X]` of the vectors of all N texts at X sites.

    For each text, the products of its mean vector with those of other texts are summed over the other texts of its
    class (`sums_in_class_XN`), and over all other texts. `class_others_N` is the number of other texts of its class.
    """
    return _average_products(
        sums_in_class=sums_in_class_XN,
        sums_over_others=sums_over_others_XN,
        class_others=class_others_N,
        squares=texts.squares_NX.T,
        within=texts.within_NX.T,
        is_kept=np.ones(len(class_others_N), bool),
    )


def _average_products(
    sums_in_class: Doubles,
    sums_over_others: Doubles,
    class_others: Array,
    squares: Doubles,
    within: Doubles,
    is_kept: npt.NDArray[np.bool_],
) -> Products:
    """Return the mean products of the vectors of a sample of texts. The last axis of all arguments is that of N texts.

    The product of two texts is the product of their mean vectors.

    Args:
        sums_in_class: Sum of the products of each text with the other texts of its class.
        sums_over_others: Sum of the products of each text with all other texts.
        class_others: Number of other texts of the same class.
        squares: Mean squared length of each text's vectors.
        within: Mean product of two different tokens of each text.
        is_kept: True for the texts of the sample.
    """
    number = is_kept.sum(-1)

    # The mean product of each text with the other texts of its class is NaN if there are none.
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_in_class = np.where(is_kept, sums_in_class / class_others, 0)

    # The sum and the number of the products between texts of different classes.
    sum_across_classes = _sum_kept(sums_over_others - sums_in_class, is_kept)
    texts_of_other_classes = number[..., None] - 1 - class_others
    pairs_across_classes = _sum_kept(texts_of_other_classes, is_kept)

    # `corpus` estimates |sum_k p_k m_k|^2, where p_k is the share of the texts in class k, and m_k is the mean of their
    # mean vectors. It is the sum of the products of all N^2 pairs of texts, divided by N^2. In this sum, the mean
    # product of a text with the other texts of its class replaces the product of the text with itself. The sum over all
    # texts of its class is therefore this mean product times the size of the class.
    class_size = class_others + 1
    sum_in_classes = _sum_kept(mean_in_class * class_size, is_kept)
    sum_of_all_pairs = sum_in_classes + sum_across_classes

    with np.errstate(invalid="ignore", divide="ignore"):
        other = np.where(pairs_across_classes > 0, sum_across_classes / pairs_across_classes, np.nan)
        return Products(
            square=_sum_kept(squares, is_kept) / number,
            within=_sum_kept(within, is_kept) / number,
            same=_sum_kept(mean_in_class, is_kept) / number,
            other=other,
            corpus=sum_of_all_pairs / number**2,
        )


def _sum_kept(values: Array, is_kept: npt.NDArray[np.bool_]) -> Array:
    """Return the sums of `values` `[..., N]` over the texts in a mask."""
    return np.asarray((values * is_kept).sum(-1))


def class_share_null(texts: Moments, classes_N: npt.ArrayLike, seed: int) -> Doubles:
    """Return the 95 % quantile `[X]` of the share `class` over random permutations of the texts' classes.

    The share `class` is the share of the mean squared length of token vectors that is due to differences between
    classes, at each of X sites (layer and capture point). It is computed from the products of the mean vectors of two
    texts.
    """
    classes = np.asarray(classes_N)
    gram_XNN = _compute_gram(texts)
    # Only the sums over the other texts of the same class depend on the permutation.
    sums_over_others_XN = (gram_XNN * _mark_pairs(len(classes))).sum(-1)
    generator = np.random.default_rng(seed)
    class_index = PARTS.index("class")
    shares = []
    for _ in range(PERMUTATIONS):
        same_class_NN = _mark_pairs_of_class(generator.permutation(classes))
        sums_in_class_XN = (gram_XNN * same_class_NN).sum(-1)
        class_others_N = same_class_NN.sum(-1)  # number of other texts of the same class
        means = _average_all_texts(texts, sums_in_class_XN, sums_over_others_XN, class_others_N)
        shares.append(means.shares()[..., class_index])
    return np.asarray(np.quantile(shares, NULL_LEVEL, axis=0))


def usable(classes_N: npt.NDArray[np.int64], tokens_N: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of texts with at least two tokens and a known class (not -1) that has at least three such texts."""
    is_candidate_N = (classes_N >= 0) & (tokens_N > 1)
    is_same_class_NN = classes_N[:, None] == classes_N
    candidates_of_class_N = (is_same_class_NN & is_candidate_N).sum(-1)
    return np.asarray(is_candidate_N & (candidates_of_class_N >= 3))


def _compute_gram(texts: Moments) -> Doubles:
    """Return the products `[X, N, N]` of the mean vectors of all pairs of texts at each site."""
    means_NXD = texts.means_NXD
    gram_XNN = np.einsum("nxd,mxd->xnm", means_NXD, means_NXD, optimize=True)
    return np.asarray(gram_XNN)
