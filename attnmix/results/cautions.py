"""Functions that write the paragraphs below the table of a comparison: the scope and limitations of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from attnmix.results.tables import LESS
from attnmix.results.verdicts import (
    LESS_MIXING,
    MORE_MIXING,
    VERDICTS,
    Trainings,
    describe_assumption,
    direction_of_mixing,
    have_enough_trainings,
    name_models,
)


def write_cautions(before: Trainings, after: Trainings, rows: pd.DataFrame, notes: Sequence[str]) -> list[str]:
    """Return the paragraphs below the table of a comparison.

    Args:
        before: The models before the change.
        after: The models after the change.
        rows: The rows of the table, with verdicts.
        notes: Sentences about the compared data; they are included unchanged.
    """
    verdicts = _explain_verdicts(rows)
    paragraphs = [_explain_intervals(before, after), _explain_directions(rows), *verdicts, *notes]
    return [*paragraphs, _name_sides(before, after)]


def _explain_intervals(before: Trainings, after: Trainings) -> str:
    """Return a paragraph that explains whether the intervals are over texts only, or also over training runs."""
    has_single_models = len(before.means) == 1 and len(after.means) == 1
    if has_single_models:
        return (
            "The intervals are over texts, for these two models, and simultaneous for all rows. Training runs with "
            "other seeds differ too, so conclusions about training need three runs or more: compare([a, b, c], [d, e, "
            "f]), or compare(pretrained, [d, e, f])."
        )
    if not have_enough_trainings(before, after):
        return "The intervals are over texts; there are too few training runs for intervals over runs."
    compared = f"{describe_assumption(before)} with {describe_assumption(after)}"
    return (
        f"`between_seeds` compares {compared} by Student's t, adjusted for the number of rows; other "
        "data, base models and settings are not covered. Training runs can agree by chance, three more often than "
        "five, so use five or more (docs/measures/statistics.md)."
    )


def _name_sides(before: Trainings, after: Trainings) -> str:
    """Return a sentence with the names of the models on each side."""
    return f"`before` is {name_models(before)}, `after` is {name_models(after)}."


def _explain_directions(rows: pd.DataFrame) -> str:
    """Return a paragraph on the direction of mixing.

    The paragraph states for each measure whether a higher or a lower value means more mixing, and names the measures
    that disagree about which model mixes more.
    """
    directions = []
    for measure in rows["measure"]:
        direction = direction_of_mixing(measure)  # "higher", "lower" or None
        if direction is not None:
            directions.append(f"a {direction} {measure}")
    sentence = f"More mixing means {' and '.join(directions)}."
    more = rows.loc[rows["mixing"] == MORE_MIXING, "measure"]
    less = rows.loc[rows["mixing"] == LESS_MIXING, "measure"]
    if len(more) and len(less):
        sentence += (
            f" The rows disagree: `after` mixes more by {' and '.join(more)}, less by {' and '.join(less)}; "
            "they measure different properties (docs/measures/which.md)."
        )
    # The measure of a ratio minus a control is named `<ratio> less <control>`.
    has_differences_from_controls = rows["measure"].str.contains(f" {LESS} ", regex=False).any()
    if has_differences_from_controls:
        sentence += " The ratio minus a control can be negative; it is not a part of the ratio."
    return sentence


def _explain_verdicts(rows: pd.DataFrame) -> list[str]:
    """Return an explanation of each verdict in `rows` that is neither `higher` nor `lower`."""
    verdicts = set(rows["between_models"]) | set(rows["between_seeds"])
    return [f"`{verdict}`: {meaning}." for verdict, meaning in VERDICTS.items() if verdict in verdicts]
