"""Geometry of a text's token vectors (a cloud) at a capture point, and changes to the vectors in each step of a layer.

Computation is batched over texts and points. Shapes: `...` texts and points, T tokens, D width, N = min(T, D), W
distinct token IDs.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnmix.core.arithmetic.kernels import cores
from attnmix.core.names import STEP_MEASURES, STEP_POINTS
from attnmix.measures.layers import LayerPass

NEAREST_NUMBERS = 2**24  # maximum number of dot products (token vectors x word embeddings) in one chunk
SOLVED_NUMBERS = 2**16  # maximum number of Gram matrix elements per eigenvalue call; the call's overhead is negligible
SHORTEST = 1e-12  # minimum length for normalising vectors
ROUNDING = 1e-12  # relative float64 threshold; smaller numbers are rounding errors
GEOMETRY_MEASURES = (
    "mean_cosine",
    "effective_rank",
    "effective_rank_bound",
    "residual_share",
    "own_nearest",
    "cka_input",
)
RANK = GEOMETRY_MEASURES.index("effective_rank")


class Cloud:
    """The vectors `[..., T, D]` of texts at capture points, and float64 quantities that several measures use.

    Sums, means and norms are computed over the tokens of each text and point, without padding.
    """

    def __init__(self, vectors: Tensor, mask: Tensor | None = None) -> None:
        """Compute the lengths and sums, the centred vectors, their Gram matrix, and `own_hsic`.

        `mask` `[..., T]` is False for padding (default: no padding).
        """
        self.mask = torch.ones_like(vectors[..., 0], dtype=torch.bool)
        if mask is not None:
            self.mask = mask
        mask_T1 = self.mask.unsqueeze(-1)
        self.vectors = vectors
        self.width = vectors.shape[-1]
        self.tokens = self.mask.sum(-1).double()  # number of tokens of each text
        x_TD = vectors.to(torch.float64, copy=True)
        if mask is not None:
            x_TD.masked_fill_(~mask_T1, 0)

        # Compute the lengths of the vectors, and the sum of the vectors after scaling each to length 1.
        length_T = x_TD.norm(dim=-1)
        self.norm = length_T.norm(dim=-1)  # root of the sum of squared lengths
        inverse_length_T = 1 / length_T.clamp_min(SHORTEST)
        unit_sum_1D = inverse_length_T.unsqueeze(-2).matmul(x_TD)
        self.unit_sum_D = unit_sum_1D.squeeze(-2)

        # Subtract the mean vector of each text; padding remains 0.
        mean_D = x_TD.sum(-2) / self.tokens.unsqueeze(-1)
        mean_1D = mean_D.unsqueeze(-2)
        self.centred_TD = x_TD.addcmul_(mask_T1, mean_1D, value=-1)
        self.squares_T = self.centred_TD.norm(dim=-1).square()  # squared lengths after centring
        self.centred_norm = self.squares_T.sum(-1).sqrt()

        # The Gram matrix is T x T (`by_tokens`) or D x D, whichever is smaller.
        self.by_tokens = vectors.shape[-2] <= self.width
        if self.by_tokens:
            self.gram_NN = self.centred_TD @ self.centred_TD.mT
        else:
            self.gram_NN = self.centred_TD.mT @ self.centred_TD
        self.varies = self.centred_norm > ROUNDING * self.norm  # False if tokens differ only by rounding errors
        is_constant = ~self.varies
        self.gram_NN.masked_fill_(is_constant[..., None, None], 0)  # replaces rounding errors and NaN
        self.own_hsic = self._compute_own_hsic()

    def _compute_own_hsic(self) -> Tensor:
        """Return the unbiased HSIC of the vectors with themselves, multiplied by T (T - 3) (see `_compute_hsic`).

        The result is NaN if the tokens differ only by rounding errors (`varies` is False), or if the HSIC is not larger
        than such errors.
        """
        square_of_gram = self.gram_NN.norm(dim=(-2, -1)).square()  # |X^T X|_F^2 of the centred vectors X
        hsic = _compute_hsic(product=square_of_gram, first=self, second=self)
        is_precise = hsic > ROUNDING * square_of_gram
        return hsic.where(self.varies & is_precise, torch.nan)


class Words:
    """The word embeddings of the distinct token IDs of each text."""

    def __init__(self, words_TD: Tensor, ids: npt.NDArray[np.integer]) -> None:
        """Select the embeddings of distinct token IDs from `words_TD` `[..., T, D]`, the embeddings of all tokens.

        `ids` `[..., T]` contains the token IDs. At padded positions, it must contain an ID that occurs in the text.
        """
        first_W = torch.as_tensor(_find_first_positions(ids), device=words_TD.device)
        self.ids_T = torch.as_tensor(ids, device=words_TD.device)
        self.ids_W = self.ids_T.gather(-1, first_W)
        distinct_WD = torch.take_along_dim(words_TD, first_W.unsqueeze(-1), -2)
        self.unit_WD = normalize(distinct_WD, dim=-1)

    def own_nearest(self, vectors: Tensor) -> Tensor:
        """Return a mask `[..., points, T]` of the vectors whose nearest word embedding is that of the vector's token.

        `vectors` `[..., points, T, D]` are compared by cosine, and only with the word embeddings of the same text.
        """
        texts = self.unit_WD.shape[:-2]
        tokens = self.ids_T.shape[-1]
        rows_RD = vectors.reshape(*texts, -1, vectors.shape[-1])  # R = points * T
        nearest_R = self._find_nearest(rows_RD.to(self.unit_WD))
        nearest_ids_R = self.ids_W.gather(-1, nearest_R)
        nearest_ids_PT = nearest_ids_R.view(*texts, -1, tokens)
        is_own_PT = nearest_ids_PT == self.ids_T.unsqueeze(-2)
        return is_own_PT.view(vectors.shape[:-1])

    def _find_nearest(self, vectors_RD: Tensor) -> Tensor:
        """Return the index `[..., R]`, on the axis W, of the word embedding that has the largest cosine with a vector.

        The vectors are processed in chunks, to limit the memory for the cosines.
        """
        words = self.unit_WD[..., 0].numel()
        chunk_rows = max(1, NEAREST_NUMBERS // words)
        nearest_by_chunk = []
        for chunk_RD in vectors_RD.split(chunk_rows, -2):
            # The length of a vector does not affect which embedding has the largest cosine with it.
            products_RW = chunk_RD @ self.unit_WD.mT
            nearest_by_chunk.append(products_RW.argmax(-1))
        return torch.cat(nearest_by_chunk, -1)


def _find_first_positions(ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return the positions `[..., W]` of the first occurrence of each distinct token ID in texts with `ids` `[..., T]`.

    W is the largest number of distinct IDs in a text. For texts with fewer distinct IDs, the result is padded with one
    of the text's positions.
    """
    positions_by_text = []
    for text_ids in ids.reshape(-1, ids.shape[-1]):
        _distinct_ids, positions = np.unique(text_ids, return_index=True)
        positions_by_text.append(positions)
    most_words = max(map(len, positions_by_text))
    padded = []
    for positions in positions_by_text:
        padding = np.full(most_words - len(positions), positions[0])
        padded.append(np.append(positions, padding))
    return np.stack(padded).reshape(*ids.shape[:-1], most_words)


def geometry(cloud: Cloud, start: Cloud, words: Words | None) -> Tensor:
    """Return `GEOMETRY_MEASURES` of clouds, `[..., measures]` in float64.

    `start` is the layer's input. `words` is None if the word embeddings differ from the vectors in width, or belong to
    different tokens. Undefined measures are NaN; `docs/measures/geometry.md` contains definitions and conditions.
    - `effective_rank`: exp of the entropy of the singular values' shares (Roy and Vetterli, 2007).
    - `residual_share`: |X - 1 mean|_F / |X|_F (the residual of Dong et al., ICML 2021).
    - `cka_input`: linear CKA with the layer's input (Kornblith et al., ICML 2019, equation 3), computed with the
      unbiased estimator of HSIC (Song et al., JMLR 2012; Nguyen et al., ICLR 2021, equation 3).
    """
    measures = geometry_but_rank(cloud, start, words)
    ranks = _compute_effective_rank(cloud.gram_NN.cpu())
    measures[..., RANK] = ranks.to(measures)
    return measures


def geometry_but_rank(cloud: Cloud, start: Cloud, words: Words | None) -> Tensor:
    """Return the result of `geometry` with NaN for `effective_rank`; `effective_ranks` computes this measure."""
    tokens = cloud.tokens.expand_as(cloud.norm)
    # The squared length of the sum of unit vectors is the sum of the cosines of all pairs, including T pairs i = j.
    sum_of_cosines = cloud.unit_sum_D.square().sum(-1) - tokens
    mean_cosine = sum_of_cosines / (tokens * (tokens - 1))
    cka = _compute_cka(cloud, start)
    measures = {
        "mean_cosine": mean_cosine.where(tokens > 1, torch.nan),
        "effective_rank_bound": (tokens - 1).clamp_max(cloud.width),
        "residual_share": cloud.centred_norm / cloud.norm,
        "cka_input": cka.where(tokens >= 4, torch.nan),  # the unbiased estimator divides by tokens - 3
    }
    if words is not None:
        is_own_nearest = words.own_nearest(cloud.vectors) & cloud.mask
        measures["own_nearest"] = is_own_nearest.sum(-1) / tokens
    return _stack_measures(measures, GEOMETRY_MEASURES, like=tokens)


def _stack_measures(measures: Mapping[str, Tensor], names: Sequence[str], like: Tensor) -> Tensor:
    """Stack the measures in the order of `names`, `[..., names]`. Missing measures are NaN, in the shape of `like`."""
    undefined = torch.full_like(like, torch.nan)
    in_order = [measures.get(name, undefined) for name in names]
    return torch.stack(in_order, dim=-1)


def effective_ranks(cloud: Cloud, lengths: Sequence[int]) -> Future[Tensor]:
    """Return a future for the effective ranks `[texts, points]` of a cloud `[texts, points, T, D]`.

    `lengths` contains the number of tokens of each text. The ranks are computed from the eigenvalues of Gram matrices
    on the CPU, because solvers on other devices process matrices sequentially. A separate thread copies Gram matrices
    from another device to the CPU, while the device continues to compute. If the Gram matrices are on the CPU, the
    returned future is already complete.
    """
    sizes = _get_gram_sizes(cloud, lengths)
    if not cloud.gram_NN.is_cpu:
        fetching_thread = _get_fetching_thread()
        return fetching_thread.submit(_fetch_ranks, cloud.gram_NN, sizes)
    ranks = _compute_ranks(cloud.gram_NN, sizes)
    finished: Future[Tensor] = Future()
    finished.set_result(ranks)
    return finished


def _get_gram_sizes(cloud: Cloud, lengths: Sequence[int]) -> Sequence[int]:
    """Return the size of each text's Gram matrices without padding.

    The matrices are tokens x tokens or, if the width of the vectors is smaller than the number of tokens including
    padding, width x width.
    """
    if cloud.by_tokens:
        return lengths
    return [cloud.width] * len(lengths)


def _fetch_ranks(gram: Tensor, sizes: Sequence[int]) -> Tensor:
    """Copy Gram matrices from another device to the CPU, and compute their effective ranks in parallel."""
    return _compute_ranks(gram.cpu(), sizes, threads=_get_solving_threads())


def _compute_ranks(gram_BPNN: Tensor, sizes: Sequence[int], threads: ThreadPoolExecutor | None = None) -> Tensor:
    """Return the effective ranks `[texts, points]` from Gram matrices with padding, `[texts, points, N, N]`.

    `sizes` contains the size of each text's matrices without padding. Matrices of equal size are computed together, in
    groups of texts. By default, all groups are computed in the current thread, because other threads may be measuring
    other texts.
    """
    points = gram_BPNN.shape[1]
    groups = list(_group_by_size(sizes, points))
    grams = []  # by group, without padding
    for texts in groups:
        size = sizes[texts[0]]
        grams.append(gram_BPNN[texts, :, :size, :size])
    apply_to_groups = map if threads is None else threads.map
    ranks_BP = gram_BPNN.new_empty(len(sizes), points)
    for texts, ranks in zip(groups, apply_to_groups(_compute_effective_rank, grams), strict=True):
        ranks_BP[texts] = ranks
    return ranks_BP


def _group_by_size(sizes: Sequence[int], points: int) -> Iterator[list[int]]:
    """Yield groups of text indices. The Gram matrices of a group have equal size and are decomposed in one call.

    A group has at most `SOLVED_NUMBERS` matrix elements, or consists of a single text. `points` is the number of
    matrices per text.
    """
    texts_by_size: dict[int, list[int]] = {}
    for text, size in enumerate(sizes):
        texts_by_size.setdefault(size, []).append(text)
    for size, texts in texts_by_size.items():
        texts_in_group = max(1, SOLVED_NUMBERS // (points * size**2))
        for start in range(0, len(texts), texts_in_group):
            yield texts[start : start + texts_in_group]


@cache
def _get_fetching_thread() -> ThreadPoolExecutor:
    """Return a pool with a single thread, which copies Gram matrices from other devices."""
    return ThreadPoolExecutor(1)


@cache
def _get_solving_threads() -> ThreadPoolExecutor:
    """Return a pool with one thread per core.

    LAPACK starts no further threads in this pool, because they made the computation 16 times slower.
    """
    return ThreadPoolExecutor(cores(), initializer=torch.set_num_threads, initargs=(1,))


@torch.inference_mode()
def _compute_effective_rank(gram: Tensor) -> Tensor:
    """Return the effective rank `[...]` of clouds from the Gram matrices `[..., N, N]`; NaN if all elements are 0."""
    eigenvalues = torch.linalg.eigvalsh(gram)
    # Centring and repeated tokens cause zero eigenvalues; the roots of their rounding errors would not be negligible.
    precision = torch.finfo(eigenvalues.dtype).eps
    size = eigenvalues.shape[-1]
    largest = eigenvalues[..., -1:]
    rounding = precision * size * largest
    # The eigenvalues of a Gram matrix are the squares of the cloud's singular values.
    squares = torch.where(eigenvalues > rounding, eigenvalues, 0)
    singular_values = squares.sqrt()
    shares = singular_values / singular_values.sum(-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(-1)
    rank: Tensor = entropy.exp()
    return rank


def _compute_cka(cloud: Cloud, start: Cloud) -> Tensor:
    """Return the linear CKA `[...]` of two clouds: a similarity of two sets of vectors X and Y of the same tokens."""
    if cloud.by_tokens and start.by_tokens:  # The attributes `gram_NN` are X X^T and Y Y^T (tokens x tokens).
        # |X^T Y|_F^2 equals the sum of the elementwise product of X X^T and Y Y^T.
        product = (cloud.gram_NN * start.gram_NN).sum((-2, -1))
    else:
        # The dtype of the vectors is sufficient for X^T Y, because the subsequent sum of squares has no cancellation.
        first_TD = cloud.centred_TD.to(cloud.vectors.dtype)
        second_TD = start.centred_TD.to(cloud.vectors.dtype)
        product_DD = (first_TD.mT @ second_TD).double()
        product = product_DD.norm(dim=(-2, -1)).square()
    hsic = _compute_hsic(product, cloud, start)
    return hsic / (cloud.own_hsic * start.own_hsic).sqrt()


def _compute_hsic(product: Tensor, first: Cloud, second: Cloud) -> Tensor:
    """Return T (T - 3) times the unbiased HSIC of two centred clouds X and Y, from the `product` |X^T Y|_F^2.

    The result equals tr(KL) + sum(K) sum(L) / ((T - 1)(T - 2)) - 2 sum(KL) / (T - 2), where K and L are X X^T and Y Y^T
    with zeros on the diagonal, and sum() is the sum of all elements of a matrix. None of these T x T matrices is
    needed, because the rows of X X^T sum to 0, and row i of K therefore sums to -|x_i|^2:

        sum(K) = -sum_i |x_i|^2
        sum(KL) = sum_i |x_i|^2 |y_i|^2
        tr(KL) = |X^T Y|_F^2 - sum_i |x_i|^2 |y_i|^2        without the diagonals of X X^T and Y Y^T
    """
    tokens = first.tokens
    sum_of_KL = (first.squares_T * second.squares_T).sum(-1)
    trace_of_KL = product - sum_of_KL
    negative_sum_of_K = first.squares_T.sum(-1)
    negative_sum_of_L = second.squares_T.sum(-1)
    pairs = (tokens - 1) * (tokens - 2)
    sums_term = negative_sum_of_K * negative_sum_of_L / pairs  # The signs cancel.
    product_term = 2 * sum_of_KL / (tokens - 2)
    estimate: Tensor = trace_of_KL + sums_term - product_term
    return estimate


def step_measures(layer_pass: LayerPass) -> Tensor:
    """Return `STEP_MEASURES` `[..., T, steps, measures]` of texts in one layer; NaN for steps that the family lacks.

    The steps are the operations in `STEP_POINTS`, such as a skip connection. `cosine_previous` compares the vector
    after a step with the vector after the previous step, and `cosine_input` with the layer's input. `distance_previous`
    and `norm` are lengths relative to the length of this input. Cosines with the step `heads` are not meaningful,
    because the concatenated heads have a different basis from the residual stream; they are NaN if the widths differ.
    """
    all_vectors = _select_step_vectors(layer_pass)
    vectors_by_step = {step: vectors for step, vectors in all_vectors.items() if vectors is not None}
    # Axes: S steps that the family has, T tokens, m measures.
    measures_STm = _compare_steps(layer_pass.x, list(vectors_by_step.values()))
    measures_by_step = dict(zip(vectors_by_step, measures_STm, strict=True))
    undefined_Tm = torch.full_like(measures_STm[0], torch.nan)
    in_order = [measures_by_step.get(step, undefined_Tm) for step in STEP_POINTS]
    return torch.stack(in_order, dim=-2)


def _compare_steps(layer_input: Tensor, steps: Sequence[Tensor]) -> Tensor:
    """Return `STEP_MEASURES` `[S, ..., T, measures]` of S steps, from the vectors `[..., T, D]` after each step.

    The vectors are compared with those after the previous step (for the first step, the input) and with the input.
    """
    previous_steps = [layer_input, *steps[:-1]]
    input_length_T = layer_input.norm(dim=-1)
    lengths = [input_length_T]
    products_with_input = []
    products_with_previous = []
    distances = []
    for vectors, previous in zip(steps, previous_steps, strict=True):
        lengths.append(vectors.norm(dim=-1))
        products_with_input.append(_compute_products(vectors, layer_input))
        products_with_previous.append(_compute_products(vectors, previous))
        distances.append(_compute_distances(vectors, previous))
    all_lengths = torch.stack(lengths)
    length_ST = all_lengths[1:]
    previous_length_ST = all_lengths[:-1]
    measures = {
        "cosine_previous": _compute_cosine(torch.stack(products_with_previous), length_ST * previous_length_ST),
        "cosine_input": _compute_cosine(torch.stack(products_with_input), length_ST * input_length_T),
        "distance_previous": torch.stack(distances) / input_length_T,
        "norm": length_ST / input_length_T,
    }
    return _stack_measures(measures, STEP_MEASURES, like=length_ST)


def _select_step_vectors(layer_pass: LayerPass) -> dict[str, Tensor | None]:
    """Return the vectors `[..., T, D]` after each step in `STEP_POINTS`; None for steps that the family lacks.

    `STEP_POINTS` contains the capture point after each step of a layer; None for the second skip connection.
    """
    features = layer_pass.features
    vectors: dict[str, Tensor | None] = {}
    for step, point in STEP_POINTS.items():
        vectors[step] = None
        if point:
            vectors[step] = features.get(point)
    # The sum at the second skip connection is the output of pre-LN layers; in post-LN layers, it is not captured.
    if layer_pass.block.output_norm.absent:
        vectors["ffn_skip"] = features["layer_output"]
        vectors["ffn_norm"] = None
    else:
        vectors["ffn_skip"] = layer_pass.stream + features["ffn_output"]
    return vectors


def _compute_products(first: Tensor, second: Tensor) -> Tensor:
    """Return the dot products `[..., T]` of vectors `[..., T, D]`; NaN if the widths D differ."""
    if first.shape != second.shape:
        return first.new_full(first.shape[:-1], torch.nan)
    return (first * second).sum(-1)


def _compute_distances(first: Tensor, second: Tensor) -> Tensor:
    """Return the distances `[..., T]` between vectors `[..., T, D]`; NaN if the widths D differ."""
    if first.shape != second.shape:
        return first.new_full(first.shape[:-1], torch.nan)
    distances: Tensor = (first - second).norm(dim=-1)
    return distances


def _compute_cosine(products: Tensor, lengths: Tensor) -> Tensor:
    """Return cosines: dot products of vectors, divided by the products of lengths; 0 for vectors of length 0."""
    smallest = torch.finfo(lengths.dtype).tiny
    return products / lengths.clamp_min(smallest)
