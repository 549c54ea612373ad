"""Time and peak memory of `reduce` on stores of many vectors, of which a map shows a stratified draw.

    python -m benchmarks.scale --vectors 1000000 --hidden 768 --max-points 20000

Writes random features (1.5 GB for the values above) to a temporary folder and runs the stage there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from ruamel.yaml import YAML

from stages import store
from stages.models.capture_points import Site

REPOSITORY = Path(__file__).parents[1]
SITE = Site(0, "embedding_output")
TOKENS = 250  # of a document
RUN = (
    "from stages import reduce; from stages.parameters import read_parameters; "
    "from benchmarks.cases import peak_memory; reduce.main(read_parameters()); "
    "print(f'{peak_memory():,.0f} MB at most')"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--max-points", type=int, default=20_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, arguments.vectors, arguments.hidden, arguments.max_points)
        start = time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        subprocess.run([sys.executable, "-c", RUN], cwd=folder, env=environment, check=True)
        print(f"{arguments.vectors} vectors of {arguments.hidden}, {time.perf_counter() - start:.0f} s")
        print((folder / "reports/metrics/maps.json").read_text(encoding="utf-8"))


def _write(folder: Path, vectors: int, hidden: int, max_points: int) -> None:
    root = folder / "features/activations"
    plan = store.plan_store(vectors, hidden, "float16")
    store.create_stores(root, [SITE], plan)
    generator = np.random.default_rng(0)
    for unit in range(plan.units):
        rows = plan.rows_of(unit)
        block = generator.standard_normal((rows.stop - rows.start, hidden), dtype=np.float32)
        store.write_block(root, SITE, rows, block.astype(np.float16))
    number = np.arange(vectors)
    table = pd.DataFrame({"document": "test/" + pd.Series(number // TOKENS).astype(str), "position": number % TOKENS})
    table.assign(token_id=0, token="a").to_parquet(store.tokens_file(root), index=False)
    mixing = folder / "features/mixing"
    mixing.mkdir(parents=True)
    table.head(1).assign(checkpoint="pretrained", layer=1, attn_n=0.0).to_parquet(
        mixing / "tokens.parquet", index=False
    )
    yaml = YAML(typ="safe", pure=True)
    values = yaml.load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
    values["umap"].update(max_points=max_points, layouts=["joint"], stability_seeds=[])
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(values, file)


if __name__ == "__main__":
    main()
