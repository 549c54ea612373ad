"""Names allowed in parameters and written to files by stages, in display order.

They include the names of the capture points: the locations in a model where features are recorded. Labels and colours
are in `attnmix.figures.labels`, which only drawing code imports, and measures are described next to their formulas.
Therefore, DVC reruns the stages that compute results after a change to a name, but not after a change to a label or a
colour.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

ACTIVATIONS = Path("features/capture")
"""The folder of the token vectors in a run, unless `capture.store` sets another location."""
RATIO_NAMES = ("attn_w", "attnres_w", "attn_n", "attnres_n", "attnresln_n", "enc_n", "layer_n")
"""Mixing ratios, ordered by the part of a layer that they cover."""
REDUNDANT_RATIO_NAMES = ("attnres_w", "enc_n")
"""Ratios with little additional information, not measured by default."""
ROLLOUT = "_rollout"
"""The suffix that turns the name of a matrix into the name of its rollout."""
MATRIX_NAMES = (
    "attention",
    "norm",
    "contribution_weights",
    "value_zeroing",
    "value_zeroing_without_bias",
    "alti",
    "globenc",
    "attention_rollout",
    "value_zeroing_rollout",
    "value_zeroing_without_bias_rollout",
    "alti_rollout",
    "globenc_rollout",
)
"""Contribution matrices of single layers, followed by rollouts."""
DEFAULT_MATRIX_NAMES = ("attention", "norm", "value_zeroing", "alti", "globenc", "attention_rollout", "alti_rollout")
"""The matrices that are computed by default."""
EXCHANGE = "exchange"
"""The matrix that contains the displacement of each vector after one input token has been exchanged."""
RATIO_CONTROL_NAMES = (
    "random_weights",
    "shuffled_words",
    "text_mean_value",
    "corpus_value",
    "without_value_bias",
    "without_special_sources",
)
"""Controls of the mixing ratios."""
DEFAULT_CONTROL_NAMES = ("shuffled_words", "corpus_value", "without_value_bias", "without_special_sources")
"""The controls that are measured by default."""
OWN_SHARE = "own_share"
ALL_DONORS = "all"
SAME_CLASS, OTHER_CLASS, OTHER_TEXTS, NEUTRAL = "same_class", "other_class", "other_texts", "neutral"
DONOR_KINDS = {
    ALL_DONORS: "all kinds of donors; the own share is the mean over the kinds",
    SAME_CLASS: "other texts of the same class",
    OTHER_CLASS: "texts of another class",
    OTHER_TEXTS: "other texts of any class",
    NEUTRAL: "neutral sentences of the library, for a single text",
}
"""The kinds of donor texts for exchanged words (`attnmix.measures.exchange`)."""
TOTAL_EFFECTS = {"total_own": "single tokens", "total_others": "all other tokens"}
"""The total effects by name, each with a description of the tokens whose effect it measures."""
MIN_EXCESS = 0.005  # excess of a total effect over 1 that is attributed to rounding errors of equal vectors
SAME_MINUS_OTHER = "same_minus_other"
"""The value of the column `donor` in rows that contain differences of own shares between two kinds of donors.

The difference is the own share with donors of the same class minus the own share with donors of another class.
"""
INPUT_PARTS = "parts"
"""The matrices with the contribution of each input embedding to each vector."""
PARTS_RULE_NAMES = ("chord", "tangent")
"""Rules that attribute the output of an activation function to the contributions to the function's input."""
IMPORTANCE_NAMES = ("leave_one_out", "gradient_x_input")
"""Scores that measure how important each token of a captured text is for the predicted class."""
CHECKPOINT_NAMES = ("pretrained", "finetuned")
CAPTURED_CHECKPOINT = "finetuned"
LAYOUTS = ("joint", "aligned", "pca", "separate")
ONE_PLANE = ("joint", "aligned")
"""Layouts with coordinates that are comparable between capture points."""
METRIC_NAMES = (
    "braycurtis",
    "canberra",
    "chebyshev",
    "correlation",
    "cosine",
    "euclidean",
    "l1",
    "l2",
    "linf",
    "linfinity",
    "linfty",
    "manhattan",
    "minkowski",
    "softmax_hellinger",
    "taxicab",
)
"""The metrics of umap-learn for dense real vectors without additional parameters."""
TOKEN_CLASSES = ("cls", "sep", "punctuation", "subword", "word")
"""Classes of tokens.

`cls` and `sep` are the special tokens at the start and end of a text, and `subword` is a token that is only a part of
a word.
"""

# Characters in the labels of tokens
SPACE = "␣"  # a token without this prefix directly continues the previous token
NEWLINE = "⏎"
SAME_CHARACTER = "…"
WORDPIECE_PREFIX = "##"

# Capture points
EMBEDDING_POINTS = ("word_embedding", "embedding_sum", "embedding_output")
LAYER_POINTS = (
    "attention_heads",
    "attention_output",
    "attention_residual",
    "attention_norm",
    "cross_attention_output",
    "cross_attention_norm",
    "ffn_output",
    "layer_output",
)
# In encoder-decoder models, the input of the first decoder layer; it has the layer index of the last encoder layer.
DECODER_INPUT = "decoder_embedding_output"
POINTS = (*EMBEDDING_POINTS, *LAYER_POINTS, DECODER_INPUT)
SUBLAYER_POINTS = ("attention_heads", "attention_output", "cross_attention_output", "ffn_output")
"""Outputs of sublayers before their addition to the residual stream; all other points are in the stream itself."""
OWN_BASIS = frozenset({"attention_heads"})
"""Capture points before the output projection of attention; their vectors are not in the basis of the residual stream.

Distances to vectors of other points are meaningless and are therefore not computed.
"""
PREACTIVATION = "preactivation"
"""The output of the feed-forward network's first Linear, recorded like a capture point but not in `POINTS`.

This output is the input of the activation function, unless the Linear also contains the weights of a gate.
"""
# The steps of a layer, with the capture point after each step. Some model families lack some of these steps. No capture
# point exists between the second skip connection and a subsequent norm.
STEP_POINTS = {
    "heads": "attention_heads",
    "output_linear": "attention_output",
    "attention_skip": "attention_residual",
    "attention_norm": "attention_norm",
    "cross_attention": "cross_attention_output",
    "cross_attention_norm": "cross_attention_norm",
    "feed_forward": "ffn_output",
    "ffn_skip": None,
    "ffn_norm": "layer_output",
}
STEP_MEASURES = ("cosine_previous", "cosine_input", "distance_previous", "norm")
"""Measures of a vector after a step of a layer."""


class Site(NamedTuple):
    """A capture point in a layer; layer 0 is the embedding."""

    layer: int
    point: str

    def __str__(self) -> str:
        return f"layer_{self.layer:02d}/{self.point}"

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the site whose string form is `name`."""
        layer, _, point = name.removeprefix("layer_").partition("/")
        return cls(int(layer), point)


def in_forward_order(sites: Iterable[Site]) -> list[Site]:
    """Return the sites in the order of the forward pass."""
    return sorted(sites, key=lambda site: (site.layer, POINTS.index(site.point)))
