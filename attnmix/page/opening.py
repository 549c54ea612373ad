"""The text and the tokens that are initially selected on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import OWN_SHARE
from attnmix.core.store.results import Results
from attnmix.core.store.runs import row_shares
from attnmix.figures.tokens import CapturedTexts, DisplayToken
from attnmix.measures.matrices import MATRICES
from attnmix.page.shape import Data
from attnmix.page.token_arrays import arrange_column
from attnmix.page.wording import detailed_documents_of

MIN_WORD = 5  # minimum length of a long word, in letters


def choose_opening(
    tokens: pd.DataFrame,
    ratios: pd.DataFrame,
    highest_mean: pd.Series,
    texts: CapturedTexts,
    run: Results,
) -> Data:
    """Return the index of the initially selected `document`, and the initially selected token position in each text.

    The selected text is the one whose mean ratio in one layer is the median over texts. If only some texts have
    token-level own shares, the median is taken over these texts.

    Args:
        tokens: The tokens of the page.
        ratios: The ratios of the tokens by checkpoint and layer.
        highest_mean: The row with the highest mean ratio. Its checkpoint, layer and ratio (`method`) determine the
            selection.
        texts: The captured texts.
        run: The results of the run.
    """
    is_of_checkpoint = ratios["checkpoint"] == highest_mean["checkpoint"]
    is_of_layer = ratios["layer"] == highest_mean["layer"]
    rows = ratios[is_of_checkpoint & is_of_layer]
    ratio_T = arrange_column(rows, tokens, highest_mean["method"])
    is_measured_T = _find_measured_tokens(rows, tokens)
    document_names = tokens["document"].unique()
    encoder_inputs = texts.readings[0]  # in the row order of `tokens`
    positions = []
    for name in document_names:
        rows_of_text = np.flatnonzero(tokens["document"] == name)
        tokens_of_text = [encoder_inputs[row] for row in rows_of_text]
        candidates = list_candidates(tokens_of_text, is_measured_T[rows_of_text])
        position = _choose_token(name, candidates, ratio_T[rows_of_text], highest_mean, run)
        positions.append(position)
    mean_ratios = tokens.assign(ratio=ratio_T).groupby("document")["ratio"].mean()
    mean_ratio_D = mean_ratios.reindex(document_names).fillna(0).to_numpy()  # 0 for texts without ratios
    document = _choose_document(document_names, mean_ratio_D, detailed_documents_of(run))
    return {"document": document, "positions": positions}


def _find_measured_tokens(ratios: pd.DataFrame, tokens: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return a mask of the tokens with an own share; all entries are True if no own shares were measured.

    `ratios` contains the ratios and, if measured, the own shares of the tokens in one layer.
    """
    if OWN_SHARE not in ratios:
        return np.ones(len(tokens), bool)
    own_share_T = arrange_column(ratios, tokens, OWN_SHARE)
    is_measured_T: npt.NDArray[np.bool_] = np.isfinite(own_share_T)
    return is_measured_T


def _choose_document(
    document_names: npt.NDArray[np.object_],
    mean_ratio_D: npt.NDArray[np.float64],
    detailed: Sequence[str],
) -> int:
    """Return the index of the text with the median ratio; of two middle texts, the one with the lower ratio.

    `mean_ratio_D` contains the mean ratio of each text. If there are names in `detailed`, only these texts are
    candidates.
    """
    candidates = np.arange(len(document_names))
    if detailed:
        candidates = np.flatnonzero(np.isin(document_names, detailed))
    order = np.argsort(mean_ratio_D[candidates], kind="stable")
    candidates_by_ratio = candidates[order]
    middle = (len(candidates_by_ratio) - 1) // 2
    return int(candidates_by_ratio[middle])


def list_candidates(pieces: Sequence[DisplayToken], is_measured: npt.NDArray[np.bool_]) -> list[int]:
    """Return the positions of the tokens in a text from which the initially selected token is chosen.

    The candidates are the first of the following groups that is not empty: long words with a measured own share, words
    with a measured own share, long words, words, all tokens.
    """
    words = []
    long_words = []
    for position, piece in enumerate(pieces):
        if piece.token_class not in ("word", "subword"):
            continue
        words.append(position)
        if piece.text.isalpha() and len(piece.text) >= MIN_WORD:
            long_words.append(position)
    measured_words = [position for position in words if is_measured[position]]
    measured_long_words = [position for position in long_words if is_measured[position]]
    for group in (measured_long_words, measured_words, long_words, words):
        if group:
            return group
    return list(range(len(pieces)))


def _choose_token(
    document: str,
    candidates: Sequence[int],
    ratio_T: npt.NDArray[np.float64],
    highest_mean: pd.Series,
    run: Results,
) -> int:
    """Return the position of the candidate that receives the largest contribution from another candidate.

    Contributions are the shares in the first available contribution matrix, for the checkpoint and the layer in
    `highest_mean`. If there is no matrix, return the candidate with the largest mixing ratio. `candidates` are
    positions in the text, and `ratio_T` contains the mixing ratios of the T tokens of the text.
    """
    checkpoint = highest_mean["checkpoint"]
    stored = run.matrices(checkpoint, document)
    methods = [method for method in ("alti", *MATRICES) if method in stored]
    if methods:
        matrices = run.matrix(checkpoint, document, methods[0])  # [layers, tokens, sources]
        layer_index = highest_mean["layer"] - 1
        score_T = _find_largest_contributions(matrices[layer_index], candidates)
    else:
        score_T = np.nan_to_num(ratio_T)
    return max(candidates, key=lambda position: score_T[position])


def _find_largest_contributions(
    contribution_TT: npt.NDArray[Any], candidates: Sequence[int]
) -> npt.NDArray[np.floating[Any]]:
    """Return the largest share of a candidate in each token `[T]`, except the share of the token in itself.

    `contribution_TT` contains the contributions of T source tokens (columns) to T tokens (rows).
    """
    share_TT = np.nan_to_num(row_shares(contribution_TT))
    is_other_TT = ~np.eye(len(share_TT), dtype=bool)
    others_TT = share_TT * is_other_TT  # without the share of the token itself
    largest_T: npt.NDArray[np.floating[Any]] = others_TT[:, candidates].max(axis=1)
    return largest_T
