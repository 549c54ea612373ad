"""Derivative levels, swap ratios, agreement, and rollouts from the input match autograd and their definitions."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import write_family
from family_reference import rolled, run_reference
from scipy import stats

from attnmix.core.statistics import Sums
from attnmix.core.store.runs import Run
from attnmix.core.store.writers import write_plot
from attnmix.measures import derivatives as module
from attnmix.measures.batches import stack_sums
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.derivatives import FORMS, REFERENCES, JacobianNorms, derivative_norms, document_chains, levels
from attnmix.measures.matrices import MATRICES, ROLLOUTS
from attnmix.measures.mixing_tables import TABLE_COLUMNS
from attnmix.measures.ratios import RATIOS
from attnmix.measures.sample_tables import derivative_tables
from attnmix.measures.swaps import layer_swap_ratios
from attnmix.models.loading import load_base
from attnmix.page.sentences import derivatives

SEEDS = 20
IDS = torch.tensor([[2, 7, 9, 11, 3]])
WIDTH = 24


@pytest.fixture
def base(tiny_bert: Path) -> Any:
    return load_base(tiny_bert).double().requires_grad_(False)


@pytest.fixture(scope="module")
def jacobians(tiny_bert: Path) -> dict[str, np.ndarray]:
    """Return d layer_output_i / d x_j `[layers, T, D, T, D]`, computed by autograd, for each reference x.

    T is the number of tokens, and D the number of hidden dimensions.
    """
    base = load_base(tiny_bert).double().requires_grad_(False)
    words = base.get_input_embeddings()(IDS).detach()

    def outputs(embedded: torch.Tensor) -> torch.Tensor:
        return torch.stack(base(inputs_embeds=embedded, output_hidden_states=True).hidden_states[1:])[:, 0]

    def layer_jacobian(layer: Any, x: torch.Tensor) -> np.ndarray:
        derivative = torch.autograd.functional.jacobian(lambda inputs: layer(inputs)[0], x.detach())
        return np.asarray(derivative[:, :, 0].numpy())

    states = base(inputs_embeds=words, output_hidden_states=True).hidden_states
    by_layer = [layer_jacobian(layer, x) for layer, x in zip(base.encoder.layer, states, strict=False)]
    by_word = torch.autograd.functional.jacobian(outputs, words)[:, :, :, 0].numpy()
    return {"word_embedding": by_word, "layer_input": np.stack(by_layer)}


def exact_levels(jacobian: np.ndarray) -> np.ndarray:
    """Return the levels `[forms, tokens]` of one layer, computed by explicit sums over sources.

    The forms are the sum of norms, the norm of the block, and the norm of the sum.
    """
    shares = np.zeros((3, 5))  # three forms, and the five tokens of `IDS`
    for i in range(5):
        norms = [np.sqrt((jacobian[i, :, j] ** 2).sum()) for j in range(5)]
        block = np.delete(jacobian[i], i, axis=1)
        norm_of_sum = np.sqrt((block.sum(axis=1) ** 2).sum())
        others = np.array([sum(norms) - norms[i], np.sqrt((block**2).sum()), norm_of_sum])
        shares[:, i] = others / (others + norms[i])
    return shares


@pytest.mark.parametrize("reference", REFERENCES)
def test_norms_and_levels_match_autograd(base: Any, jacobians: dict[str, np.ndarray], reference: Any) -> None:
    exact, chains = jacobians[reference], document_chains(base, IDS)
    entries = np.sqrt((exact**2).sum((2, 4)))  # over the hidden dimensions of output and input
    with torch.no_grad():
        norms = derivative_norms(chains, reference, WIDTH, seed=0)
        # Norms from a single direction are not corrected for bias, but their squares are unbiased.
        single = [derivative_norms(chains, reference, 1, seed).entries_LTT.square() for seed in range(SEEDS)]
    np.testing.assert_allclose(norms.entries_LTT, entries, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(levels(norms), [exact_levels(layer) for layer in exact], rtol=1e-9)
    squares = torch.stack(single).numpy()
    assert (np.abs(squares.mean(0) - entries**2) < 5 * squares.std(0, ddof=1) / SEEDS**0.5 + 1e-12).all()


def test_swap_ratios_match_exchanged_inputs_and_jacobians(base: Any, jacobians: dict[str, np.ndarray]) -> None:
    exact = jacobians["layer_input"]
    donor_ids = IDS.flip(-1).roll(2, -1)
    states, donor_states = (base(ids, output_hidden_states=True).hidden_states for ids in (IDS, donor_ids))
    actual = layer_swap_ratios(document_chains(base, IDS), document_chains(base, donor_ids)).numpy()
    for number, layer in enumerate(base.encoder.layer):
        x, donor = states[number][0], donor_states[number][0]
        for i in range(len(x)):
            with_own = x.clone()  # exchanges only the input of token i
            with_own[i] = donor[i]
            with_others = donor.clone()  # exchanges the inputs of all other tokens
            with_others[i] = x[i]
            y = layer(x[None])[0][i]
            by_own = (layer(with_own[None])[0][i] - y).norm().item()
            by_others = (layer(with_others[None])[0][i] - y).norm().item()
            assert actual[number, 0, i] == pytest.approx(by_others / (by_others + by_own), abs=1e-9)
            # In the linear approximation, the Jacobian replaces the layer.
            terms = np.einsum("djw,jw->jd", exact[number, i], (donor - x).numpy())
            by_own = np.linalg.norm(terms[i])
            by_others = np.linalg.norm(np.delete(terms, i, axis=0).sum(0))
            assert actual[number, 1, i] == pytest.approx(by_others / (by_others + by_own), abs=1e-9)


def test_agreement_is_rank_correlation_with_autograd(jacobians: dict[str, np.ndarray], tiny_bert: Path) -> None:
    measurer = DocumentMeasurer(load_base(tiny_bert), list(RATIOS), list(MATRICES))
    ids = IDS[0].numpy().astype(np.int32)
    agreement = measurer.derivatives(ids, [ids], directions=24, seed=0)["agreement"][..., 0]
    matrices = {name: matrix.numpy() for name, matrix in measurer.contributions(ids).items()}
    names = [*RATIOS, *MATRICES]
    for (place, reference), layer in product(enumerate(REFERENCES), range(3)):
        norms = np.sqrt((jacobians[reference][layer] ** 2).sum((1, 3)))  # over both hidden dimensions
        for method in ("attention", "alti", "globenc_rollout"):
            rows = zip(matrices[method][layer], norms, strict=True)
            expected = np.mean([stats.spearmanr(row, row_of_norms).statistic for row, row_of_norms in rows])
            assert agreement[place, layer, names.index(method)] == pytest.approx(expected)
        ratios = 1 - np.diag(matrices["attention"][layer])
        expected = stats.spearmanr(ratios, 1 - np.diag(norms) / norms.sum(1)).statistic
        assert agreement[place, layer, names.index("attn_w")] == pytest.approx(expected)


def test_level_is_nan_without_any_derivative() -> None:
    eye, none = torch.eye(4)[None], torch.zeros(1, 4)
    assert not levels(JacobianNorms(eye, none, none)).any()
    assert levels(JacobianNorms(0 * eye, none, none)).isnan().all()


def test_opposite_sources_cancel_in_sum_only(base: Any) -> None:
    attention = base.encoder.layer[0].attention
    first, second, rest = slice(0, 6), slice(6, 12), slice(12, 24)  # head width 6
    for projection in (attention.self.key, attention.self.value):
        projection.weight[second] = projection.weight[first]
    attention.self.query.weight.zero_()
    attention.self.query.bias.zero_()
    # The first head attends to the token with the highest key in this coordinate, and the second head to the token with
    # the lowest.
    attention.self.query.bias[first.start] = 1e9
    attention.self.query.bias[second.start] = -1e9
    attention.output.dense.weight[:, second] = -attention.output.dense.weight[:, first]
    attention.output.dense.weight[:, rest] = 0
    ids = torch.tensor([[7, 9, 11]])
    with torch.no_grad():
        entering = base(ids, output_hidden_states=True).hidden_states[0][0]
        low, middle, high = (entering @ attention.self.key.weight[0]).argsort().tolist()
        norms = derivative_norms(document_chains(base, ids), "layer_input", WIDTH, seed=0)
    assert norms.entries_LTT[0, middle, high] == pytest.approx(norms.entries_LTT[0, middle, low])
    by_form = dict(zip(FORMS, levels(norms)[0, :, middle].tolist(), strict=True))
    assert by_form["norm_of_sum"] < 1e-9
    assert by_form["norm_of_block"] > 0.01


@pytest.mark.parametrize("documents", [4, 40])
def test_page_reports_change_of_each_form(tmp_path: Path, documents: int) -> None:
    run = Run(tmp_path)
    intervals = {"norm_of_sum": (0.1, 0.3), "norm_of_block": (-0.3, -0.1), "sum_of_norms": (-0.1, 0.1)}
    rows = [(form, name, 0.5, -0.1, 0.1) for form in FORMS for name in ("pretrained", "finetuned")]
    rows += [(form, "difference", sum(ends) / 2, *ends) for form, ends in intervals.items()]
    table = pd.DataFrame(rows, columns=["method", "checkpoint", "mean", "ci_low", "ci_high"])
    table = table.assign(quantity="level", reference="layer_input", layer=2, documents=documents)
    write_plot("measure/derivatives", table, run.tables)
    mixing = {"checkpoint": ["difference"], "method": ["attn_n"], "layer": [2], "mean": [0.2], "documents": [40]}
    write_plot("measure/mixing", pd.DataFrame(mixing), run.tables)
    (sentence,) = derivatives(run)
    if documents == 4:
        assert "by +20.0 percentage points if all other tokens change together, by" in sentence
        assert "4 reviews are too few for a verdict, which needs 20 or more." in sentence
        return
    interval = "(+20.0 percentage points, 95% interval +10.0 to +30.0, 40 reviews)"
    assert f"rises if all other tokens change together {interval}" in sentence
    assert "falls if they change independently (" in sentence
    assert "is inconclusive if the norms of single tokens are added (" in sentence


@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.Linear(5, 7),
        torch.nn.Linear(5, 7, bias=False),
        torch.nn.GELU(),
        torch.nn.GELU(approximate="tanh"),
        torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.SiLU(), torch.nn.LayerNorm(7)),
    ],
)
def test_differentials_match_jacobian_products(layer: torch.nn.Module) -> None:
    layer = layer.double().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    point = torch.randn(5, generator=generator, dtype=torch.float64)
    tangents = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(layer, point)
    moved = module.differentials(layer, point, tangents)
    np.testing.assert_allclose(moved.numpy(), (tangents @ jacobian.T).numpy(), rtol=1e-12, atol=1e-15)


def test_norms_from_few_directions_are_unbiased(tiny_bert: Path) -> None:
    base = load_base(tiny_bert).requires_grad_(False)
    chains, directions, seeds = document_chains(base, IDS), 4, 60
    with torch.no_grad():
        exact = derivative_norms(chains, "layer_input", WIDTH, seed=0)
        actual = [derivative_norms(chains, "layer_input", directions, seed) for seed in range(seeds)]
    for name in JacobianNorms._fields:
        norms = torch.stack([getattr(each, name) for each in actual])
        exact_norms = getattr(exact, name)
        by_seed = (norms / exact_norms).flatten(1).mean(1)
        assert abs(float(by_seed.mean()) - 1) < 0.009  # 0.0115 and 0.0100 without correction
    excess = torch.stack([levels(each) for each in actual]).mean(0) - levels(exact)
    assert excess.mean(-1).abs().max() < 0.01


def test_blocks_do_not_change_norms(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chains = document_chains(base, IDS)
    with torch.no_grad():
        for reference in REFERENCES:
            whole = derivative_norms(chains, reference, 5, seed=1)
            for pass_tokens in (5, 15):
                monkeypatch.setattr(module, "PASS_TOKENS", pass_tokens)
                for actual, expected in zip(derivative_norms(chains, reference, 5, seed=1), whole, strict=True):
                    torch.testing.assert_close(actual, expected)
            monkeypatch.undo()


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart"])
def test_mixing_from_input_is_one_minus_rollout_diagonal(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path / name)
    base = load_base(folder)
    ids = np.random.default_rng(3).integers(5, base.config.vocab_size - 5, 6).astype(np.int32)
    measurer = DocumentMeasurer(base, ["attn_w"], list(MATRICES))
    actual = measurer.derivatives(ids, [ids[:4], ids[:0]], directions=2, seed=0)
    reference = run_reference(name, base, ids.tolist()).layers
    layers = [layer.contributions() for layer in reference]
    stacks = [layers[:2], layers[2:]] if name == "bart" else [layers]
    rollouts = [rollout for rollout in ROLLOUTS if rollout.removesuffix("_rollout") in measurer.matrices]
    assert actual["from_input"].shape == (len(layers), len(rollouts) + len(FORMS), len(ids))
    for place, rollout in enumerate(rollouts):
        expected = []
        for stack in stacks:  # the rollout of a decoder starts again with its own tokens
            matrices = [layer[rollout.removesuffix("_rollout")] for layer in stack]
            if rollout == "attention_rollout":
                matrices = [(matrix + np.eye(len(ids))) / 2 for matrix in matrices]
            expected += [1 - np.diag(matrix) for matrix in rolled(matrices)]
        np.testing.assert_allclose(actual["from_input"][:, place], expected, atol=1e-5, err_msg=rollout)
    # Coherence is |sum of contributions| / sum of |contributions|, with one contribution for each other source.
    for number, layer in enumerate(reference):
        W_O = layer.weights.arrays["out"][:-1].reshape(layer.weights.heads, layer.weights.head_size, -1)
        for i in range(len(ids)):
            contributions = np.einsum("hj,hjd,hde->je", layer.attention[:, i], layer.value, W_O)
            visible = [j for j in range(len(ids)) if j != i and layer.attention[:, i, j].any()]
            others = contributions[visible]
            expected_coherence = np.nan
            if visible:
                expected_coherence = np.linalg.norm(others.sum(0)) / np.linalg.norm(others, axis=1).sum()
            assert actual["coherence"][number, 0, i] == pytest.approx(expected_coherence, abs=1e-5, nan_ok=True)
    swaps = actual["swap"]
    assert swaps.shape == (len(layers), 4, len(ids))
    assert np.isnan(swaps[..., 4:]).all()  # donor 1 has the same four tokens, and donor 2 has no tokens
    assert np.isnan(swaps[:, 2:]).all()
    assert not swaps[:, :2, :4].any()


def made_up(seed: int, tokens: int) -> dict[str, Any]:
    """Return random values of all quantities of a text in a model of three layers.

    The last axis contains the tokens, or a single value for `agreement`. The two preceding axes are the layers and,
    depending on the quantity, the forms, kinds or methods; for `level` and `agreement`, the first axis contains the
    references.
    """
    generator = np.random.default_rng(seed)
    shapes = {
        "level": (2, 3, 3, tokens),
        "swap": (3, 4, tokens),
        "coherence": (3, 1, tokens),
        "ratio": (3, 1, tokens),
        "from_input": (3, 4, tokens),
        "agreement": (2, 3, 3, 1),
    }
    return {name: generator.uniform(size=shape) for name, shape in shapes.items()}


def summed(documents: dict[str, dict[str, Any]]) -> dict[str, Sums]:
    """Return, for each quantity, the sums over the tokens of every text."""
    return stack_sums(
        [{name: Sums.over_tokens(each) for name, each in quantities.items()} for quantities in documents.values()]
    )


def test_tables_are_means_over_tokens_and_reviews() -> None:
    lengths = {"test/1": 4, "test/5": 9}
    documents: dict[str, dict[str, dict[str, Any]]] = {}
    for place, checkpoint in enumerate(("pretrained", "finetuned")):
        documents[checkpoint] = {name: made_up(10 * place + length, length) for name, length in lengths.items()}
    documents["finetuned"]["test/5"]["level"][1, 2, 0, :3] = np.nan  # outputs without any derivative
    documents["pretrained"]["test/1"]["agreement"][0, 1:, 2] = np.nan
    documents["pretrained"]["test/5"]["agreement"][0, 2, 2] = np.nan
    sums = {name: summed(by_review) for name, by_review in documents.items()}
    tables = derivative_tables(sums, list(lengths), ["attn_w"], ["attention", "attention_rollout"], seed=0)
    table = tables["derivatives"]
    assert tuple(table) == TABLE_COLUMNS["derivatives"]
    assert table[["simultaneous_low", "simultaneous_high"]].isna().all(axis=None)  # two texts are too few
    expected: dict[str, Any] = {}
    for name, by_review in documents.items():
        for quantity in by_review["test/1"]:
            pooled = np.concatenate([each[quantity] for each in by_review.values()], -1)
            cells = pooled.reshape(-1, pooled.shape[-1])  # in the order of the rows
            rows = table[(table["checkpoint"] == name) & (table["quantity"] == quantity)]
            numbers = (~np.isnan(cells)).sum(-1)
            expected[name, quantity] = np.nansum(cells, -1) / np.where(numbers > 0, numbers, np.nan)
            np.testing.assert_allclose(rows["mean"], expected[name, quantity])
            np.testing.assert_array_equal(rows["documents" if quantity == "agreement" else "tokens"], numbers)
    for quantity in ("level", "ratio", "from_input"):
        rows = table[(table["checkpoint"] == "difference") & (table["quantity"] == quantity)]
        np.testing.assert_allclose(rows["mean"], expected["finetuned", quantity] - expected["pretrained", quantity])
    keys = ["quantity", "checkpoint", "reference", "layer", "method"]
    row = table.set_index(keys).loc[("agreement", "finetuned", "layer_input", 1, "attention_rollout")]
    # For two texts, the percentile interval ends at the values of the texts; it is widened, and clipped to [-1, 1].
    values = [documents["finetuned"][name]["agreement"][1, 0, 2, 0] for name in lengths]
    widening = stats.t.ppf(0.975, 1) / 1.96 * 2**0.5
    interval = np.mean(values) + (np.sort(values) - np.mean(values)) * widening
    assert [row["ci_low"], row["ci_high"]] == pytest.approx(np.clip(interval, -1, 1).tolist(), rel=1e-4)
    by_review = tables["derivatives_by_review"].set_index([*keys, "document"])
    row = by_review.loc[("level", "finetuned", "layer_input", 3, "sum_of_norms", "test/5")]
    assert row["mean"] == pytest.approx(np.nanmean(documents["finetuned"]["test/5"]["level"][1, 2, 0]))
    assert row["tokens"] == 6
    assert len(by_review.loc["agreement"]) == 2 * 2 * 2 * 3 * 3  # checkpoints, texts, references, layers, methods


def test_empty_tables_have_columns() -> None:
    tables = derivative_tables({"pretrained": {}, "finetuned": {}}, [], ["attn_w"], [], seed=0)
    for name in ("derivatives", "derivatives_by_review"):
        assert (tuple(tables[name]), len(tables[name])) == (TABLE_COLUMNS[name], 0)
