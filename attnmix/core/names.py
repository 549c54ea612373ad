"""Names that parameters allow and that stages write into their files, in the order in which they are shown.

Labels and colours are in `attnmix.figures.labels`, which only drawing reads, and a measure's definition is next to its
formula. So a stage that computes runs again when a name changes, not when a label or a colour does.
"""

from __future__ import annotations

from typing import NamedTuple


class Mark(NamedTuple):
    """Label, colour and marker of one kind of thing, which colour and marker each identify."""

    label: str
    color: str
    marker: str
    meaning: str = ""


RATIO_NAMES = ("attn_w", "attnres_w", "attn_n", "attnres_n", "attnresln_n", "enc_n", "layer_n")
"""Mixing ratios, ordered by how much of a layer they cover."""
MATRIX_NAMES = ("attention", "norm", "value_zeroing", "alti", "globenc")
"""Contribution matrices of one layer."""
IMPORTANCE_NAMES = ("leave_one_out", "gradient_x_input")
"""Scores of the tokens of captured texts, for the predicted class."""
CHECKPOINT_NAMES = ("pretrained", "finetuned")
CAPTURED_CHECKPOINT = "finetuned"
LAYOUTS = ("joint", "aligned", "separate")
ONE_PLANE = ("joint", "aligned")
"""Layouts in which a vector's positions at two capture points can be compared."""
TOKEN_CLASSES = ("cls", "sep", "punctuation", "subword", "word")
"""`cls` and `sep`: the tokens that a tokenizer adds at the start and the end of a text."""

# Characters in the labels of tokens
SPACE = "␣"  # a token without one continues where the token before it ended
NEWLINE = "⏎"
SAME_CHARACTER = "…"
WORDPIECE_PREFIX = "##"
