"""The shape of a document's cloud of token vectors at a capture point."""

from __future__ import annotations

import torch

Tensor = torch.Tensor

GEOMETRY_MEASURES = ("mean_cosine", "effective_rank", "residual_share", "own_nearest", "cka_input")


def geometry(x_TD: Tensor, input_TD: Tensor, words_TD: Tensor, token_ids_T: Tensor) -> Tensor:
    """`GEOMETRY_MEASURES` of one document's vectors at one point, in float64.

    `input_TD` enters the layer, `words_TD` are the document's word embeddings:
    - `mean_cosine`: over all pairs of different tokens; 1 for a document of one token.
    - `effective_rank`: exp of the entropy of the singular values' shares (Roy and Vetterli, 2007).
    - `residual_share`: |X - 1 mean|_F / |X|_F (the residual of Dong et al., ICML 2021).
    - `own_nearest`: share of tokens whose nearest word embedding, by cosine, is their own token's.
    - `cka_input`: linear CKA with the layer's input (Kornblith et al., ICML 2019, equation 3).
    """
    x, start, words = (vectors.double() for vectors in (x_TD, input_TD, words_TD))
    gram = x @ x.T
    return torch.stack(
        [
            _mean_cosine(gram),
            _effective_rank(gram),
            _centred_gram(gram).diagonal().sum().clamp_min(0).sqrt() / gram.diagonal().sum().sqrt(),
            _own_nearest(x, words, token_ids_T),
            _cka(gram, start @ start.T),
        ]
    )


def _mean_cosine(gram_TT: Tensor) -> Tensor:
    tokens = gram_TT.shape[0]
    if tokens == 1:
        return gram_TT.new_ones(())
    lengths = gram_TT.diagonal().sqrt()
    cosines = gram_TT / torch.outer(lengths, lengths)
    return (cosines.sum() - tokens) / (tokens * (tokens - 1))


def _effective_rank(gram_TT: Tensor) -> Tensor:
    singular = torch.linalg.eigvalsh(gram_TT).clamp_min(0).sqrt()
    shares = singular / singular.sum()
    entropy: Tensor = torch.special.entr(shares).sum()
    return entropy.exp()


def _own_nearest(x_TD: Tensor, words_TD: Tensor, token_ids_T: Tensor) -> Tensor:
    nearest = (x_TD @ torch.nn.functional.normalize(words_TD, dim=-1).T).argmax(-1)
    return (token_ids_T[nearest] == token_ids_T).double().mean()


def _centred_gram(gram_TT: Tensor) -> Tensor:
    return gram_TT - gram_TT.mean(0) - gram_TT.mean(1, keepdim=True) + gram_TT.mean()


def _cka(gram_TT: Tensor, other_TT: Tensor) -> Tensor:
    first, second = _centred_gram(gram_TT), _centred_gram(other_TT)
    similarity: Tensor = (first * second).sum() / (first.norm() * second.norm())
    return similarity
