"""Total effects above 1, a sign that texts with exchanged tokens are unlike real texts (docs/measures/exchange.md)."""

import pandas as pd

from attnmix.core.names import ALL_DONORS, MIN_EXCESS, TOTAL_EFFECTS


def find_excess(table: pd.DataFrame) -> pd.Series | None:
    """Return the row of the largest total effect that exceeds 1 in a table `exchange`; None if there is none.

    An exchange replaces tokens by those of other texts. The total effect of tokens is the squared displacement of a
    vector after an exchange of these tokens, relative to that after an exchange of all tokens. It exceeds 1 if its
    simultaneous interval lies above 1 by more than the rounding error `MIN_EXCESS`.
    """
    is_total_effect = table["quantity"].isin(TOTAL_EFFECTS) & (table["donor"] == ALL_DONORS)
    effects = table[is_total_effect]
    if effects.empty:  # the table may then lack the columns of intervals
        return None
    rows = effects[effects["simultaneous_low"] > 1 + MIN_EXCESS]
    if rows.empty:
        return None
    largest = int(rows["mean"].argmax())
    return rows.iloc[largest]
