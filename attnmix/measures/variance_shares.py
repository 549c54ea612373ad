"""Shares of token vectors by what they have in common: with all texts, those of a class, or one text alone.

A token's vector is the sum of a corpus mean, what its class adds, what its text adds to that, and what is the token's
own. The mean squared length of vectors v of N texts splits accordingly, by products of different texts and tokens, so
that noise of a mean adds nothing (the mean squares of a nested analysis of variance, solved for their components):

    token    E v.v - W        W   mean over texts of v.v' over two different tokens of the text
    text     W - S            S   mean over texts of m.m' with the other texts of its class; m is a text's mean
    class    S - C            C   |sum_k p_k m_k|^2, p_k the share of class k, by products of different texts only
    corpus   C

Every text counts once, whatever its length. Vectors of length 1 give mean cosines: W within a text, S with other texts
of its class, O with texts of other classes. Shapes: N texts, T tokens, X sites or layers, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnmix.core.statistics import Doubles

Array = npt.NDArray[Any]

PARTS = ("corpus", "class", "text", "token")
COSINES = ("within_text", "same_class", "other_class")
MAX_TEXTS = 256  # products of all pairs of texts are in memory
PERMUTATIONS = 200
NULL_LEVEL = 0.95


class Moments(NamedTuple):
    """Moments of each text's vectors at each site, of which the split is made."""

    means_NXD: Doubles
    within_NX: Doubles  # mean product of two different tokens of a text; NaN with a single token
    squares_NX: Doubles  # mean squared length

    @staticmethod
    def from_sums(sums_NXD: npt.ArrayLike, squares_NX: npt.ArrayLike, tokens_N: npt.ArrayLike) -> Moments:
        """Return the moments from each text's sum of vectors, sum of squared lengths and number of tokens."""
        sums = np.asarray(sums_NXD, np.float64)
        squares = np.asarray(squares_NX, np.float64)
        tokens = np.asarray(tokens_N, np.float64)[:, None]
        products_of_two = np.square(sums).sum(-1) - squares
        pairs = tokens * (tokens - 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            within = products_of_two / pairs
        return Moments(sums / tokens[..., None], within, squares / tokens)


class Products(NamedTuple):
    """Mean products of vectors `[..., X]`; a leading dimension counts samples that lack one text each."""

    square: Doubles  # of a vector with itself
    within: Doubles  # W
    same: Doubles  # S
    other: Doubles  # O; NaN with a single class
    corpus: Doubles  # C

    def shares(self) -> Doubles:
        """Return the shares of `PARTS` in the mean squared length `[..., X, 4]`; unbiased, so one can be below 0."""
        parts = (self.corpus, self.same - self.corpus, self.within - self.same, self.square - self.within)
        return np.stack(parts, -1) / self.square[..., None]

    def cosines(self) -> Doubles:
        """Return `COSINES` `[..., X, 3]`, of vectors of length 1."""
        return np.stack([self.within, self.same, self.other], -1)


def products(texts: Moments, classes_N: npt.ArrayLike) -> tuple[Products, Products]:
    """Return the mean products `[X]` of all texts, and `[N, X]` without each one of them.

    Texts of a class with fewer than three are to be left out beforehand: without one of two there is no pair.
    """
    classes = np.asarray(classes_N)
    gram_XNN = _gram(texts)
    same_NN = classes[:, None] == classes
    np.fill_diagonal(same_NN, False)
    different_NN = ~np.eye(len(classes), dtype=bool)
    in_class_XN = (gram_XNN * same_NN).sum(-1)
    all_XN = (gram_XNN * different_NN).sum(-1)
    size_N = same_NN.sum(-1)
    squares_XN, within_XN = texts.squares_NX.T, texts.within_NX.T
    whole = _products(in_class_XN, all_XN, size_N, squares_XN, within_XN, np.ones(len(classes), bool))
    # Without text u, the sums of text t lack its product with u.
    in_class_XNN = in_class_XN[:, None] - gram_XNN * same_NN
    all_XNN = all_XN[:, None] - gram_XNN
    size_NN = size_N - same_NN
    without = _products(in_class_XNN, all_XNN, size_NN, squares_XN[:, None], within_XN[:, None], different_NN)
    return _transposed(whole), _transposed(without)


def _transposed(means: Products) -> Products:
    """Return the mean products with the sites last."""
    return Products(*(mean.T for mean in means))


def _products(
    in_class: Doubles, all_texts: Doubles, size: Array, squares: Doubles, within: Doubles, kept: npt.NDArray[np.bool_]
) -> Products:
    """Return the mean products over the `kept` texts of the last axis, from each text's sums over other texts."""
    number = kept.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_in_class = np.where(kept, in_class / size, 0)  # with the other texts of its class; NaN without any
    pairs_apart = (kept * (number[..., None] - 1 - size)).sum(-1)
    apart = ((all_texts - in_class) * kept).sum(-1)
    corpus = ((mean_in_class * (size + 1)) * kept).sum(-1) + apart
    with np.errstate(invalid="ignore", divide="ignore"):
        other = np.where(pairs_apart > 0, apart / pairs_apart, np.nan)
        return Products(
            square=(squares * kept).sum(-1) / number,
            within=(within * kept).sum(-1) / number,
            same=(mean_in_class * kept).sum(-1) / number,
            other=other,
            corpus=corpus / number**2,
        )


def class_share_null(texts: Moments, classes_N: npt.ArrayLike, seed: int) -> Doubles:
    """Return the 95 % quantile of the share `class` `[X]` where classes are permuted over the texts."""
    classes = np.asarray(classes_N)
    gram_XNN = _gram(texts)
    generator = np.random.default_rng(seed)
    different_NN = ~np.eye(len(classes), dtype=bool)
    all_XN = (gram_XNN * different_NN).sum(-1)
    squares_XN, within_XN = texts.squares_NX.T, texts.within_NX.T
    kept = np.ones(len(classes), bool)
    shares = []
    for _ in range(PERMUTATIONS):
        permuted = generator.permutation(classes)
        same_NN = (permuted[:, None] == permuted) & different_NN
        in_class_XN = (gram_XNN * same_NN).sum(-1)
        means = _products(in_class_XN, all_XN, same_NN.sum(-1), squares_XN, within_XN, kept)
        shares.append(means.shares()[..., PARTS.index("class")])
    return np.asarray(np.quantile(shares, NULL_LEVEL, axis=0))


def usable(classes_N: npt.NDArray[np.int64], tokens_N: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the texts of two tokens or more, with a class (-1: none) that three of them or more have."""
    chosen_N = (classes_N >= 0) & (tokens_N > 1)
    same_NN = classes_N[:, None] == classes_N
    size_N = (same_NN & chosen_N).sum(-1)  # of each text's class
    return np.asarray(chosen_N & (size_N >= 3))


def _gram(texts: Moments) -> Doubles:
    return np.asarray(np.einsum("nxd,mxd->xnm", texts.means_NXD, texts.means_NXD, optimize=True))
