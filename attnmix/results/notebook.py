"""The notebook view of a result: a description, and a picture of the first text."""

from __future__ import annotations

from html import escape

import numpy as np
import numpy.typing as npt

MAX_TOKENS = 64  # maximum text length for automatic computation of own shares (about one second)
CAPTION = "Own share of each token's vector after each layer, by exchange. 0% has the colour of the background."


def draw_notebook_view(description: str, model: str, tokens: list[str], shares: npt.NDArray[np.float32] | None) -> str:
    """Return the HTML view of a result: its description, and a picture of the own shares of one text.

    Args:
        description: A line of text.
        model: Name of the model.
        tokens: Tokens of the text.
        shares: Own shares `[layers, tokens]`; if None, the view contains only the description.
    """
    view = f"<pre>{escape(description)}</pre>"
    if shares is None:
        return view
    from attnmix.page.static_picture import ModelShares, draw_own_shares  # lazy import, for notebooks only

    model_shares = ModelShares(model, shares.astype(np.float64))
    picture = draw_own_shares(tokens, [model_shares])
    return f"{view}<p>{CAPTION}</p>{picture}"
