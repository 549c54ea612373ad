"""Time and peak memory of `reduce` on stores of many vectors, of which a map shows a stratified draw.

    python -m benchmarks.scale --vectors 1000000 --hidden 768 --max-points 20000

Writes random features (1.5 GB for the values above) to a temporary folder and runs the stage there.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from attnmix.core.names import Site
from attnmix.store import features as store
from attnmix.store.files import write_table
from attnmix.store.runs import Run
from attnmix.store.texts import write_tokenized
from benchmarks.stages import write_parameters
from benchmarks.timing import machine, timed

SITE = Site(0, "embedding_output")
TOKENS = 250  # of a document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--max-points", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    print(machine(arguments.threads))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_parameters(folder, umap={"max_points": arguments.max_points, "layouts": ["joint"], "stability_seeds": []})
        _write_stores(Run(folder), arguments.vectors, arguments.hidden)
        run = timed("reduce", "pipeline", folder, arguments.threads, folder / "compiled")["pipeline"]
        print(f"{arguments.vectors} vectors of {arguments.hidden}: {run.seconds:.0f} s, {run.peak_mb:,.0f} MB at most")
        print((Run(folder).metrics_folder / "reduce.json").read_text(encoding="utf-8"))


def _write_stores(layout: Run, vectors: int, hidden: int) -> None:
    """Write one store of random features and its tokens table."""
    root = layout.activations
    plan = store.plan_store(vectors, hidden, "float16")
    store.create_stores(root, {SITE: hidden}, plan)
    generator = np.random.default_rng(0)
    for rows in plan.units:
        block = generator.standard_normal((rows.stop - rows.start, hidden), dtype=np.float32)
        store.write_unit(store.open_to_write(root, SITE), rows, block.astype(np.float16))
    number = np.arange(vectors)
    table = pd.DataFrame({"document": "test/" + pd.Series(number // TOKENS).astype(str), "position": number % TOKENS})
    write_table(root / store.TOKENS, table.assign(token_id=0, token="a"))
    texts = pd.DataFrame({"document": table["document"].unique(), "text": "a", "label": -1, "label_name": None})
    texts = texts.assign(measured=False, removed=False, whole_tokens=TOKENS, unknown_tokens=0)
    texts["tokens"] = table.groupby("document", sort=False).size().to_numpy()
    columns = {"token_id": 0, "token": "a", "label": "a", "start": 0, "end": 1, "word": 0, "token_class": "word"}
    write_tokenized(layout.captured.folder, [(texts, table.assign(**columns))])


if __name__ == "__main__":
    main()
