"""Ratios of single tokens as rows of a table."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from transformers import PreTrainedTokenizerFast

from attnmix.measures.documents import CLASSES, Document


def ratio_rows(
    checkpoint: str, document: str, methods: Sequence[str], ratios_MLT: npt.NDArray[np.floating]
) -> pd.DataFrame:
    """Return a table of the ratios of one text, with one row per layer and token; rows of a layer are adjacent.

    `ratios_MLT` contains the ratios of M methods, L layers and T tokens. The columns are `checkpoint, document, layer,
    position`, and one column for each of `methods`.
    """
    _, layers, tokens = ratios_MLT.shape
    keys = [[checkpoint], [document], range(1, layers + 1), range(tokens)]
    index = pd.MultiIndex.from_product(keys, names=["checkpoint", "document", "layer", "position"])
    values_RM = ratios_MLT.reshape(len(methods), -1).T  # R = L * T rows
    return pd.DataFrame(values_RM, index, list(methods)).reset_index()


def labelled_ratio_rows(
    checkpoint: str,
    document: Document,
    methods: Sequence[str],
    ratios_MLT: npt.NDArray[np.floating],
    tokenizer: PreTrainedTokenizerFast,
) -> pd.DataFrame:
    """Return the rows of `ratio_rows` with the additional columns `token, word, token_class`.

    `word` is the index of the token's word, or missing for special tokens.
    """
    rows = ratio_rows(checkpoint, document.name, methods, ratios_MLT)
    layers = ratios_MLT.shape[1]
    columns = {
        "token": tokenizer.convert_ids_to_tokens(document.ids.tolist()),
        "word": [None if word < 0 else word for word in document.words.tolist()],
        "token_class": [CLASSES[index] for index in document.classes],
    }
    # The columns are repeated for each layer, because the rows of a layer are adjacent.
    repeated = {name: values * layers for name, values in columns.items()}
    return rows.assign(**repeated).astype({"word": "Int32"})
