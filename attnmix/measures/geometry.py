"""Geometry of the token vectors of a text (a cloud) at a capture point, and displacements by the steps of a layer.

Computation is batched over texts and points. Shapes: `...` texts and points, T tokens, D width, N = min(T, D), W
distinct token IDs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
SOLVED_NUMBERS = 2**16  # numbers in the products of a group of texts; for more, calls cost less than eigenvalues
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
    """The vectors `[..., T, D]` of texts at capture points, in float64, and products that several measures share."""

    def __init__(self, vectors: Tensor, mask: Tensor | None = None) -> None:
        """Prepare vectors. `mask` `[..., T]` is False for padding (default: no padding)."""
        self.mask = torch.ones_like(vectors[..., 0], dtype=torch.bool)
        if mask is not None:
            self.mask = mask
        mask_T1 = self.mask.unsqueeze(-1)
        self.vectors = vectors
        self.width = vectors.shape[-1]
        self.tokens = self.mask.sum(-1).double()
        x_TD = vectors.to(torch.float64, copy=True)
        if mask is not None:
            x_TD.masked_fill_(~mask_T1, 0)
        length_T = x_TD.norm(dim=-1)
        inverse_length_T = 1 / length_T.clamp_min(SHORTEST)
        unit_sum_1D = inverse_length_T.unsqueeze(-2).matmul(x_TD)
        self.unit_sum_D = unit_sum_1D.squeeze(-2)
        mean_D = x_TD.sum(-2) / self.tokens.unsqueeze(-1)
        mean_1D = mean_D.unsqueeze(-2)
        self.centred_TD = x_TD.addcmul_(mask_T1, mean_1D, value=-1)  # zeros for padding
        # The Gram matrix is T x T or D x D, whichever is smaller.
        self.by_tokens = vectors.shape[-2] <= self.width
        if self.by_tokens:
            self.gram_NN = self.centred_TD @ self.centred_TD.mT
        else:
            self.gram_NN = self.centred_TD.mT @ self.centred_TD
        self.squares_T = self.centred_TD.norm(dim=-1).square()
        self.norm = length_T.norm(dim=-1)
        self.centred_norm = self.squares_T.sum(-1).sqrt()
        # Measures are undefined if tokens differ only by rounding errors, or if the HSIC is a rounding error.
        self.varies = self.centred_norm > ROUNDING * self.norm
        square = self.gram_NN.norm(dim=(-2, -1)).square()
        hsic = _compute_hsic(square, self, self)
        is_precise = hsic > ROUNDING * square
        self.own_hsic = hsic.where(self.varies & is_precise, torch.nan)
        is_constant = ~self.varies
        self.gram_NN.masked_fill_(is_constant[..., None, None], 0)  # replaces rounding errors and NaN


class Words:
    """The word embeddings of the distinct token IDs of each text, from the embeddings of all tokens `[..., T, D]`."""

    def __init__(self, words_TD: Tensor, ids: npt.NDArray[np.integer]) -> None:
        """Select the embeddings of distinct token IDs in `ids` `[..., T]`. Padding must repeat an ID of the text."""
        first_places = []  # by text: positions of the first occurrence of each token ID
        for text_ids in ids.reshape(-1, ids.shape[-1]):
            _, places = np.unique(text_ids, return_index=True)
            first_places.append(places)
        most_words = max(map(len, first_places))
        padded = []
        for places in first_places:
            padding = np.full(most_words - len(places), places[0])
            padded.append(np.append(places, padding))
        place_W = np.stack(padded).reshape(*ids.shape[:-1], most_words)
        first_W = torch.as_tensor(place_W, device=words_TD.device)
        self.ids_T = torch.as_tensor(ids, device=words_TD.device)
        self.ids_W = self.ids_T.gather(-1, first_W)
        different_WD = torch.take_along_dim(words_TD, first_W.unsqueeze(-1), -2)
        self.unit_WD = normalize(different_WD, dim=-1)

    def own_nearest(self, vectors: Tensor) -> Tensor:
        """Return True for vectors `[..., points, T, D]` whose nearest word embedding is that of their own token.

        Only the embeddings of the text's tokens are compared, by cosine.
        """
        texts = self.unit_WD.shape[:-2]
        rows = vectors.reshape(*texts, -1, vectors.shape[-1]).to(self.unit_WD)
        words = self.unit_WD[..., 0].numel()
        chunk_rows = max(1, NEAREST_NUMBERS // words)
        nearest_by_chunk = []
        for chunk in rows.split(chunk_rows, -2):
            products = chunk @ self.unit_WD.mT
            nearest_by_chunk.append(products.argmax(-1))
        tokens = self.ids_T.shape[-1]
        nearest = torch.cat(nearest_by_chunk, -1)
        nearest_ids = self.ids_W.gather(-1, nearest)
        ids_by_point = nearest_ids.view(*texts, -1, tokens)
        is_own = ids_by_point == self.ids_T.unsqueeze(-2)
        return is_own.view(vectors.shape[:-1])


def geometry(cloud: Cloud, start: Cloud, words: Words | None) -> Tensor:
    """Return `GEOMETRY_MEASURES` of clouds, `[..., measures]` in float64.

    `start` is the input of the layer. `words` is None if word embeddings differ in width or in tokens from the vectors.
    Undefined measures are NaN; `docs/measures/geometry.md` contains definitions and conditions.
    - `effective_rank`: exp of the entropy of the singular values' shares (Roy and Vetterli, 2007).
    - `residual_share`: |X - 1 mean|_F / |X|_F (the residual of Dong et al., ICML 2021).
    - `cka_input`: linear CKA with the layer's input (Kornblith et al., ICML 2019, equation 3) by the unbiased
      estimator of HSIC (Song et al., JMLR 2012; Nguyen et al., ICLR 2021, equation 3).
    """
    measures = geometry_but_rank(cloud, start, words)
    ranks = _compute_effective_rank(cloud.gram_NN.cpu())
    measures[..., RANK] = ranks.to(measures)
    return measures


def geometry_but_rank(cloud: Cloud, start: Cloud, words: Words | None) -> Tensor:
    """Return `geometry` with NaN for `effective_rank`, which `effective_ranks` computes separately."""
    tokens = cloud.tokens.expand_as(cloud.norm)
    sum_of_cosines = cloud.unit_sum_D.square().sum(-1) - tokens
    mean_cosine = sum_of_cosines / (tokens * (tokens - 1))
    cka = _compute_cka(cloud, start)
    measures = {
        "mean_cosine": mean_cosine.where(tokens > 1, torch.nan),
        "effective_rank_bound": (tokens - 1).clamp_max(cloud.width),
        "residual_share": cloud.centred_norm / cloud.norm,
        "cka_input": cka.where(tokens >= 4, torch.nan),
    }
    if words is not None:
        is_own_nearest = words.own_nearest(cloud.vectors) & cloud.mask
        measures["own_nearest"] = is_own_nearest.sum(-1) / tokens
    return _stack_measures(measures, GEOMETRY_MEASURES, like=tokens)


def _stack_measures(measures: Mapping[str, Tensor], names: Sequence[str], like: Tensor) -> Tensor:
    """Return the measures `[..., names]`. Missing ones are NaN in the shape of `like`."""
    undefined = torch.full_like(like, torch.nan)
    in_order = [measures.get(name, undefined) for name in names]
    return torch.stack(in_order, dim=-1)


def effective_ranks(cloud: Cloud, lengths: Sequence[int]) -> Future[Tensor]:
    """Return the effective ranks `[texts, points]` of a cloud `[texts, points, T, D]`; `lengths` are token counts.

    Eigenvalues are computed on the CPU, because solvers on other devices process matrices sequentially. Gram matrices
    on other devices are copied by a separate thread, while the device continues.
    """
    sizes = lengths
    if not cloud.by_tokens:
        sizes = [cloud.width] * len(lengths)
    if not cloud.gram_NN.is_cpu:
        fetching_thread = _get_fetching_thread()
        return fetching_thread.submit(_fetch_ranks, cloud.gram_NN, sizes)
    ranks = _compute_ranks(cloud.gram_NN, sizes, map)
    finished: Future[Tensor] = Future()
    finished.set_result(ranks)
    return finished


def _fetch_ranks(gram: Tensor, sizes: Sequence[int]) -> Tensor:
    """Copy Gram matrices from another device to the CPU, and compute their effective ranks in parallel."""
    solving_threads = _get_solving_threads()
    return _compute_ranks(gram.cpu(), sizes, solving_threads.map)


def _compute_ranks(gram_BPNN: Tensor, sizes: Sequence[int], apply: Callable[..., Iterable[Tensor]]) -> Tensor:
    """Return the effective ranks `[texts, points]` from the products. Padding is removed first."""
    points = gram_BPNN.shape[1]
    groups = list(_group_by_size(sizes, points))
    grams = [gram_BPNN[texts, :, : sizes[texts[0]], : sizes[texts[0]]] for texts in groups]
    ranks_BP = gram_BPNN.new_empty(len(sizes), points)
    for texts, ranks in zip(groups, apply(_compute_effective_rank, grams), strict=True):
        ranks_BP[texts] = ranks
    return ranks_BP


def _group_by_size(sizes: Sequence[int], points: int) -> Iterator[list[int]]:
    """Yield indices of texts of equal size whose products are solved together; large texts form groups of their own."""
    texts_by_size: dict[int, list[int]] = {}
    for text, size in enumerate(sizes):
        texts_by_size.setdefault(size, []).append(text)
    for size, texts in texts_by_size.items():
        texts_in_group = max(1, SOLVED_NUMBERS // (points * size**2))
        for start in range(0, len(texts), texts_in_group):
            yield texts[start : start + texts_in_group]


@cache
def _get_fetching_thread() -> ThreadPoolExecutor:
    """Return the thread that copies Gram matrices from other devices."""
    return ThreadPoolExecutor(1)


@cache
def _get_solving_threads() -> ThreadPoolExecutor:
    """Return one thread per core. Each limits LAPACK to one thread, because nested threads were 16 times slower."""
    return ThreadPoolExecutor(cores(), initializer=torch.set_num_threads, initargs=(1,))


@torch.inference_mode()
def _compute_effective_rank(gram: Tensor) -> Tensor:
    """Return the effective rank from Gram matrices `[..., N, N]`; NaN if all elements are 0."""
    eigenvalues = torch.linalg.eigvalsh(gram)
    # Centring and repeated tokens cause zero eigenvalues; the roots of their rounding errors would not be negligible.
    precision = torch.finfo(eigenvalues.dtype).eps
    size = eigenvalues.shape[-1]
    largest = eigenvalues[..., -1:]
    rounding = precision * size * largest
    squares = torch.where(eigenvalues > rounding, eigenvalues, 0)
    singular_values = squares.sqrt()
    shares = singular_values / singular_values.sum(-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(-1)
    rank: Tensor = entropy.exp()
    return rank


def _compute_cka(cloud: Cloud, start: Cloud) -> Tensor:
    """Return the linear CKA `[...]` of two clouds."""
    if cloud.by_tokens and start.by_tokens:
        product = (cloud.gram_NN * start.gram_NN).sum((-2, -1))
    else:
        # The dtype of the vectors is sufficient, because a sum of squares has no cancellation.
        first_TD = cloud.centred_TD.to(cloud.vectors.dtype)
        second_TD = start.centred_TD.to(cloud.vectors.dtype)
        product_DD = (first_TD.mT @ second_TD).double()
        product = product_DD.norm(dim=(-2, -1)).square()
    hsic = _compute_hsic(product, cloud, start)
    return hsic / (cloud.own_hsic * start.own_hsic).sqrt()


def _compute_hsic(product: Tensor, first: Cloud, second: Cloud) -> Tensor:
    """Return T (T - 3) times the unbiased HSIC of two centred clouds, from |X^T Y|_F^2 and their squared norms.

    It equals tr(KL) + sum(K) sum(L) / ((T - 1)(T - 2)) - 2 sum(KL) / (T - 2), where K and L have zeros on the diagonal.
    For a centred X, the rows of X X^T sum to 0, so the rows of K sum to minus the squared norms, and no T x T matrix is
    needed.
    """
    tokens = first.tokens
    both = (first.squares_T * second.squares_T).sum(-1)
    sums = first.squares_T.sum(-1) * second.squares_T.sum(-1)
    pairs = (tokens - 1) * (tokens - 2)
    sums_term = sums / pairs
    product_term = 2 * both / (tokens - 2)
    estimate: Tensor = product - both + sums_term - product_term
    return estimate


def step_measures(layer_pass: LayerPass) -> Tensor:
    """Return `STEP_MEASURES` `[..., T, steps, measures]` of texts in one layer; NaN for steps that the family lacks.

    `cosine_previous` compares the vector after a step with the vector after the previous step, `cosine_input` with the
    token's layer input. `distance_previous` and `norm` are lengths relative to the length of the input. The step
    `heads` (concatenated heads) has a different basis from the residual stream, so its cosines are not meaningful, and
    undefined if the widths differ.
    """
    start = layer_pass.x
    start_length_T = start.norm(dim=-1)
    all_vectors = _select_step_vectors(layer_pass)
    present = {step: vectors for step, vectors in all_vectors.items() if vectors is not None}
    steps = list(present.values())
    previous_steps = [start, *steps[:-1]]
    length_with_input_ST = torch.stack([start_length_T, *(vectors.norm(dim=-1) for vectors in steps)])
    length_ST = length_with_input_ST[1:]
    previous_length_ST = length_with_input_ST[:-1]
    product_input_ST = torch.stack([_compute_products(vectors, start) for vectors in steps])
    product_previous_ST = torch.stack(list(map(_compute_products, steps, previous_steps)))
    distance_previous_ST = torch.stack(list(map(_compute_distances, steps, previous_steps)))
    measures = {
        "cosine_previous": _compute_cosine(product_previous_ST, length_ST * previous_length_ST),
        "cosine_input": _compute_cosine(product_input_ST, length_ST * start_length_T),
        "distance_previous": distance_previous_ST / start_length_T,
        "norm": length_ST / start_length_T,
    }
    measures_STm = _stack_measures(measures, STEP_MEASURES, like=length_ST)
    by_step = dict(zip(present, measures_STm, strict=True))
    missing_Tm = _stack_measures({}, STEP_MEASURES, like=start_length_T)
    return torch.stack([by_step.get(step, missing_Tm) for step in STEP_POINTS], dim=-2)


def _select_step_vectors(layer_pass: LayerPass) -> dict[str, Tensor | None]:
    """Return the vectors `[..., T, D]` after each of `STEP_POINTS`; None for steps that the family lacks."""
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
    """Return cosines from dot products of vectors and products of their lengths; 0 for vectors of length 0."""
    smallest = torch.finfo(lengths.dtype).tiny
    return products / lengths.clamp_min(smallest)
