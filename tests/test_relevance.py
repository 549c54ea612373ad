"""Parts and token scores equal those of relevance propagation, implemented in torch.

The implementation applies rules to the modules of transformers.

If the standard deviations of norms, the slopes g(p) / p of activations and the attention weights are fixed, one
backward pass yields input times gradient by CP-LRP (Ali et al., ICML 2022), and the Jacobian of that pass is the
detached Jacobian (Golden, TMLR 2025). AttnLRP (Achtibat et al., ICML 2024) also propagates through the softmax and
divides the relevance of a product between its factors. The rules differ in gated networks: LRP assigns half of the
product g(p) u to each factor, whereas the `chord` method integrates along both factors. Llama is therefore compared
for AttnLRP only; its parts are compared with a float64 computation in `test_families.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tokenized_documents
from families import each_family, write_family
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from attnmix.faithfulness.attributions import ATTRIBUTIONS, Review
from attnmix.faithfulness.classifier import Classifier
from attnmix.faithfulness.relevance import relevance_rules
from attnmix.measures.input_parts import PartsReader
from attnmix.models.encoding import padded

TEXT = "the film was very good , and the plot was so lovely !"
LABEL = 0
PRECISION = 1e-9  # relative to the largest value, in float64
SINGLE_PRECISION = 1e-6  # RMSNorm uses float32 regardless of the model's dtype
UNGATED = ("bert", "gpt2")
LAYERS = {"bert": "encoder.layer", "gpt2": "h", "llama": "layers"}
ACTIVATIONS = {
    "bert": (".intermediate_act_fn", "pooler.activation"),
    "gpt2": (".mlp.act",),
    "llama": (".mlp.act_fn",),
}
QUARTER, HALF = 1 / 4, 1 / 2
FACTORS = {
    "bert": {".query": (QUARTER,), ".key": (QUARTER,), ".value": (HALF,)},
    "gpt2": {".attn.c_attn": (QUARTER, QUARTER, HALF)},
    "llama": {
        ".q_proj": (QUARTER,),
        ".k_proj": (QUARTER,),
        ".v_proj": (HALF,),
        ".act_fn": (HALF,),
        ".up_proj": (HALF,),
    },
}
"""Multipliers of gradients at module outputs, one per section of equal width; each product halves the gradient."""
WITHOUT_ATTNLRP = ("mpnet", "deberta-v2", "deberta", "gpt_neo", "bloom", "gpt_neox", "bart", "t5", "mt5", "umt5")
"""Families without hookable queries and keys, with parallel sublayers, or with an encoder and a decoder."""


def divide_by_fixed_deviation(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root-mean-square norm of `x`, whose gradient treats the denominator as a constant."""
    deviation = (x.square().mean(-1, keepdim=True) + eps).sqrt().detach()
    return x / deviation * weight


def scale_sections(x: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Return `x`; the gradient of each section is multiplied by one of `factors`."""
    sections = x.chunk(len(factors), -1)
    scaled = [part * factor + (part * (1 - factor)).detach() for part, factor in zip(sections, factors, strict=True)]
    return torch.cat(scaled, -1)


def hold_slope(_module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Return the output of an activation p -> g(p), whose gradient treats the slope g(p) / p as a constant."""
    (p,) = inputs
    return (output / p).detach() * p


def plain_layer_norm(x: Tensor, _shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return divide_by_fixed_deviation(x - x.mean(-1, keepdim=True), weight, eps) + bias


def plain_rms_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """Return the forward function of an RMSNorm module with a constant denominator."""
    return lambda x: divide_by_fixed_deviation(x, norm.weight, norm.variance_epsilon)


def gradient_scaler(factors: tuple[float, ...]) -> Callable[[Any, Any, Tensor], Tensor]:
    """Return a forward hook that scales the gradient of each section of a module's output."""
    return lambda _module, _inputs, output: scale_sections(output, factors)


@contextmanager
def plain_rules(model: Any, through_softmax: bool) -> Iterator[None]:
    """Make backward passes propagate relevance by CP-LRP or, if `through_softmax`, by AttnLRP."""
    name = model.config.model_type
    softmax = torch.nn.functional.softmax

    def weights(scores: Tensor, dim: int, **_options: Any) -> Tensor:
        attention = softmax(scores, dim)
        return attention if through_softmax else attention.detach()

    with ExitStack() as hooks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "layer_norm", plain_layer_norm)
        patch.setattr(torch.nn.functional, "softmax", weights)
        for path, module in model.named_modules():
            if type(module).__name__ == "LlamaRMSNorm":
                patch.setattr(module, "forward", plain_rms_norm(module))
            if path.endswith(ACTIVATIONS[name]):
                hooks.enter_context(module.register_forward_hook(hold_slope))
            for end, factors in FACTORS[name].items():
                if through_softmax and path.endswith(end):
                    hooks.enter_context(module.register_forward_hook(gradient_scaler(factors)))
        yield


def forward_from_first_layer(model: Any, ids: list[int]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return, with gradients, the first layer's input `[1, T, D]`, all layer outputs `[T, D]` and the logits `[C]`."""
    layers = model.base_model.get_submodule(LAYERS[model.config.model_type])
    entering: list[Tensor] = []
    leaving: list[Tensor] = []

    def replace_input(_module: Any, inputs: Any) -> Any:
        entering.append(inputs[0].detach().requires_grad_())
        return (entering[0], *inputs[1:])

    def keep_output(_module: Any, _inputs: Any, output: Any) -> None:
        leaving.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        hooks.enter_context(layers[0].register_forward_pre_hook(replace_input))
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(keep_output))
        logits_C = model(torch.tensor([ids])).logits[0]
    return entering[0], [output[0] for output in leaving], logits_C


def plain_relevance(model: Any, ids: list[int], through_softmax: bool) -> np.ndarray[Any, Any]:
    """Return each token's relevance `[T]` for the logit of `LABEL`."""
    with plain_rules(model, through_softmax):
        x_1TD, _, logits_C = forward_from_first_layer(model, ids)
        (gradient_1TD,) = torch.autograd.grad(logits_C[LABEL], x_1TD)
    relevance: np.ndarray[Any, Any] = (gradient_1TD * x_1TD)[0].sum(-1).detach().numpy()
    return relevance


def load_plain(folder: Path) -> Any:
    """Return the classifier of transformers in float64, for evaluation."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    return model.eval()


def review_in_float64(folder: Path) -> Review:
    """Return a `Review` of `TEXT` by a float64 classifier, with the predicted class set to `LABEL`."""
    classifier = Classifier(folder, torch.device("cpu"), 400)
    classifier.model.double()
    (document,) = tokenized_documents(classifier.tokenizer, {"test/0": TEXT}, 40)
    review = Review(classifier, document, np.random.default_rng(0))
    review.predicted = LABEL
    return review


def assert_close(found: Any, expected: Any, precision: float = PRECISION) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=precision * np.abs(expected).max())


@pytest.mark.parametrize("name", UNGATED)
def test_parts_match_detached_jacobian(name: str, tmp_path: Path) -> None:
    model = load_plain(write_family(name, tmp_path))
    review = review_in_float64(tmp_path)
    ids = review.ids
    parts = PartsReader(review.classifier.base).read(padded([ids], 0, torch.device("cpu")))
    with plain_rules(model, through_softmax=False):
        x_1TD, outputs, _ = forward_from_first_layer(model, ids)
        for level, y_TD in enumerate(outputs, start=1):
            ones = torch.eye(y_TD.numel(), dtype=torch.float64).unflatten(-1, y_TD.shape)
            (jacobian,) = torch.autograd.grad(y_TD, x_1TD, ones, retain_graph=True, is_grads_batched=True)
            jacobian_TDJE = jacobian.view(*y_TD.shape, *x_1TD.shape[1:])
            parts_TJD = torch.einsum("tdje,je->tjd", jacobian_TDJE, x_1TD[0])
            biases_TD = y_TD - parts_TJD.sum(1)
            squares_T1 = y_TD.square().sum(-1, keepdim=True)
            expected = {
                "length": parts_TJD.norm(dim=-1),
                "projection": torch.einsum("tjd,td->tj", parts_TJD, y_TD) / squares_T1,
                "biases": biases_TD.norm(dim=-1),
                "bias_projection": (biases_TD * y_TD).sum(-1) / squares_T1[:, 0],
            }
            for quantity, values in expected.items():
                assert_close(parts[quantity][level], values.detach())


@pytest.mark.parametrize("name", FACTORS)
def test_attnlrp_matches_plain_torch(name: str, tmp_path: Path) -> None:
    model = load_plain(write_family(name, tmp_path))
    review = review_in_float64(tmp_path)
    expected = plain_relevance(model, review.ids, through_softmax=True)
    precision = SINGLE_PRECISION if name == "llama" else PRECISION
    assert_close(ATTRIBUTIONS["attnlrp"].scores(review)[0], expected, precision)


@pytest.mark.parametrize("name", each_family("phi3", "gemma3_text", "albert"))
def test_attnlrp_rules_keep_forward_pass(name: str, tmp_path: Path) -> None:
    review = review_in_float64(write_family(name, tmp_path))
    classifier = review.classifier
    if ATTRIBUTIONS["attnlrp"].obstacle(classifier.family):
        assert name in WITHOUT_ATTNLRP
        return
    with relevance_rules(classifier.base):
        logits_1C = classifier.logits([review.ids])
    assert_close(logits_1C[0], review.logits_C, SINGLE_PRECISION)
    assert np.isfinite(review.attnlrp()).all()


@pytest.mark.parametrize("name", UNGATED)
def test_decompx_equals_cp_lrp(name: str, tmp_path: Path) -> None:
    model = load_plain(write_family(name, tmp_path))
    review = review_in_float64(tmp_path)
    expected = plain_relevance(model, review.ids, through_softmax=False)
    assert_close(ATTRIBUTIONS["decompx"].scores(review)[0], expected)
