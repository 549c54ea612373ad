"""The shape of a document's cloud of token vectors at a capture point, and where a layer's steps move each vector."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from attnmix.core.points import STEP_MEASURES, STEP_POINTS
from attnmix.measures.layers import LayerPass

Tensor = torch.Tensor

ROWS_AT_ONCE = 1024
ROUNDING = 1e-12  # of float64, relative: what is smaller than that share of its scale is no number to divide by
GEOMETRY_MEASURES = (
    "mean_cosine",
    "effective_rank",
    "effective_rank_bound",
    "residual_share",
    "own_nearest",
    "cka_input",
)


class Cloud:
    """One document's vectors `[tokens, width]` at one point in float64, and the products that several measures need.

    No matrix of tokens by tokens is made where there are more tokens than dimensions.
    """

    def __init__(self, x_TD: Tensor) -> None:
        self.given_TD = x_TD
        self.x_TD = x_TD.double()
        self.tokens, self.width = x_TD.shape
        self.centred_TD = self.x_TD - self.x_TD.mean(0)

    @cached_property
    def unit_sum_D(self) -> Tensor:
        """Sum of the vectors, each divided by its norm."""
        return torch.nn.functional.normalize(self.x_TD, dim=-1).sum(0)

    @cached_property
    def gram(self) -> Tensor:
        """Products of the centred vectors `[tokens, tokens]`, or of their dimensions where these are fewer."""
        centred = self.centred_TD
        return centred @ centred.T if self.tokens <= self.width else centred.T @ centred

    @cached_property
    def squares_T(self) -> Tensor:
        """Squared norms of the centred vectors."""
        return self.centred_TD.square().sum(-1)

    @cached_property
    def varies(self) -> Tensor:
        """Whether the tokens differ by more than rounding."""
        varies: Tensor = self.squares_T.sum().sqrt() > ROUNDING * self.x_TD.norm()
        return varies

    @cached_property
    def own_hsic(self) -> Tensor:
        """`_hsic` with itself; NaN where it is nothing but rounding."""
        square = self.gram.square().sum()
        hsic = _hsic(square, self.squares_T, self.squares_T)
        return torch.where(self.varies & (hsic > ROUNDING * square), hsic, torch.nan)


@dataclass(frozen=True)
class Words:
    """The different word embeddings of a document."""

    unit_WD: Tensor  # of norm 1
    ids_W: Tensor
    token_ids_T: Tensor


def words_of(words_TD: Tensor, token_ids_T: Tensor, first_W: Tensor) -> Words:
    """Return a document's word embeddings; `first_W` are the positions at which a token is there for the first time."""
    words_WD = torch.nn.functional.normalize(words_TD[first_W].double(), dim=-1)
    return Words(words_WD, token_ids_T[first_W], token_ids_T)


def geometry(cloud: Cloud, start: Cloud, words: Words | None) -> Tensor:
    """Return `GEOMETRY_MEASURES` of one document's vectors at one point, in float64.

    `start` enters the layer, `words` are None where they are of another width or of other tokens. What is not defined
    is NaN.
    - `mean_cosine`: over all pairs of different tokens; NaN for a document of one token.
    - `effective_rank`: exp of the entropy of the singular values' shares (Roy and Vetterli, 2007), of the vectors
      without their mean; NaN where all tokens are equal.
    - `effective_rank_bound`: the most that it can be, min(tokens - 1, width).
    - `residual_share`: |X - 1 mean|_F / |X|_F (the residual of Dong et al., ICML 2021).
    - `own_nearest`: share of tokens whose nearest word embedding, by cosine, is their own token's.
    - `cka_input`: linear CKA with the layer's input (Kornblith et al., ICML 2019, equation 3) by the unbiased
      estimator of HSIC (Song et al., JMLR 2012; Nguyen et al., ICLR 2021, equation 3). Independent clouds
      are at 0 on average, single ones also below; NaN for fewer than 4 tokens, and where one side does not vary.
    """
    x = cloud.x_TD
    nothing = x.new_full((), torch.nan)
    return torch.stack(
        [
            _mean_cosine(cloud) if cloud.tokens > 1 else nothing,
            _effective_rank(cloud),
            x.new_full((), min(cloud.tokens - 1, cloud.width)),
            cloud.centred_TD.norm() / x.norm(),
            nothing if words is None else _own_nearest(x, words),
            _cka(cloud, start) if cloud.tokens >= 4 else nothing,
        ]
    )


def _mean_cosine(cloud: Cloud) -> Tensor:
    tokens = cloud.tokens
    return (cloud.unit_sum_D.square().sum() - tokens) / (tokens * (tokens - 1))


def _effective_rank(cloud: Cloud) -> Tensor:
    values = torch.linalg.eigvalsh(cloud.gram)
    # Eigenvalues that are 0 come out as rounding, whose roots would count: centring and repeated tokens make them.
    rounding = torch.finfo(values.dtype).eps * len(values) * values[-1]
    singular = torch.where(values > rounding, values, 0).sqrt()
    entropy = torch.special.entr(singular / singular.sum()).sum()
    return torch.where(cloud.varies, entropy.exp(), torch.nan)


def _own_nearest(x_TD: Tensor, words: Words) -> Tensor:
    unit_DW = words.unit_WD.T
    nearest = torch.cat([(rows @ unit_DW).argmax(-1) for rows in x_TD.split(ROWS_AT_ONCE)])
    return (words.ids_W[nearest] == words.token_ids_T).double().mean()


def _cka(cloud: Cloud, start: Cloud) -> Tensor:
    if cloud is start:
        return cloud.own_hsic / cloud.own_hsic
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
    length = start.norm(dim=-1)
    rows = []
    for now in _vectors(layer_pass).values():
        row = start.new_full((len(start), len(STEP_MEASURES)), torch.nan)
        if now is not None:
            row[:, 3] = now.norm(dim=-1) / length
            if now.shape == start.shape:
                row[:, 1] = torch.cosine_similarity(now, start, dim=-1)
            if now.shape == before.shape:
                row[:, 0] = torch.cosine_similarity(now, before, dim=-1)
                row[:, 2] = (now - before).norm(dim=-1) / length
            before = now
        rows.append(row)
    return torch.stack(rows, dim=1)


def _vectors(layer_pass: LayerPass) -> dict[str, Tensor | None]:
    """Return the vectors after each step.

    A post-LN layer's second skip connection has no capture point, a pre-LN layer's is its end.
    """
    vectors = {step: layer_pass.features.get(point) if point else None for step, point in STEP_POINTS.items()}
    stack = layer_pass.block.stack
    if stack.output_norm is None:
        vectors |= {"ffn_skip": layer_pass.features["layer_output"], "ffn_norm": None}
    else:
        last_norm = "cross_attention_norm" if stack.cross_attention_norm else "attention_norm"
        vectors["ffn_skip"] = layer_pass.features[last_norm] + layer_pass.features["ffn_output"]
    return vectors
