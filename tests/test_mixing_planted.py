"""Planted cases with answers known beforehand, and what must not change an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.errors import InputError
from stages.mixing.batches import BatchMeasurer
from stages.mixing.contributions import LEAST_RAW_SUM, contributions, layer_contributions, rollout, rows_to_one
from stages.mixing.documents import Document
from stages.mixing.identities import identity_errors
from stages.mixing.layers import LayerPass, LayerWeights, layer_weights
from stages.mixing.matrices import LAYER_MATRICES
from stages.mixing.ratios import RATIOS, mixing_ratios
from stages.models.loading import load_base

BATCH, HEADS, TOKENS, HIDDEN = 2, 4, 7, 24


@pytest.fixture(scope="module")
def weights(tiny_bert: Path) -> LayerWeights:
    return layer_weights(load_base(tiny_bert).double())[0]


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def attention_of(kind: str, tokens: int = TOKENS) -> torch.Tensor:
    matrix = {"identity": torch.eye(tokens), "uniform": torch.full((tokens, tokens), 1 / tokens)}[kind]
    return matrix.double().expand(BATCH, HEADS, tokens, tokens)


def attention_output(weights: LayerWeights, attention: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    heads = value.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return (attention @ heads).transpose(1, 2).flatten(-2) @ weights.output.W + weights.output.b


def ratios_of(
    weights: LayerWeights, attention: torch.Tensor, x: torch.Tensor, value: torch.Tensor
) -> dict[str, torch.Tensor]:
    return mixing_ratios(list(RATIOS), weights, seen(weights, attention, x, value))


def seen(weights: LayerWeights, attention: torch.Tensor, x: torch.Tensor, value: torch.Tensor) -> LayerPass:
    output = attention_output(weights, attention, value)
    norm = weights.attention_norm
    normed = torch.layer_norm(x + output, x.shape[-1:], norm.gamma, norm.beta, norm.eps)
    return LayerPass(attention, x, value, output, normed)


@pytest.fixture(scope="module")
def value(weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    return x @ weights.value.W + weights.value.b


def test_attention_to_oneself_only_mixes_nothing(weights: LayerWeights, x: torch.Tensor, value: torch.Tensor) -> None:
    for ratio in ratios_of(weights, attention_of("identity"), x, value).values():
        torch.testing.assert_close(ratio, torch.zeros_like(ratio), atol=1e-9, rtol=0)


def test_uniform_attention_mixes_all_but_one_part_in_n(
    weights: LayerWeights, x: torch.Tensor, value: torch.Tensor
) -> None:
    ratio = ratios_of(weights, attention_of("uniform"), x, value)
    torch.testing.assert_close(ratio["attn_w"], torch.full_like(ratio["attn_w"], 1 - 1 / TOKENS))
    torch.testing.assert_close(ratio["attnres_w"], torch.full_like(ratio["attn_w"], (1 - 1 / TOKENS) / 2))


def test_rollout_of_uniform_attention_has_its_closed_form() -> None:
    uniform, eye = torch.full((TOKENS, TOKENS), 1 / TOKENS).double(), torch.eye(TOKENS).double()
    rolled = rollout(((uniform + eye) / 2).expand(5, TOKENS, TOKENS))
    for layer in range(1, 6):
        torch.testing.assert_close(rolled[layer - 1], 2.0**-layer * eye + (1 - 2.0**-layer) * uniform)


def test_one_token_alone_has_ratio_zero(weights: LayerWeights, x: torch.Tensor, value: torch.Tensor) -> None:
    for ratio in ratios_of(weights, torch.ones(BATCH, HEADS, 1, 1).double(), x[:, :1], value[:, :1]).values():
        torch.testing.assert_close(ratio, torch.zeros_like(ratio), atol=1e-9, rtol=0)


def test_zeroed_values_contribute_nothing(weights: LayerWeights, x: torch.Tensor, value: torch.Tensor) -> None:
    attention = torch.softmax(torch.randn(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.float64), dim=-1)
    nothing = torch.zeros_like(value)
    ratio = ratios_of(weights, attention, x, nothing)
    for method in ("attn_n", "attnres_n", "attnresln_n", "enc_n"):
        torch.testing.assert_close(ratio[method], torch.zeros_like(ratio[method]), atol=1e-9, rtol=0)
    layer = seen(weights, attention, x, nothing).document(0)
    raw = layer_contributions(list(LAYER_MATRICES.values()), weights, layer)
    for method in ("norm", "value_zeroing"):
        assert float(raw[method].abs().max()) < 1e-15
    for method in ("alti", "globenc"):
        torch.testing.assert_close(rows_to_one(raw[method]), torch.eye(TOKENS).double())
    all_layers = contributions(
        list(LAYER_MATRICES.values()), [weights] * 2, [seen(weights, attention, x, nothing).document(0)] * 2
    )
    assert all_layers.matrices["value_zeroing"].isnan().all()
    assert (all_layers.value_zeroing_raw_sums < LEAST_RAW_SUM).all()


def test_one_zeroed_value_empties_its_column_only(weights: LayerWeights, x: torch.Tensor, value: torch.Tensor) -> None:
    changed = value.clone()
    changed[:, 2] = 0
    layer = seen(weights, attention_of("uniform"), x, changed).document(0)
    raw = layer_contributions(list(LAYER_MATRICES.values()), weights, layer)
    for method in ("norm", "value_zeroing"):
        empty = raw[method].amax(0) < 1e-15
        assert empty.tolist() == [column == 2 for column in range(TOKENS)]


def test_rows_of_normalised_matrices_sum_to_one(weights: LayerWeights, x: torch.Tensor, value: torch.Tensor) -> None:
    layer = seen(weights, attention_of("uniform"), x, value).document(0)
    found = contributions(list(LAYER_MATRICES.values()), [weights] * 3, [layer] * 3).matrices
    for method in set(found) - {"norm"}:
        torch.testing.assert_close(found[method].sum(-1), torch.ones(3, TOKENS, dtype=torch.float64))


def test_contributions_do_not_depend_on_the_block_size(
    weights: LayerWeights, x: torch.Tensor, value: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = torch.softmax(torch.randn(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.float64), dim=-1)
    layer = seen(weights, attention, x, value).document(0)
    whole = layer_contributions(list(LAYER_MATRICES.values()), weights, layer)
    monkeypatch.setattr("stages.mixing.contributions.BLOCK_NUMBERS", 3 * TOKENS * 40)
    for method, matrix in layer_contributions(list(LAYER_MATRICES.values()), weights, layer).items():
        torch.testing.assert_close(matrix, whole[method])


def test_a_wrong_part_breaks_the_identities(weights: LayerWeights, x: torch.Tensor, value: torch.Tensor) -> None:
    layer = seen(weights, attention_of("uniform"), x, value)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    for error in identity_errors(weights, layer, mask).values():
        assert float(error.max()) < 1e-12
    other = replace(weights, output=weights.output._replace(b=weights.output.b * 1.1))
    for error in identity_errors(other, layer, mask).values():
        assert float(error.min()) > 1e-4
    # What lies outside the mask does not count.
    layer.attention_output[:, -1] = 100
    mask[:, -1] = False
    assert float(identity_errors(weights, layer, mask)["attention_output"].max()) < 1e-12


def document(length: int, seed: int, vocabulary: int) -> Document:
    ids = np.random.default_rng(seed).integers(5, vocabulary, length).astype(np.int32)
    return Document(f"text/{seed}", ids, np.zeros(length, dtype=np.int8), length, captured=False)


def test_padding_and_batch_size_change_nothing(tiny_bert: Path) -> None:
    base = load_base(tiny_bert)
    measurer = BatchMeasurer(base, tiny_bert, list(RATIOS), 0)
    documents = [document(length, length, 30) for length in (3, 9, 20, 33, 40, 41, 50, 64)]
    together = list(measurer.measures(documents))
    for place, alone in enumerate(documents):
        (single,) = measurer.measures([alone])
        for name, array in vars(single).items():
            if name != "identities":
                np.testing.assert_allclose(getattr(together[place], name), array, atol=1e-5, rtol=1e-5, err_msg=name)
        only = measurer.ratios([alone])[:, :, 0].transpose(0, 1).numpy()
        np.testing.assert_allclose(only, single.ratios, atol=1e-6)


def test_a_text_as_long_as_the_model_takes(default_weights: Path) -> None:
    measurer = BatchMeasurer(load_base(default_weights), default_weights, list(RATIOS), 0)
    (measures,) = measurer.measures([document(512, 0, 30_000)])
    assert measures.ratios.shape == (6, 6, 512)
    assert ((measures.ratios >= 0) & (measures.ratios <= 1)).all()
    assert measures.identities.max() < 1e-4


def test_weights_with_nan_are_one_clear_error(tiny_bert: Path) -> None:
    base = load_base(tiny_bert)
    with torch.no_grad():
        base.encoder.layer[1].attention.output.dense.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"layer 2 of text/3 holds NaN or infinite values"):
        list(BatchMeasurer(base, tiny_bert, list(RATIOS), 0).measures([document(9, 3, 30)]))


def test_a_model_that_mixes_in_another_way_stops_at_the_identity(tiny_bert: Path) -> None:
    base = load_base(tiny_bert)
    base.encoder.layer[2].attention.output.dense.register_forward_hook(lambda _module, _inputs, output: output * 1.01)
    with pytest.raises(InputError, match=r"attention_output do not sum to it in layer 3 of text/3: relative error 0.0"):
        list(BatchMeasurer(base, tiny_bert, list(RATIOS), 0).measures([document(9, 3, 30)]))


def test_a_model_whose_attention_cannot_be_had_is_one_clear_error(tiny_bert: Path) -> None:
    base = load_base(tiny_bert)
    base.set_attn_implementation("sdpa")
    with pytest.raises(InputError, match="gave the attention weights of 0 of its 3 layers"):
        list(BatchMeasurer(base, tiny_bert, list(RATIOS), 0).measures([document(9, 3, 30)]))
