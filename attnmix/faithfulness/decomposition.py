"""The class score taken apart by input token: DecompX (Modarressi et al., ACL 2023).

What enters the first layer is each token's own. From there every vector is kept as a sum of parts, one for each input
token and one of the biases: attention weights as they are, norms by their linear parts, activations by
(g(p) - g(0)) / p (`attnmix.measures.feed_forward`). The parts of the logits sum to them. Keeping the biases apart is
the authors' later option `include_bias_token`; their published configuration spreads each bias over the tokens.

Shapes: J parts (the tokens, then the biases), T tokens, R of them, D hidden, H heads, E = H * head width, C classes.
"""

from __future__ import annotations

from functools import partial

import torch

from attnmix.core.errors import InputError
from attnmix.core.points import PREACTIVATION
from attnmix.faithfulness.classifier import Classifier, HeadCall
from attnmix.measures.feed_forward import AfterAttention, slopes
from attnmix.measures.layers import LayerPass, Linear
from attnmix.models.families import Family

Tensor = torch.Tensor

TOLERANCE = 1e-4  # of the largest logit; rounding of float32 gives 1e-6
BLOCK_NUMBERS = 2**23  # numbers `[J, R, width]` within the feed-forward network
POINTS = ("attention_output", "layer_output", PREACTIVATION)


def why_not(family: Family) -> str | None:
    """Why the logits of a family cannot be taken apart, if so."""
    stack = family.stacks[0]
    if len(family.stacks) > 1:
        return "a decoder stands beside its encoder"
    if not stack.plain:
        return family.absent()["layer_n"]
    if stack.attention_norm is None:
        return family.absent()["attention_norm"]
    return None


class Decomposition:
    """One text's parts, moved on layer by layer; at the end only those of the token that the head reads."""

    def __init__(self, values: list[Linear], read: int) -> None:
        self.values, self.read = values, read
        self.parts_JTD = torch.empty(0)
        self.whole_D = torch.empty(0)

    def visit(self, seen: LayerPass) -> None:
        """Move on through one layer."""
        if seen.number == 1:
            tokens = torch.arange(len(seen.x), device=seen.x.device)
            self.parts_JTD = seen.x.new_zeros(len(tokens) + 1, *seen.x.shape)
            self.parts_JTD[tokens, tokens] = seen.x
        value = self.values[seen.number - 1]
        value_JTE = self.parts_JTD @ value.W
        value_JTE[-1] += value.b
        wanted = range(len(seen.x)) if seen.number < len(self.values) else range(self.read, self.read + 1)
        size = max(1, BLOCK_NUMBERS // (len(self.parts_JTD) * seen.features[PREACTIVATION].shape[-1]))
        blocks = [
            _through_layer(seen, self.parts_JTD, value_JTE, slice(start, min(start + size, wanted.stop)))
            for start in range(wanted.start, wanted.stop, size)
        ]
        self.parts_JTD = torch.cat(blocks, 1)
        self.whole_D = seen.features["layer_output"][self.read]

    def logits(self, classifier: Classifier, calls: list[HeadCall], logits_C: Tensor, name: str) -> Tensor | None:
        """Parts of the logits `[J, C]`; None where the head is not one Linear, or two with an activation between.

        `InputError` where they do not sum to the logits.
        """
        parts_JD = self.parts_JTD[:, 0]
        linear = 1 <= len(calls) <= 2 and torch.equal(calls[0].taken, self.whole_D)
        if not linear or not torch.equal(calls[-1].given, logits_C):
            return None
        parts_JD = _affine(calls[0].linear, parts_JD)
        if len(calls) == 2:
            between = partial(classifier.between, calls[0].linear, calls[1].linear)
            parts_JD = parts_JD * slopes(between, calls[0].given, calls[1].taken)
            parts_JD[-1] += between(parts_JD.new_zeros(1))
            parts_JD = _affine(calls[1].linear, parts_JD)
        error = float((parts_JD.sum(0) - logits_C).abs().max() / logits_C.abs().max().clamp_min(1e-30))
        if not error <= TOLERANCE:
            raise InputError(
                f"{classifier.folder}: the parts of the class scores of {name} do not sum to them: relative error "
                f"{error:.3g}, at most {TOLERANCE:g} is rounding; the entry of {classifier.family.model_type} in "
                "attnmix/models/families.yaml does not hold for this model"
            )
        return parts_JD


def _affine(linear: torch.nn.Linear, parts_JD: Tensor) -> Tensor:
    passed = parts_JD @ linear.weight.T
    if linear.bias is not None:
        passed[-1] += linear.bias
    return passed


def _through_layer(seen: LayerPass, parts_JTD: Tensor, value_JTE: Tensor, rows: slice) -> Tensor:
    """Parts of what enters a layer, and of its values, to those of what leaves it at the tokens `rows`, `[J, R, D]`."""
    block, weights_HRT = seen.block, seen.attention.weights(rows)
    heads_JHTd = value_JTE.unflatten(-1, (len(weights_HRT), -1)).transpose(1, 2)
    mixed_JRE = (weights_HRT @ heads_JHTd).transpose(1, 2).flatten(-2)
    residual_JRD = mixed_JRE @ block.output.W + parts_JTD[:, rows]
    residual_JRD[-1] += block.output.b
    rest = AfterAttention(block, seen.residual[rows], None, seen.features[PREACTIVATION][rows])
    stream_JRD = rest.stream(residual_JRD)
    stream_JRD[-1] = rest.stream_with_biases(residual_JRD[-1])
    summed_JRD = stream_JRD + rest.added(stream_JRD)
    summed_JRD[-1] = stream_JRD[-1] + rest.added_with_biases(stream_JRD[-1])
    norm = block.output_norm
    if norm is None:
        return summed_JRD
    whole_RD = summed_JRD.sum(0)
    passed_JRD = norm.linear(summed_JRD) / norm.deviation(whole_RD)
    passed_JRD[-1] += norm.beta
    return passed_JRD
