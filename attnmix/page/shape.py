"""The shape of the page's data, declared once: tests compare the data with it, and the script's types are made of it.

python -m attnmix.page.shape > attnmix/page/src/payload.d.ts
"""

from __future__ import annotations

from types import UnionType
from typing import Any, get_args

Data = dict[Any, Any]
_NAMES = {...: str}
_NUMBER = float | None
_GRIDS = {...: {...: str}}  # quantised arrays by checkpoint and method
# Means and intervals by layer, and the number of texts of those that a sentence is about.
_SERIES = {"values": [_NUMBER], "low": [_NUMBER], "high": [_NUMBER], "texts?": int}
_BY_MEASURE = {...: {...: {...: _SERIES}}}
_HEADS = {
    **{"scores": [[float]], "reach": str, "source_norms": str, "key_heads": int, "bits": int},
    **{"query": str, "key": str, "sums?": str, "vectors?": _NAMES, "query_scales?": str, "key_scales?": str},
}
SHAPE: Data = {
    "wording": _NAMES,  # words that depend on where the numbers come from
    "pointsPerSecond": int,
    "labels": {
        **{"methods": _NAMES, "checkpoints": _NAMES, "matrices": _NAMES, "importance": _NAMES},
        **{"controls": _NAMES, "derivatives": _NAMES},
        "layers": [str],  # from 0 on, the embedding
    },
    "captured": str,  # the checkpoint of the vectors
    "ownBasis": [str],  # points
    "method": str,
    "layer": int,
    "importance": {...: {"limit": float, "values": str}},  # `[tokens]`, quantised between -limit and limit
    "reviews": {"names": [str], "total": int, "values": _GRIDS},  # mean ratios `[layers, reviews]`
    "answer": {
        "headline": str,
        "sentences": [str],
        "notes": _NAMES,  # by term of the glossary, what is added there for this run
        "chart": {"title": str, "series": [{"name": str, **_SERIES}], "unit": str, "means": str},
    },
    "sinceInput": [str],  # those of the matrices that have sources in the input, and not in the layer below
    "opens": {"document": int, "positions": [int]},  # of the chosen token, by document
    "curves": {...: {...: _SERIES}},  # ratios, derivatives and own shares by checkpoint, and their difference
    "controls": _BY_MEASURE,  # by control, ratio and checkpoint
    "sources": _BY_MEASURE,  # of pairs of texts, by ratio, checkpoint and the others that count
    "classShares": {...: _SERIES},  # by label
    "probes": {...: {...: _SERIES}},
    "neighboursKept": {...: [[_NUMBER]]},  # by layout and site the share, and that by chance
    # `name` is the key, `title` the name in sentences, `heading` the name in lists; `start` is the number of the first
    # token, `direction` is ltr or rtl, `caution` says which words the model cannot read.
    # `label` is the labelled class, `predicted` the one that the classifier names with a `probability`;
    # `reads` is the position of the token that it reads, if one.
    "documents": [
        {
            **{"name": str, "title": str, "heading": str, "start": int, "length": int, "direction": str},
            **{"note": str, "caution": str},
            **{"label": str | None, "predicted": str | None, "probability": _NUMBER, "reads": int | None},
        }
    ],
    "encoder": int | None,  # layers, where there is a decoder too
    # All tokens as each stack reads them; `apart` is 1 where a word begins, `classes` number `classNames`.
    "readings": [{"names": [str], "words": [str], "apart": [int], "classes": [int]}],
    "classNames": [str],
    "wordClasses": [int],  # the numbers of the classes that are words or pieces of words
    "ratios": {"methods": [str], "layers": int, "values": _GRIDS},  # `[layers, tokens]`
    # By document and method the main sources of each token, and by checkpoint their shares and its share of itself.
    "contributions": {
        ...: {...: {"counts": str, "sources": str, "checkpoints": {...: {"shares": str, "own": str}}}},
    },
    "sourcesKept": int,  # the number of a token's largest shares, and of its largest changes
    "partsLimit": int,  # tokens of a text whose vectors are taken apart
    "matrices": [str],
    # Of heads, as contributions; `skip` where a skip connection follows attention.
    "attention": {"number": int, "width": int, "skip": bool},
    "sites": [{"layer": int, "point": str, "label": str, "reading": int}],
    "mapNote": str,  # why there is no UMAP, if so
    "maps": {...: {"x": str, "y": str, "absent": [int]}},  # places `[sites, tokens]`, and sites without any
    "variances": [[_NUMBER]],  # by site the shares of the variance along the map's two axes, of principal components
    "nearest": {"number": int, "tokens": str},  # `[sites, tokens, number]`
}
"""The page's data: `[x]` is a list of `x`, `...` stands for any key, and `str` also for an encoded array.

A key that ends in `?` may be left out. The number of a token, layer or site is its place in a list or array.
"""


HEADS_SHAPE: Data = {...: {...: _HEADS}}
"""The vectors and norms behind the heads, by document and checkpoint: half of a page, in an element of its own."""

TYPES: dict[str, Data] = {"Series": _SERIES, "Heads": _HEADS}


def typescript(shape: Any = SHAPE) -> str:
    """Return the shape as a type of TypeScript."""
    if name := next((name for name, each in TYPES.items() if each is shape), None):
        return name
    if isinstance(shape, list):
        return f"({typescript(shape[0])})[]" if isinstance(shape[0], UnionType) else f"{typescript(shape[0])}[]"
    if isinstance(shape, dict):
        if ... in shape:
            return f"Record<string, {typescript(shape[...])}>"
        return "{ " + "; ".join(f"{key}: {typescript(each)}" for key, each in shape.items()) + " }"
    if isinstance(shape, UnionType):
        return " | ".join(dict.fromkeys(typescript(each) for each in get_args(shape)))
    return {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}[shape]


if __name__ == "__main__":
    print("// Written by attnmix/page/shape.py.")
    for name, each in {**TYPES, "Payload": SHAPE}.items():
        print(f"export type {name} = {typescript(dict(each))};")  # a copy, as the shape itself has a name
