"""Planted models have the stated own shares, and the measure `exchange` recovers them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from validation import planted_amounts
from validation.planted_amounts import CASES, CONTENT, POSITIONS, TEXTS, TOKENS, TOLERANCE, Amounts, build_model, main

RESIDUAL = 1e-10  # limit of rounding errors, relative to the largest coordinate


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_last_vectors_are_stated_sums(case: Amounts) -> None:
    contents = planted_amounts.draw_contents(case, torch.Generator().manual_seed(3))
    base = build_model(case, contents)
    ids = torch.arange(1, 1 + TEXTS * TOKENS).view(TEXTS, TOKENS)
    layers = base.h if case.decoder else base.encoder.layer
    outputs = []
    layers[-1].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    base(input_ids=ids, attention_mask=torch.ones_like(ids))
    (output,) = outputs
    if isinstance(output, tuple):
        output = output[0]
    y = output[..., CONTENT:].numpy()
    x = contents.numpy()
    coefficients = []
    for position in POSITIONS:
        tokens = [x[:, position - back].ravel() for back in range(3)]  # the token itself, and the two before it
        sources = np.stack([*tokens, np.ones_like(tokens[0])], 1)
        target = y[:, position].ravel()
        found, *_ = np.linalg.lstsq(sources, target, rcond=None)
        np.testing.assert_allclose(sources @ found, target, atol=RESIDUAL * np.abs(target).max())
        coefficients.append(found[:-1])  # without the constant
    own, *others = np.mean(coefficients, axis=0)
    assert np.hypot(*others) / own == pytest.approx(case.others / case.own, rel=1e-3)


def test_exchange_recovers_every_amount(tmp_path: Path) -> None:
    assert main(["--seed", "1", "--to", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "planted_amounts.csv")
    found = table[table["measure"] == "exchange"].set_index("case")
    assert list(found.index) == [case.name for case in CASES]
    for case in CASES:
        assert found.loc[case.name, "value"] == pytest.approx(case.own / (case.own + case.others), abs=TOLERANCE)
    squared = table[table["measure"] == "exchange, squared"].set_index("case")["value"]
    for case in CASES:
        expected = case.own**2 / (case.own**2 + case.others**2)
        assert squared[case.name] == pytest.approx(expected, abs=TOLERANCE)
    committed = pd.read_csv(Path(__file__).parents[1] / "docs/measures/planted_amounts.csv")
    assert committed[["case", "measure"]].equals(table[["case", "measure"]])
    np.testing.assert_allclose(committed["value"], table["value"], atol=0.05)
