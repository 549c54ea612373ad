"""The shape of a document's cloud of token vectors at a capture point."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

ROWS_AT_ONCE = 1024
GEOMETRY_MEASURES = ("mean_cosine", "effective_rank", "residual_share", "own_nearest", "cka_input")


def geometry(x_TD: Tensor, input_TD: Tensor, words_TD: Tensor | None, token_ids_T: Tensor) -> Tensor:
    """`GEOMETRY_MEASURES` of one document's vectors at one point, in float64.

    `input_TD` enters the layer, `words_TD` are the document's word embeddings, None where they are of another width or
    of other tokens. No matrix of tokens by tokens is made where there are more tokens than dimensions.
    - `mean_cosine`: over all pairs of different tokens; 1 for a document of one token.
    - `effective_rank`: exp of the entropy of the singular values' shares (Roy and Vetterli, 2007).
    - `residual_share`: |X - 1 mean|_F / |X|_F (the residual of Dong et al., ICML 2021).
    - `own_nearest`: share of tokens whose nearest word embedding, by cosine, is their own token's.
    - `cka_input`: linear CKA with the layer's input (Kornblith et al., ICML 2019, equation 3).
    """
    x, start = x_TD.double(), input_TD.double()
    near = x.new_full((), torch.nan) if words_TD is None else _own_nearest(x, words_TD.double(), token_ids_T)
    return torch.stack([_mean_cosine(x), _effective_rank(x), _residual_share(x), near, _cka(x, start)])


def _mean_cosine(x_TD: Tensor) -> Tensor:
    tokens = x_TD.shape[0]
    if tokens == 1:
        return x_TD.new_ones(())
    summed = torch.nn.functional.normalize(x_TD, dim=-1).sum(0)
    return (summed.square().sum() - tokens) / (tokens * (tokens - 1))


def _effective_rank(x_TD: Tensor) -> Tensor:
    gram = x_TD @ x_TD.T if x_TD.shape[0] <= x_TD.shape[1] else x_TD.T @ x_TD
    singular = torch.linalg.eigvalsh(gram).clamp_min(0).sqrt()
    shares = singular / singular.sum()
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy.exp()


def _residual_share(x_TD: Tensor) -> Tensor:
    share: Tensor = (x_TD - x_TD.mean(0)).norm() / x_TD.norm()
    return share


def _own_nearest(x_TD: Tensor, words_TD: Tensor, token_ids_T: Tensor) -> Tensor:
    words = torch.nn.functional.normalize(words_TD, dim=-1).T
    nearest = torch.cat([(rows @ words).argmax(-1) for rows in x_TD.split(ROWS_AT_ONCE)])
    return (token_ids_T[nearest] == token_ids_T).double().mean()


def _cka(x_TD: Tensor, other_TD: Tensor) -> Tensor:
    x, other = x_TD - x_TD.mean(0), other_TD - other_TD.mean(0)
    if len(x) <= min(x.shape[1], other.shape[1]):
        first, second = x @ x.T, other @ other.T
        product = (first * second).sum()
    else:
        first, second = x.T @ x, other.T @ other
        product = (x.T @ other).square().sum()
    similarity: Tensor = product / (first.norm() * second.norm())
    return similarity
