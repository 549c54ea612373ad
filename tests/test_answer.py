"""The run's headline: each verdict of the tables has its own words, and no effect is claimed where none is."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from attnmix.page.sentences import answer, class_lens

GIVEN = "what tokens give each other in layer 2 is"


class PlantedRun:
    """A run of two layers, of which only the tables that the headline reads exist."""

    def __init__(self, change: float, share: float, chance: float = 0.02) -> None:
        layers = pd.DataFrame({"layer": [1, 2], "method": "attnresln_n", "tokens": 10})
        self.curves = layers.assign(checkpoint="finetuned", mean=[0.2, 0.3], documents=8)
        self.curves = self.curves.assign(ci_low=0.1, ci_high=0.4)
        self.differences = layers.assign(checkpoint="difference", mean=change)
        means = {"pretrained": 0.25, "finetuned": 0.25 + change, "difference": change}
        weighted = pd.Series(means, name="mean").rename_axis("checkpoint").reset_index()
        weighted = weighted.assign(ci_low=change - 0.01, ci_high=change + 0.01, method="attnresln_n")
        weighted = weighted.assign(weight="token", tokens_of="all", layer="all")
        rows = [
            (checkpoint, layer, measure, mean, mean - 0.01, mean + 0.01)
            for layer, size in ((1, 0.1), (2, 1.0))
            for checkpoint, measure, mean in (
                ("pretrained", "share_class", 0.0),
                ("finetuned", "share_class", share * size),
                ("difference", "share_class", share * size),
                ("finetuned", "share_class_permuted", chance),
            )
        ]
        geometry = pd.DataFrame(rows, columns=["checkpoint", "layer", "measure", "mean", "ci_low", "ci_high"])
        edits = ("text_mean", "corpus_mean", "other_class")
        rows = [("class_kept", name, layer, 0.9) for name in edits for layer in (1, 2)]
        rows.append(("lens_agreement", "others", 2, 0.94))
        use = pd.DataFrame(rows, columns=["quantity", "group", "layer", "mean"])
        controls = [("text_mean_value", "finetuned"), ("shuffled_words", "finetuned"), ("random_weights", "random")]
        parts = [self.curves.assign(control=control, checkpoint=name) for control, name in controls]
        self.tables = {"measure/mixing_weighted": weighted, "measure/geometry": geometry, "faithfulness/class_use": use}
        self.tables["measure/mixing_controls"] = pd.concat(parts)
        self.tables["faithfulness/margins"] = pd.DataFrame({"predicted": ["good", "bad", "good", "good"]})

    @property
    def mixing(self) -> Any:
        return self.curves, self.differences

    def table(self, name: str) -> pd.DataFrame:
        return self.tables[name]


@pytest.mark.parametrize(
    ("change", "share", "headline", "verb"),
    [
        (0.1, 0.6, f"After fine-tuning, {GIVEN} mostly the predicted class", "rises"),
        (0.1, 0.3, f"After fine-tuning, {GIVEN} partly the predicted class", "rises"),
        (0.1, 0.05, f"After fine-tuning, {GIVEN} to a small part the predicted class", "rises"),
        (
            0.1,
            0.0,
            "Fine-tuning raises the mixing ratio, but what tokens give each other hardly tells the class",
            "rises",
        ),
        (
            -0.1,
            0.0,
            "Fine-tuning lowers the mixing ratio, but what tokens give each other hardly tells the class",
            "falls",
        ),
        (
            0.0,
            0.0,
            "Fine-tuning changes neither the mixing ratio nor what tokens give each other measurably",
            "does not change",
        ),
    ],
)
def test_each_outcome_has_its_headline(change: float, share: float, headline: str, verb: str) -> None:
    found = answer(PlantedRun(change, share))  # type: ignore[arg-type]  # it stands in for a run
    assert found["headline"] == headline
    assert f"{verb}" in found["sentences"][0]
    assert f"from 25.0% to {25 + 100 * change:.1f}%" in found["sentences"][0]
    assert f"{100 * share:.0f}% of what other tokens give" in found["sentences"][1]
    assert "In layer 2" in found["sentences"][1] or share == 0
    assert "94% of them" in class_lens(PlantedRun(change, share))[0]  # type: ignore[arg-type]  # it stands in for a run
    assert "the same answer for every text would keep 75%" in found["sentences"][-2]
    assert share == 0 or "in layer 2 it is 30%, and 30% with one value" in found["sentences"][-1]
    after = next(each for each in found["chart"]["series"] if each["name"] == "after fine-tuning")
    assert after["values"] == pytest.approx([share / 10, share])


def test_without_classes_or_without_training_nothing_is_said_of_them() -> None:
    run: Any = PlantedRun(0.0, 0.3)
    run.tables["measure/geometry"] = run.tables["measure/geometry"].iloc[:0]
    assert answer(run)["headline"] == "Fine-tuning changes mixing by no more than chance would"
    run.differences = run.differences.iloc[:0]
    assert answer(run)["headline"].startswith("Layer 2 mixes tokens most")
