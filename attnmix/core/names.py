"""Names that parameters allow and that stages write into their files, in the order in which they are shown.

Among them are the capture points, the named places in a model where features are taken. Labels and colours are in
`attnmix.figures.labels`, which only drawing reads, and a measure's definition is next to its formula. So a stage that
computes runs again when a name changes, not when a label or a colour does.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

ACTIVATIONS = Path("features/capture")
"""The folder of the token vectors below a run's root, unless `capture.store` names another place."""
RATIO_NAMES = ("attn_w", "attnres_w", "attn_n", "attnres_n", "attnresln_n", "enc_n", "layer_n")
"""Mixing ratios, ordered by how much of a layer they cover."""
REDUNDANT_RATIO_NAMES = ("attnres_w", "enc_n")
"""Ratios that add little to the others and are not measured by default."""
ROLLOUT = "_rollout"
"""The suffix of the name of a rollout, after the name of its matrix."""
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
"""Contribution matrices: those of one layer, then the rollouts."""
DEFAULT_MATRIX_NAMES = ("attention", "norm", "value_zeroing", "alti", "globenc", "attention_rollout", "alti_rollout")
"""The matrices that are computed by default."""
EXCHANGE = "exchange"
"""The matrix of the displacements by single exchanged tokens of the input."""
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
    ALL_DONORS: "all kinds of donors; the own share is the mean of theirs",
    SAME_CLASS: "other texts of the same class",
    OTHER_CLASS: "texts of another class",
    OTHER_TEXTS: "other texts of any class",
    NEUTRAL: "neutral sentences of the library, for a single text",
}
"""The kinds of texts from which the words for exchanged texts come (`attnmix.measures.exchange`)."""
INPUT_PARTS = "parts"
"""The matrices of what each token of the input gave to each vector, from the embeddings on."""
IMPORTANCE_NAMES = ("leave_one_out", "gradient_x_input")
"""Scores of the tokens of captured texts, for the predicted class."""
CHECKPOINT_NAMES = ("pretrained", "finetuned")
CAPTURED_CHECKPOINT = "finetuned"
LAYOUTS = ("joint", "aligned", "pca", "separate")
ONE_PLANE = ("joint", "aligned")
"""Layouts in which a vector's positions at two capture points can be compared."""
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
"""The metrics of umap-learn for dense real vectors that need no parameters of their own."""
TOKEN_CLASSES = ("cls", "sep", "punctuation", "subword", "word")
"""`cls` and `sep`: the tokens that a tokenizer adds at the start and the end of a text; `subword`: a part of a word."""

# Characters in the labels of tokens
SPACE = "␣"  # a token without one continues where the token before it ended
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
# The input of the first layer of an encoder-decoder's decoder, at the level of the encoder's last layer.
DECODER_INPUT = "decoder_embedding_output"
POINTS = (*EMBEDDING_POINTS, *LAYER_POINTS, DECODER_INPUT)
SUBLAYER_POINTS = ("attention_heads", "attention_output", "cross_attention_output", "ffn_output")
"""Outputs of sublayers, before they are added to the residual stream; all other points are the stream itself."""
OWN_BASIS = frozenset({"attention_heads"})
"""Points before attention's last Linear, in other coordinates than the residual stream's.

Distances between their vectors and those of other points mean nothing, so no score and no move compares them.
"""
PREACTIVATION = "preactivation"
"""The input of a plain feed-forward network's activation: no capture point, but recorded like one."""
# The steps of a layer, some of which a family may lack, and the capture point after each; there is none between the
# second skip connection and a norm that follows it.
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
"""Measures of a vector after a step."""


class Site(NamedTuple):
    """One capture point in one layer; level 0 is the embedding."""

    layer: int
    point: str

    def __str__(self) -> str:
        return f"layer_{self.layer:02d}/{self.point}"

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the site that `str` writes as `name`."""
        layer, _, point = name.removeprefix("layer_").partition("/")
        return cls(int(layer), point)


def in_forward_order(sites: Iterable[Site]) -> list[Site]:
    """Return the sites in the order of the forward pass."""
    return sorted(sites, key=lambda site: (site.layer, POINTS.index(site.point)))
