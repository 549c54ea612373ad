"""The shape of a document's cloud of token vectors at a capture point, and where a layer's steps move each vector."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnmix.core.names import STEP_MEASURES, STEP_POINTS
from attnmix.measures.layers import LayerPass

BLOCK_ROWS = 1024  # tokens whose products with all words are in memory
ROUNDING = 1e-12  # relative, of float64: a number below that share of its scale is rounding error
GEOMETRY_MEASURES = (
    "mean_cosine",
    "effective_rank",
    "effective_rank_bound",
    "residual_share",
    "own_nearest",
    "cka_input",
)


class Cloud:
    """One document's vectors `[tokens, width]` at one point in float64, and the products that several measures need."""

    def __init__(self, x_TD: Tensor) -> None:
        self.x_TD, (self.tokens, self.width) = x_TD.double(), x_TD.shape
        self.unit_sum_D = torch.nn.functional.normalize(self.x_TD, dim=-1).sum(0)
        centred = self.centred_TD = self.x_TD - self.x_TD.mean(0)
        # Of tokens by tokens, or of dimensions by dimensions where these are fewer: a long document needs no T x T.
        self.gram = centred @ centred.T if self.tokens <= self.width else centred.T @ centred
        self.squares_T = centred.square().sum(-1)
        # Tokens that differ by rounding only, and an HSIC that is nothing but rounding, define no measure.
        self.varies = self.squares_T.sum().sqrt() > ROUNDING * self.x_TD.norm()
        square = self.gram.square().sum()
        hsic = _hsic(square, self.squares_T, self.squares_T)
        self.own_hsic = torch.where(self.varies & (hsic > ROUNDING * square), hsic, torch.nan)


class Words:
    """The different word embeddings of a document, from those of its tokens `[tokens, width]`."""

    def __init__(self, words_TD: Tensor, ids: npt.NDArray[np.int32]) -> None:
        _, first, number_of_token = np.unique(ids, return_index=True, return_inverse=True)
        first_W, self.numbers_T = (torch.as_tensor(each, device=words_TD.device) for each in (first, number_of_token))
        self.unit_WD = torch.nn.functional.normalize(words_TD[first_W].double(), dim=-1)


def geometry(cloud: Cloud, start: Cloud, words: Words | None) -> Tensor:
    """Return `GEOMETRY_MEASURES` of one document's vectors at one point, in float64.

    `start` enters the layer, `words` are None where they are of another width or of other tokens. What is not defined
    is NaN: `docs/measures.md` says when, and what each measure is.
    - `effective_rank`: exp of the entropy of the singular values' shares (Roy and Vetterli, 2007).
    - `residual_share`: |X - 1 mean|_F / |X|_F (the residual of Dong et al., ICML 2021).
    - `cka_input`: linear CKA with the layer's input (Kornblith et al., ICML 2019, equation 3) by the unbiased
      estimator of HSIC (Song et al., JMLR 2012; Nguyen et al., ICLR 2021, equation 3).
    """
    x, tokens = cloud.x_TD, cloud.tokens
    measures = {
        "effective_rank": _effective_rank(cloud),
        "effective_rank_bound": x.new_full((), min(tokens - 1, cloud.width)),
        "residual_share": cloud.centred_TD.norm() / x.norm(),
    }
    if tokens > 1:
        measures["mean_cosine"] = (cloud.unit_sum_D.square().sum() - tokens) / (tokens * (tokens - 1))
    if words is not None:
        nearest_T = torch.cat([(rows @ words.unit_WD.T).argmax(-1) for rows in x.split(BLOCK_ROWS)])
        measures["own_nearest"] = (nearest_T == words.numbers_T).double().mean()
    if tokens >= 4:
        measures["cka_input"] = _cka(cloud, start)
    return torch.stack([measures.get(name, x.new_full((), torch.nan)) for name in GEOMETRY_MEASURES])


def _effective_rank(cloud: Cloud) -> Tensor:
    values = torch.linalg.eigvalsh(cloud.gram)
    # Eigenvalues that are 0 come out as rounding, whose roots would count: centring and repeated tokens make them.
    rounding = torch.finfo(values.dtype).eps * len(values) * values[-1]
    singular = torch.where(values > rounding, values, 0).sqrt()
    entropy = torch.special.entr(singular / singular.sum()).sum()
    return torch.where(cloud.varies, entropy.exp(), torch.nan)


def _cka(cloud: Cloud, start: Cloud) -> Tensor:
    if cloud.gram.shape == start.gram.shape and cloud.tokens <= cloud.width:
        product = (cloud.gram * start.gram).sum()
    else:
        product = (cloud.centred_TD.T @ start.centred_TD).square().sum()
    return _hsic(product, cloud.squares_T, start.squares_T) / (cloud.own_hsic * start.own_hsic).sqrt()


def _hsic(product: Tensor, first_T: Tensor, second_T: Tensor) -> Tensor:
    """Return T (T - 3) times the unbiased HSIC of two centred clouds, from |X^T Y|_F^2 and their squared norms.

    tr(KL) + sum(K) sum(L) / ((T - 1)(T - 2)) - 2 sum(KL) / (T - 2), K and L with zeros on their diagonals. The rows of
    X X^T sum to 0 for a centred X, so those of K sum to minus the squared norms, and T x T matrices are not needed.
    """
    tokens = len(first_T)
    both = first_T @ second_T
    return product - both + first_T.sum() * second_T.sum() / ((tokens - 1) * (tokens - 2)) - 2 * both / (tokens - 2)


def step_measures(layer_pass: LayerPass) -> Tensor:
    """Return `[tokens, steps, measures]` of one document in one layer; NaN for the steps that the family does not have.

    `cosine_previous` compares a step's vector with the one before it, `cosine_input` with the token's
    own layer input; `distance_previous` and `norm` are lengths relative to that input's. The basis
    of `heads` (the heads side by side) is not the residual stream's: its cosines say little, and where its width
    differs too there are none.
    """
    start, before = layer_pass.x, layer_pass.x
    length_T = start.norm(dim=-1)
    steps, features = [], layer_pass.features
    points = {step: features.get(point) if point else None for step, point in STEP_POINTS.items()}
    # A post-LN layer's second skip connection has no capture point, a pre-LN layer's is its end.
    if layer_pass.block.output_norm.absent:
        points |= {"ffn_skip": features["layer_output"], "ffn_norm": None}
    else:
        points["ffn_skip"] = layer_pass.stream + features["ffn_output"]
    for vectors in points.values():
        measures = {}
        if vectors is not None:
            measures["norm"] = vectors.norm(dim=-1) / length_T
            if vectors.shape == start.shape:
                measures["cosine_input"] = torch.cosine_similarity(vectors, start, dim=-1)
            if vectors.shape == before.shape:
                measures["cosine_previous"] = torch.cosine_similarity(vectors, before, dim=-1)
                measures["distance_previous"] = (vectors - before).norm(dim=-1) / length_T
            before = vectors
        undefined_T = torch.full_like(length_T, torch.nan)
        steps.append(torch.stack([measures.get(name, undefined_T) for name in STEP_MEASURES], dim=-1))
    return torch.stack(steps, dim=1)
