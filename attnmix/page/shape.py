"""The schema of the page's data; the TypeScript types in the page's script are derived from this schema.

To write the TypeScript types:

    python -m attnmix.page.shape > attnmix/page/src/payload.d.ts
"""

from __future__ import annotations

from types import UnionType
from typing import Any, get_args

Data = dict[Any, Any]
_NAMES = {...: str}
_NUMBER = float | None
_GRIDS = {...: {...: str}}  # quantised arrays by checkpoint and method
# A series contains means and intervals by layer. `texts`, the number of averaged texts, is present only in `curves`.
_SERIES = {"values": [_NUMBER], "low": [_NUMBER], "high": [_NUMBER], "texts?": int}
_BY_MEASURE = {...: {...: {...: _SERIES}}}
_HEADS = {
    **{"scores": [[float]], "reach": str, "source_norms": str, "key_heads": int, "bits": int},
    **{"query": str, "key": str, "sums?": str, "vectors?": _NAMES, "query_scales?": str, "key_scales?": str},
}
SHAPE: Data = {
    "wording": _NAMES,  # words that depend on the origin of the numbers
    "pointsPerSecond": int,
    "labels": {
        **{"methods": _NAMES, "checkpoints": _NAMES, "matrices": _NAMES, "importance": _NAMES},
        **{"controls": _NAMES, "derivatives": _NAMES},
        "layers": [str],  # from 0, the embedding layer
    },
    "captured": str,  # the checkpoint of the captured vectors
    "ownBasis": [str],  # capture points with a different basis from the residual stream
    "method": str,
    "layer": int,
    "importance": {...: {"limit": float, "values": str}},  # `[tokens]`, quantised between -limit and limit
    "reviews": {"names": [str], "total": int, "values": _GRIDS},  # mean ratios `[layers, reviews]`
    "answer": {
        "headline": str,
        "sentences": [str],
        "notes": _NAMES,  # sentences on this run that the page adds to its glossary, by term
        "chart": {"title": str, "series": [{"name": str, **_SERIES}], "unit": str, "means": str},
    },
    "cautions": {"answer": str, "map": _NAMES},  # limitations of the main result, and of each layout of the map
    "sinceInput": [str],  # matrices whose sources are the tokens of the model's input instead of the layer's input
    "opens": {"document": int, "positions": [int]},  # the initially selected text, and a token position in each text
    "curves": {...: {...: _SERIES}},  # ratios, derivatives and own shares, by measure and checkpoint (or `difference`)
    "controls": _BY_MEASURE,  # by control, ratio and checkpoint
    "sources": _BY_MEASURE,  # ratios that count only one group of other tokens, by ratio, checkpoint and group
    "classShares": {...: _SERIES},  # by label
    "probes": {...: {...: _SERIES}},
    "neighboursKept": {...: [[_NUMBER]]},  # by layout and site, the observed share and the share expected by chance
    # `name` identifies the text, `title` is its name in sentences, and `heading` its name in lists. `start` is the
    # index of its first token, `direction` is ltr or rtl, and `caution` describes unknown tokens and single letters.
    # `label` is the true class, and `predicted` the predicted class with its `probability`.
    # `reads` is the position of the token that the classifier reads, if it reads a single token.
    "documents": [
        {
            **{"name": str, "title": str, "heading": str, "start": int, "length": int, "direction": str},
            **{"note": str, "caution": str},
            **{"label": str | None, "predicted": str | None, "probability": _NUMBER, "reads": int | None},
        }
    ],
    "encoder": int | None,  # number of encoder layers in an encoder-decoder model
    # The input tokens of the encoder and, if any, of the decoder. `apart` is 1 for tokens that are not attached
    # to the previous token, and `classes` are indices into `classNames`.
    "readings": [{"names": [str], "words": [str], "apart": [int], "classes": [int]}],
    "classNames": [str],
    "specialClasses": [int],  # indices of the classes for special tokens
    "wordClasses": [int],  # indices of the classes for words and subwords
    "ratios": {"methods": [str], "layers": int, "values": _GRIDS},  # `[layers, tokens]`
    # By document and method: the main sources of each token and, by checkpoint, the shares of these sources (`shares`)
    # and of the token itself (`own`).
    "contributions": {
        ...: {...: {"counts": str, "sources": str, "checkpoints": {...: {"shares": str, "own": str}}}},
    },
    "sourcesKept": int,  # number of sources kept per token for the largest shares, and for the largest changes
    "partsLimit": int,  # maximum length of a text with exact parts
    "exchangeLimit": int,  # maximum number of tokens of a text with own shares by exchange
    "matrices": [str],
    # The number of heads per layer and their width; `skip` is true if a skip connection follows attention.
    "attention": {"number": int, "width": int, "skip": bool},
    "sites": [{"layer": int, "point": str, "label": str, "reading": int}],
    "mapNote": str,  # the reason why there is no UMAP map; empty if there is one
    "maps": {...: {"x": str, "y": str, "absent": [int]}},  # coordinates `[sites, tokens]`, and sites without them
    "variances": [[_NUMBER]],  # by site, the explained variance ratios of the two principal components on the map
    "nearest": {"number": int, "tokens": str},  # `[sites, tokens, number]`
}
"""The schema: `[x]` is a list of `x`, `...` means any key, and `str` can also be an encoded array.

Keys with a final `?` are optional. Tokens and sites are identified by their indices.
"""


HEADS_SHAPE: Data = {...: {...: _HEADS}}
"""The vectors and norms of attention heads, by document and checkpoint.

The page stores them in a separate element. These arrays take up half of the page.
"""

TYPES: dict[str, Data] = {"Series": _SERIES, "Heads": _HEADS}


def typescript(shape: Any = SHAPE) -> str:
    """Return a shape as a TypeScript type; shapes in `TYPES` are represented by their names.

    A shape is a Python type, a list with the shape of its items, or a dictionary with the shapes of its values. In a
    dictionary with the key `...`, all values have the same shape, and any key is possible.
    """
    for name, named_shape in TYPES.items():
        if named_shape is shape:
            return name
    if isinstance(shape, list):
        item = typescript(shape[0])
        if isinstance(shape[0], UnionType):
            item = f"({item})"
        return f"{item}[]"
    if isinstance(shape, dict):
        if ... in shape:  # a dictionary with any keys
            value_type = typescript(shape[...])
            return f"Record<string, {value_type}>"
        fields = [f"{key}: {typescript(value)}" for key, value in shape.items()]
        joined = "; ".join(fields)
        return f"{{ {joined} }}"
    if isinstance(shape, UnionType):
        members = [typescript(member) for member in get_args(shape)]
        distinct_members = dict.fromkeys(members)
        return " | ".join(distinct_members)
    scalars = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
    return scalars[shape]


if __name__ == "__main__":
    print("// Written by attnmix/page/shape.py.")
    for name, shape in {**TYPES, "Payload": SHAPE}.items():
        print(f"export type {name} = {typescript(dict(shape))};")  # a copy: `typescript` would return the name
