"""The class score taken apart by input token: DecompX (Modarressi et al., ACL 2023).

What enters the first layer is each token's own. From there every vector is kept as a sum of parts, one for each input
token and one of the biases: attention weights as they are, norms by their linear parts, activations by
(g(p) - g(0)) / p (`attnmix.measures.layers`). The parts of the logits sum to them. Keeping the biases apart is
the authors' later option `include_bias_token`; their published configuration spreads each bias over the tokens.

Shapes: J parts (the tokens, then the biases), T tokens, R of them, D hidden, H heads, E = H * head width, C classes.
"""

from __future__ import annotations

from functools import partial

import torch

from attnmix.core.errors import InputError
from attnmix.core.points import PREACTIVATION
from attnmix.faithfulness.classifier import Classifier, HeadCall
from attnmix.measures.layers import AfterAttention, LayerPass, slopes
from attnmix.models.families import Family

Tensor = torch.Tensor

TOLERANCE = 1e-4  # of the largest logit; rounding of float32 gives 1e-6
BLOCK_NUMBERS = 2**23  # numbers `[J, R, width]` within the feed-forward network


def decomposition_obstacle(family: Family) -> str | None:
    """Return why the logits of a family cannot be taken apart, if so."""
    stack = family.stacks[0]
    if len(family.stacks) > 1:
        return "a decoder stands beside its encoder"
    if not stack.plain:
        return family.absent()["layer_n"]
    return family.absent()["attention_norm"] if stack.attention_norm is None else None


class Decomposition:
    """One text's parts, moved on layer by layer; at the end only those of the token that the head reads."""

    def __init__(self, classifier: Classifier, read: int) -> None:
        self.classifier, self.read = classifier, read
        self.values = classifier.values  # by a pass of its own, before that of the text
        self.parts_JTD = torch.empty(0)
        self.whole_D = torch.empty(0)

    def visit(self, layer_pass: LayerPass) -> None:
        """Move on through one layer."""
        x_TD = layer_pass.x
        if layer_pass.number == 1:
            tokens = torch.arange(len(x_TD), device=x_TD.device)
            self.parts_JTD = x_TD.new_zeros(len(tokens) + 1, *x_TD.shape)
            self.parts_JTD[tokens, tokens] = x_TD
        value = self.values[layer_pass.number - 1]
        value_JTE = self.parts_JTD @ value.W
        value_JTE[-1] += value.b
        wanted = range(len(x_TD)) if layer_pass.number < len(self.values) else range(self.read, self.read + 1)
        size = max(1, BLOCK_NUMBERS // (len(self.parts_JTD) * layer_pass.features[PREACTIVATION].shape[-1]))
        blocks = [
            _through_layer(layer_pass, self.parts_JTD, value_JTE, slice(start, min(start + size, wanted.stop)))
            for start in range(wanted.start, wanted.stop, size)
        ]
        self.parts_JTD = torch.cat(blocks, 1)
        self.whole_D = layer_pass.features["layer_output"][self.read]

    def logits(self, calls: list[HeadCall], logits_C: Tensor, name: str) -> Tensor | None:
        """Return parts of the logits `[J, C]`; None where the head is not one Linear, or two around an activation.

        Raise `InputError` where they do not sum to the logits.
        """
        parts_JD = self.parts_JTD[:, 0]
        linear = 1 <= len(calls) <= 2 and torch.equal(calls[0].input, self.whole_D)
        if not linear or not torch.equal(calls[-1].output, logits_C):
            return None
        parts_JD = _affine(calls[0].linear, parts_JD)
        if len(calls) == 2:
            between = partial(self.classifier.between, calls[0].linear, calls[1].linear)
            parts_JD = parts_JD * slopes(between, calls[0].output, calls[1].input)
            parts_JD[-1] += between(parts_JD.new_zeros(1))
            parts_JD = _affine(calls[1].linear, parts_JD)
        error = float((parts_JD.sum(0) - logits_C).abs().max() / logits_C.abs().max().clamp_min(1e-30))
        if not error <= TOLERANCE:
            raise InputError(
                f"{self.classifier.folder}: the parts of the class scores of {name} do not sum to them: relative error "
                f"{error:.3g}, at most {TOLERANCE:g} is rounding; the entry of {self.classifier.family.model_type} in "
                "attnmix/models/families.yaml does not hold for this model"
            )
        return parts_JD


def _affine(linear: torch.nn.Linear, parts_JD: Tensor) -> Tensor:
    parts_JC = parts_JD @ linear.weight.T
    if linear.bias is not None:
        parts_JC[-1] += linear.bias
    return parts_JC


def _through_layer(layer_pass: LayerPass, parts_JTD: Tensor, value_JTE: Tensor, rows: slice) -> Tensor:
    """Return the parts `[J, R, D]` of what leaves a layer at the tokens `rows`, from those of its input and values."""
    block, weights_HRT = layer_pass.block, layer_pass.attention.weights(rows)
    heads_JHTd = value_JTE.unflatten(-1, (len(weights_HRT), -1)).transpose(1, 2)
    mixed_JRE = (weights_HRT @ heads_JHTd).transpose(1, 2).flatten(-2)
    residual_JRD = mixed_JRE @ block.output.W + parts_JTD[:, rows]
    residual_JRD[-1] += block.output.b
    rest = AfterAttention(block, layer_pass.residual[rows], None, layer_pass.features[PREACTIVATION][rows])
    stream_JRD = rest.stream(residual_JRD)
    stream_JRD[-1] = rest.stream_with_biases(residual_JRD[-1])
    summed_JRD = stream_JRD + rest.added(stream_JRD)
    summed_JRD[-1] = stream_JRD[-1] + rest.added_with_biases(stream_JRD[-1])
    norm = block.output_norm
    if norm is None:
        return summed_JRD
    passed_JRD = norm.linear(summed_JRD) / norm.deviation(summed_JRD.sum(0))
    passed_JRD[-1] += norm.beta
    return passed_JRD
