"""Derivatives of one layer along many tangents, in any family of the table.

A layer is project (x -> query, key, value), attention, and finish (x and heads -> layer output). Project and finish
are the library's own modules, of which `torch.func` takes the derivative; the softmax's is written out, as it is the
same in all families and needs no sum over pairs of tokens where only one token moves.

Shapes: K directions, S source tokens, R = S * K tangents, H heads, T tokens, d head width, D hidden, E = H * d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import jvp, vmap

from attnmix.measures.layers import Block
from attnmix.models.attention import AttentionCall, attention_by, explicit, observed, unattended
from attnmix.models.capture_points import LayerCall

Tensor = torch.Tensor


def tangents(function: Callable[..., Any], at: tuple[Tensor, ...], moved: tuple[Tensor, ...]) -> Any:
    """Return the derivative of `function` at `at` along each tangent; `moved` counts them in its first dimension."""
    with attention_by(explicit):
        return vmap(lambda *along: jvp(function, at, along)[1])(*moved)


class LayerTangents:
    """One layer of one document's forward pass."""

    def __init__(self, call: LayerCall) -> None:
        self.call, self.block, self.x_TD = call, Block(call.module, call.stack), call.whole.hidden[0]
        calls: list[AttentionCall] = []
        with attention_by(observed(lambda _module, layer_pass: calls.append(layer_pass))):
            self._attend(self.x_TD)
        attention = calls[0].document(0)
        self.query_HTd, self.key_HTd, self.value_HTd = attention.query, attention.key, attention.value
        self.weights_HTT = attention.weights()
        self.pull_HTT = self.weights_HTT * attention.slopes()
        self.heads_HTd = self.weights_HTT @ attention.value

    def move_all_tokens(self, moved_RTD: Tensor) -> Tensor:
        """Return the derivative of the layer's output along tangents at all tokens, `[R, T, D]`."""
        query, key, value = tangents(self._project, (self.x_TD,), (moved_RTD,))  # [R, H, T, d]
        pull_RHTT = (query @ self.key_HTd.mT + self.query_HTd @ key.mT) * self.pull_HTT
        heads_RHTd = self._heads(pull_RHTT, self.heads_HTd) + self.weights_HTT @ value
        return self._finish_tangents(moved_RTD, heads_RHTd.transpose(1, 2).flatten(2))

    def projected(self, moved_KTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what K tangents at each token change in the token's own query, key and value, `[K, H, T, d]`."""
        moved: tuple[Tensor, Tensor, Tensor] = tangents(self._project, (self.x_TD,), (moved_KTD,))
        return moved

    def move_one_token(self, moved_KTD: Tensor, projected: tuple[Tensor, Tensor, Tensor], sources_S: Tensor) -> Tensor:
        """Return the output's derivative along tangents each of which moves one source only, `[S * K, T, D]`.

        Where token j moves, another token's scores change for j only, and only j's own for all tokens.
        """
        query, key, value = (part[..., sources_S, :] for part in projected)  # [K, H, S, d]
        pull_KHTS = (self.query_HTd @ key.mT) * self.pull_HTT[..., sources_S]
        apart_SHTd = self.value_HTd[:, sources_S].transpose(0, 1).unsqueeze(2) - self.heads_HTd
        heads_SKTHd = pull_KHTS.permute(3, 0, 2, 1).unsqueeze(-1) * apart_SHTd.transpose(1, 2).unsqueeze(1)
        weights_STH = self.weights_HTT[..., sources_S].permute(2, 1, 0)
        heads_SKTHd.addcmul_(weights_STH[:, None, ..., None], value.permute(2, 0, 1, 3).unsqueeze(2))
        own_KHST = (query @ self.key_HTd.mT) * self.pull_HTT[:, sources_S]
        own_KHSd = self._heads(own_KHST, self.heads_HTd[:, sources_S])
        places = torch.arange(len(sources_S), device=sources_S.device)
        heads_SKTHd[places, :, sources_S] += own_KHSd.permute(2, 0, 1, 3)
        x_SKTD = moved_KTD.new_zeros(*heads_SKTHd.shape[:3], moved_KTD.shape[-1])
        x_SKTD[places, :, sources_S] = moved_KTD[:, sources_S].transpose(0, 1)
        return self._finish_tangents(x_SKTD.flatten(0, 1), heads_SKTHd.flatten(-2).flatten(0, 1))

    def _heads(self, pull: Tensor, heads: Tensor) -> Tensor:
        """Return the tangents of `heads` `[..., rows, d]`; `pull` `[..., rows, T]` is weight times score tangent."""
        return pull @ self.value_HTd - pull.sum(-1, keepdim=True) * heads

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value `[H, T, d]`."""
        calls: list[AttentionCall] = []
        with attention_by(unattended(calls.append)):
            self._attend(x_TD)
        return calls[0].query[0], calls[0].key[0], calls[0].value[0]

    def _attend(self, x_TD: Tensor) -> None:
        self.call.parts["attention"](self.block.attention_input(x_TD).unsqueeze(0))

    def _finish(self, x_TD: Tensor, heads_TE: Tensor) -> Tensor:
        return self.block.rest(self.call, x_TD, self.block.attention_output(heads_TE))

    def _finish_tangents(self, x_RTD: Tensor, heads_RTE: Tensor) -> Tensor:
        heads_TE = self.heads_HTd.transpose(0, 1).flatten(1)
        moved: Tensor = tangents(self._finish, (self.x_TD, heads_TE), (x_RTD, heads_RTE))
        return moved
