"""Labels, colours and markers for the names in `attnmix.core.names`.

Figures, the page, tables and documents use these labels; stages that compute measures do not.
"""

from typing import NamedTuple

from attnmix.core.names import LAYER_POINTS, Site


class Mark(NamedTuple):
    """The label, colour and marker of a category."""

    label: str
    color: str
    marker: str
    meaning: str = ""


POINTS_PER_SECOND = 2  # capture points per second in the animation and on the page

_LENGTH_RATIO = " of layer {layer}, the length ratio others / (others + own) is {share}"
RATIO_MARKS = {
    "attn_w": Mark(
        "Attention weights",
        "#56B4E9",
        "v",
        "By attention weights, {share} of the attention output of layer {layer} comes from other tokens",
    ),
    "attnres_w": Mark(
        "Weights + skip",
        "#0072B2",
        "s",
        "By attention weights, with the skip connection counted as half, others / (others + own) after attention of "
        "layer {layer} is {share}",
    ),
    "attn_n": Mark(
        "Norm-based",
        "#E69F00",
        "^",
        "In the attention output of layer {layer}, the length ratio others / (others + own) is {share}",
    ),
    "attnres_n": Mark("Norm-based + skip", "#D55E00", "X", "After attention and skip connection" + _LENGTH_RATIO),
    "attnresln_n": Mark(
        "Norm-based + skip + LayerNorm",
        "#009E73",
        "h",
        "After attention, skip connection and LayerNorm" + _LENGTH_RATIO,
    ),
    "enc_n": Mark(
        "Norm-based, both skips and LayerNorms",
        "#CC79A7",
        "D",
        "After both skip connections and LayerNorms" + _LENGTH_RATIO,
    ),
    "layer_n": Mark("Norm-based, whole layer", "#999999", "P", "After the whole" + _LENGTH_RATIO),
}
"""Marks of the mixing ratios; `meaning` explains a single value and is a template with `{layer}` and `{share}`."""
RATIO_LABELS = {name: mark.label for name, mark in RATIO_MARKS.items()}
"""Labels of the ratios in figures, tables and the page."""
_MATRICES = {
    "attention": "Attention weights",
    "norm": "Norms of single sources",
    "contribution_weights": "Contribution weights",
    "value_zeroing": "Value Zeroing",
    "value_zeroing_without_bias": "Value Zeroing without b_V",
    "alti": "ALTI",
    "globenc": "GlobEnc",
}
_ROLLOUTS = {f"{name}_rollout": f"{label} rollout" for name, label in _MATRICES.items()}
MATRIX_LABELS = _MATRICES | _ROLLOUTS | {"attention_rollout": "Attention rollout", "exchange": "Exchange of one token"}
"""Labels of the contribution matrices in figures and on the page."""

# Okabe and Ito's colours remain distinct with common forms of colour blindness. All points have different markers.
POINT_MARKS = {
    "word_embedding": Mark("Word embedding", "#000000", "o", "after the token embedding"),
    "embedding_sum": Mark("Embedding sum", "#999999", "P", "the embeddings added up, before their norm"),
    "embedding_output": Mark("Embedding output", "#CC79A7", "D", "input of the first layer"),
    "attention_heads": Mark(
        "Attention heads", "#56B4E9", "v", "heads concatenated, before the last Linear of attention"
    ),
    "attention_output": Mark(
        "Attention output", "#0072B2", "s", "after that Linear and its norm, if any, before the skip connection"
    ),
    "attention_residual": Mark("Attention + skip", "#B8A600", "p", "after the skip connection, before any norm"),
    "attention_norm": Mark("Attention + skip, normalised", "#E69F00", "^", "after skip connection and norm"),
    "cross_attention_output": Mark(
        "Cross-attention output", "#000000", "<", "the decoder's attention to the encoder, before its skip connection"
    ),
    "cross_attention_norm": Mark(
        "Cross-attention + skip, normalised", "#999999", ">", "after skip connection and norm of cross-attention"
    ),
    "ffn_output": Mark(
        "Feed-forward output", "#D55E00", "X", "after the feed-forward network and its norm, if any, before the skip"
    ),
    "layer_output": Mark("Layer output", "#009E73", "h", "after the last skip connection and its norm, if any"),
    "decoder_embedding_output": Mark("Decoder embedding output", "#CC79A7", "*", "input of the first decoder layer"),
}
STEP_MARKS = {
    "heads": Mark("Attention heads", "#56B4E9", "v"),
    "output_linear": Mark("Output Linear", "#0072B2", "s"),
    "attention_skip": Mark("Skip", "#B8A600", "p"),
    "attention_norm": Mark("LayerNorm", "#E69F00", "^"),
    "cross_attention": Mark("Cross-attention", "#000000", "<"),
    "cross_attention_norm": Mark("Cross-attention LayerNorm", "#999999", ">"),
    "feed_forward": Mark("Feed-forward", "#D55E00", "X"),
    "ffn_skip": Mark("Last skip", "#CC79A7", "D"),
    "ffn_norm": Mark("Last LayerNorm", "#009E73", "h"),
}
STEP_MEASURES = {
    "cosine_previous": "cosine to the step before",
    "cosine_input": "cosine to the layer's input",
    "distance_previous": "distance to the step before, relative to the input's length",
    "norm": "length, relative to the input's",
}
IMPORTANCE = {"leave_one_out": "Leave one out", "gradient_x_input": "Gradient x input"}
CHECKPOINTS = {"pretrained": "Pretrained", "finetuned": "Fine-tuned"}
CONTROL_LABELS = {
    "text_mean_value": "One value shared by all tokens",
    "corpus_value": "Values of other texts",
    "shuffled_words": "Words in random order",
    "random_weights": "Random weights",
    "without_value_bias": "Without the value's bias",
}
RANDOM_MODEL = "random"  # the checkpoint name of the model with random weights in tables of controls
CURVE_LOOKS = {
    "pretrained": ("#6b7485", "-"),
    "finetuned": ("#0060a0", "-"),
    "text_mean_value": ("#7f1b00", "--"),
    "corpus_value": ("#7f1b00", "-."),
    "shuffled_words": ("#005b3a", ":"),
    "random_weights": ("#7a6a00", ":"),
}
"""Colours and line styles of checkpoints and controls in figures and on the page."""
SHARE_COLOURS = ("#ffffff", "#5896cc", "#00386f")
"""The page's colours for shares of 0, 50 and 100 %; `LESS_COLOURS` extends this scale to negative differences."""
LESS_COLOURS = ("#d07f45", "#7a2c00")
TEXT_COLOURS = ("#2c67de", "#8a0000", "#285850", "#de6478", "#1c1c8a", "#6d688a", "#5c95cd", "#482720")
"""Colours of the texts on maps, in the order of the texts; figures and the page use the same colours.

If there are more texts than colours, only one text is coloured.
"""
OTHER_TEXTS = ("all others", "#8a8f99")
MAP_MEASURES = {
    "trustworthiness": "trustworthiness",
    "continuity": "continuity",
    "neighbours_kept": "neighbours kept",
    "trustworthiness_within": "trustworthiness within points",
    "continuity_within": "continuity within points",
    "neighbours_kept_within": "neighbours kept within points",
    "distance_spearman": "rank correlation of distances",
    "neighbour_overlap": "neighbours in common with other seeds",
    "procrustes_distance": "Procrustes distance to other seeds",
}
# Markers of special tokens by token class: `cls` at the start and `sep` at the end of a text.
SPECIAL_MARKERS = {"cls": "^", "sep": "s"}
WORD_CLASSES = {"punctuation": "punctuation", "subword": "word piece", "word": "word"}


def layer_label(layer: int, encoder: int | None = None) -> str:
    """Return the label of a layer, such as `Layer 3`; the label of layer 0 is `Embedding`.

    In an encoder-decoder model, the first `encoder` layers are those of the encoder, and labels have the form
    `Encoder 3` or `Decoder 1`.
    """
    if layer == 0:
        return "Embedding"
    if encoder is None:
        return f"Layer {layer}"
    if layer <= encoder:
        return f"Encoder {layer}"
    return f"Decoder {layer - encoder}"


def site_label(site: Site, encoder: int | None = None) -> str:
    """Return the label of a capture point in a layer, such as `Layer 3: Attention output`.

    The label of a point outside the layers, such as the embedding output, contains no layer.
    """
    point_label = POINT_MARKS[site.point].label
    if site.point not in LAYER_POINTS:
        return point_label
    return f"{layer_label(site.layer, encoder)}: {point_label}"


def in_text(label: str) -> str:
    """Return a label with a lower-case initial, for use within a sentence."""
    return label[0].lower() + label[1:]
