"""Norms and linear maps of a model's layers, with weights that are read from the modules of the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import LayerNorm, Module


class Linear(NamedTuple):
    """An affine map `x @ W + b`: W `[in, out]`, b `[out]`."""

    W: Tensor
    b: Tensor


@dataclass(frozen=True)
class Norm:
    """A LayerNorm or an RMSNorm (without centring), with gamma and beta `[hidden]`.

    A part of the norm's input, such as the contribution of one source, passes through the norm's linear part (centring
    and gamma), and is divided by the standard deviation of the whole input.
    """

    module: Callable[[Tensor], Tensor]
    gamma: Tensor
    beta: Tensor
    eps: float
    centred: bool
    absent: bool = False
    """True for an identity, which replaces a norm that the family does not have."""

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return the output of the model's norm for vectors `[..., hidden]`."""
        return self.module(vectors)

    def linear(self, part: Tensor) -> Tensor:
        """Return a part of a vector after the linear part of the norm: centring and gamma, without the division."""
        if self.absent:
            return part
        if not self.centred:
            return part * self.gamma
        centred = part - part.mean(-1, keepdim=True)
        return centred.mul_(self.gamma)

    def deviation(self, whole: Tensor) -> Tensor:
        """Return the norm's divisor `[..., 1]` for the vectors `whole` `[..., hidden]`; 1 if the norm is absent."""
        if self.absent:
            return whole.new_ones(())
        centred = whole - whole.mean(-1, keepdim=True) if self.centred else whole
        return self._root_mean_square(centred)

    def part(self, part: Tensor, whole: Tensor) -> Tensor:
        """Apply the norm, except for beta, to one part of the vectors `whole` `[..., hidden]`.

        The divisor is that of the whole vectors, so the results for all parts, plus beta, sum to the norm's output.
        """
        if self.absent:
            return part
        return self.linear(part) / self.deviation(whole)

    def normalise(self, whole: Tensor) -> Tensor:
        """Return the norm's output for the vectors `whole` `[..., hidden]`, computed from gamma, beta and eps.

        The output equals `part(whole, whole) + beta`, but the vectors are centred only once.
        """
        if self.absent:
            return whole
        centred = whole - whole.mean(-1, keepdim=True) if self.centred else whole
        deviation = self._root_mean_square(centred)
        return centred * self.gamma / deviation + self.beta

    def _root_mean_square(self, centred: Tensor) -> Tensor:
        """Return the norm's divisor `[..., 1]` for centred vectors."""
        mean_square = centred.square().mean(-1, keepdim=True)
        return (mean_square + self.eps).sqrt()


def norm_of(module: Any, like: Tensor) -> Norm:
    """Return the `Norm` of a LayerNorm or RMSNorm module. `like` is a tensor with the dtype and device of the model."""
    eps_name = "eps" if hasattr(module, "eps") else "variance_epsilon"
    eps = float(getattr(module, eps_name))
    bias: Tensor | None = getattr(module, "bias", None)
    if isinstance(module, LayerNorm) or bias is not None:  # DeBERTa uses a custom LayerNorm class.
        return _read_layer_norm(module, bias, eps, like)
    return _read_rms_norm(module, eps, like)


def _read_layer_norm(module: Any, bias: Tensor | None, eps: float, like: Tensor) -> Norm:
    """Return the `Norm` of a LayerNorm. A missing weight is 1, a missing bias 0."""
    if module.weight is None:
        ones = torch.ones(module.normalized_shape)
        gamma = ones.to(like)
    else:
        gamma = module.weight.detach()
    beta = torch.zeros_like(gamma) if bias is None else bias.detach()
    return Norm(module, gamma, beta, eps, centred=True)


def _read_rms_norm(module: Any, eps: float, like: Tensor) -> Norm:
    """Return the `Norm` of an RMSNorm.

    gamma is derived from the module's output for a vector of ones, because some families add 1 to the weight.
    """
    ones = torch.ones_like(module.weight)
    with torch.no_grad():
        output = module(ones).to(like)
    gamma = output * (1 + eps) ** 0.5  # the norm divides a vector of ones by sqrt(1 + eps)
    beta = torch.zeros_like(gamma)
    return Norm(module, gamma, beta, eps, centred=False)


def no_norm(like: Tensor) -> Norm:
    """Return an identity norm, in the dtype and on the device of `like`."""
    gamma = like.new_ones(())
    beta = like.new_zeros(())
    return Norm(lambda vectors: vectors, gamma, beta, eps=0.0, centred=False, absent=True)


def linear_weights(module: Module) -> Linear:
    """Return the weights of a Linear, or of GPT-2's `Conv1D`, which stores the transpose of a Linear's weight."""
    parameters: Any = module
    W = parameters.weight.detach()
    if isinstance(module, torch.nn.Linear):
        W = W.T
    if parameters.bias is None:
        return Linear(W, W.new_zeros(W.shape[1]))
    return Linear(W, parameters.bias.detach())
