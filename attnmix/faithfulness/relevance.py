"""Relevance propagation through a model's own modules: AttnLRP (Achtibat et al., ICML 2024).

Within the context `relevance_rules`, the forward pass of a model is unchanged, and the backward pass propagates
relevance: input times gradient, with these rules for nonlinear operations.

norms                 x / s with the standard deviation s fixed
activations           g(p) = p (g(p) - g(0)) / p + g(0) with the slope (g(p) - g(0)) / p fixed
softmax               the derivative of softmax
products              half of the relevance for each factor: weights and values, queries and keys, both inputs of a gate

If attention scores have a soft cap, the backward pass uses the derivative of this cap. With constant attention weights
and without the rule for products, the result would be CP-LRP (Ali et al., ICML 2022), which equals `decompx` in
families without gated networks.

References:
    Achtibat et al., AttnLRP: Attention-Aware Layer-Wise Relevance Propagation for Transformers, ICML 2024.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from attnmix.measures.layers import slopes
from attnmix.measures.weights import norm_of
from attnmix.models.attention import attention_by, explicit
from attnmix.models.families import HEADS, Family, Stack, stack_layers

HALF = 1 / 2
QUARTER = 1 / 4

Hook = Callable[[Module, Any, Tensor], Tensor]


def relevance_obstacle(family: Family) -> str | None:
    """Return the reason why the propagation rules cannot be applied to a model family, or None if they can."""
    return family.absent().get(HEADS)


@contextmanager
def relevance_rules(base: PreTrainedModel) -> Iterator[None]:
    """Within the context, backward passes of `base` propagate relevance, by the rules in the module's documentation.

    The model must use the attention function `OBSERVED`.
    """
    with ExitStack() as hooks:
        for module, hook in _list_rules(base):
            hooks.enter_context(module.register_forward_hook(hook))
        hooks.enter_context(attention_by(_attend_with_shares, base))
        yield


def _list_rules(base: PreTrainedModel) -> list[tuple[Module, Hook]]:
    """Return the modules with a propagation rule (norms, activations, factors of products), each with the rule's hook.

    A rule is a forward hook that returns the same output with a different gradient. An activation module that several
    layers share is listed once for each of its rules.
    """
    like = next(base.parameters())  # a tensor with the dtype and the device of the model
    rules: list[tuple[Module, Hook]] = []
    for layers in stack_layers(base):
        for layer in dict.fromkeys(layers.modules):
            for module in layer.modules():
                if _is_norm(module):
                    rules.append((module, _hold_deviation(module, like)))
            rules.extend(_list_network_rules(layer, layers.stack))
    return list(dict.fromkeys(rules))


def _is_norm(module: Module) -> bool:
    """Return True for a LayerNorm or an RMSNorm."""
    return hasattr(module, "eps") or hasattr(module, "variance_epsilon")


def _hold_deviation(module: Module, like: Tensor) -> Hook:
    """Return a forward hook that treats the standard deviation in a norm as a constant.

    `like` is a tensor with the dtype and the device of the model.
    """
    norm = norm_of(module, like)

    def normalise(_module: Module, inputs: Any, _output: Tensor) -> Tensor:
        vectors = inputs[0]
        # The divisor is computed from detached vectors, so it has no gradient.
        return norm.part(vectors, vectors.detach()) + norm.beta

    return normalise


def _list_network_rules(layer: Module, stack: Stack) -> list[tuple[Module, Hook]]:
    """Return the propagation rules of a feed-forward network, as pairs of a module and a forward hook of this module.

    A rule is a hook that returns the same output with a different gradient, so that the backward pass propagates
    relevance. In a gated network, the activation's output is multiplied by a second factor, and each factor receives
    half of the relevance of the product. The second factor is the output of a separate Linear, or the second half of
    the first Linear's output.
    """
    # The modules are the first Linear, the activation, the separate Linear of some gated networks, and the last Linear.
    modules = [layer.get_submodule(path) for path in stack.feed_forward_network]
    first_linear = modules[0]
    activation = modules[1]
    rules: list[tuple[Module, Hook]] = [(activation, _hold_slope)]
    if not stack.gated:
        return rules
    rules.append((activation, _halve_relevance))
    has_separate_linear = len(modules) == 4
    if has_separate_linear:
        second_linear = modules[2]
        rules.append((second_linear, _halve_relevance))
    else:
        rules.append((first_linear, _halve_relevance_of_factor))
    return rules


def _hold_slope(module: Module, inputs: Any, output: Tensor) -> Tensor:
    """Forward hook of an activation g that returns g(p) as slope * p + g(0), where the slope has no gradient."""
    p = inputs[0]
    slope = slopes(module.forward, p.detach(), output.detach())
    held: Tensor = slope * p + module.forward(p.new_zeros(1))
    return held


def _halve_relevance(_module: Module, _inputs: Any, output: Tensor) -> Tensor:
    """Forward hook that halves the gradient of a module's output. The output must be one factor of a product."""
    return _scale_gradient(output, HALF)


def _halve_relevance_of_factor(_module: Module, _inputs: Any, output: Tensor) -> Tensor:
    """Forward hook of a Linear that halves the gradient of the second half of its output.

    The Linear is the first of a gated network: the first half is the activation's input, the second half a factor.
    """
    preactivation, factor = output.chunk(2, dim=-1)
    return torch.cat([preactivation, _scale_gradient(factor, HALF)], -1)


def _attend_with_shares(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the head outputs `[B, T, H, d]` (texts, tokens, heads, head width), and None for the attention weights.

    In the backward pass, the values receive half of the relevance, and the queries and the keys receive a quarter each.
    """
    query = _scale_gradient(query, QUARTER)
    key = _scale_gradient(key, QUARTER)
    value = _scale_gradient(value, HALF)
    attend = explicit()
    return attend(module, query, key, value, *arguments, **options)


def _scale_gradient(vectors: Tensor, factor: float) -> Tensor:
    """Return `vectors` unchanged, but with a gradient that is multiplied by `factor`."""
    constant = vectors.detach()
    return constant + factor * (vectors - constant)
