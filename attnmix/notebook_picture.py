"""What a notebook shows below the cell of a result: its description, and the picture of its first text."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnmix.api import Measures

MAX_TOKENS = 64  # of a text whose own shares are computed for the picture, within about a second


def draw_notebook_picture(result: Measures) -> str:
    """Return the description of a result and the own shares of its first text, as HTML.

    Own shares that are missing are computed if the text is short and the model is unchanged; otherwise the description
    stands alone.
    """
    from attnmix.page.static_picture import ModelShares, draw_own_shares  # only where a notebook shows a result

    description = f"<pre>{escape(repr(result))}</pre>"
    document = result.documents[0]
    computed = result._computed
    if 0 not in computed.token_shares:
        if len(document) > MAX_TOKENS or result.own_share_obstacle() is not None:
            return description
        with result._engine() as engine:
            engine.add_token_shares(computed, 0)
    tokens = result.tokens
    names = tokens.loc[tokens["text"] == 0, "token"].tolist()
    picture = draw_own_shares(names, [ModelShares(result.model.name, computed.token_shares[0])])
    caption = "Own share of each token's vector after each layer, by exchange: 0% has the colour of the background."
    return f"{description}<p>{caption}</p>{picture}"
