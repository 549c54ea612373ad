"""Time and memory of capture, reduce and render beside the plain way to the same thing.

    python -m benchmarks.stages --repeats 3
    python -m benchmarks.stages --cases separate render

Every run is a fresh process on the same input: texts of 256 tokens through the default model (capture), one
text of 256 tokens through a randomly initialised model of BERT-base's shape (62 arrays of 256 x 768; maps and pages).
Maps are timed twice: with an empty folder for what numba compiles, as after an installation, and with what earlier
runs left there. Prints a table and, when all cases ran, writes it to `benchmarks/RESULTS.md`. Needs what `make repro`
makes.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from ruamel.yaml import YAML
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.cases import CASES, MAP, SEPARATE_MAPS, vectors
from stages.maps.quality import scored_rows, scores
from stages.store import stored_sites

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "RESULTS.md"
TOKENS = 256
TEXTS = 16
WHAT = {
    "capture": f"{TEXTS} texts of {TOKENS} tokens, default model, 32 points",
    "joint": f"joint map of 62 x {TOKENS} vectors of 768; plain: fit, then 62 times `transform`",
    "separate": f"{SEPARATE_MAPS} separate maps of {TOKENS} vectors of 768; plain: `UMAP().fit` in turn",
    "render": "62 pages, PNG and PDF; plain: a new figure for each",
}
STATES = {"capture": ("",), "joint": ("nothing compiled", "compiled before"), "render": ("",)}
STATES["separate"] = STATES["joint"]
Run = tuple[float, float]  # seconds, peak MB
Runs = dict[tuple[str, str], dict[str, list[Run]]]  # by case and state, then by way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, base = Path(folder, "default"), Path(folder, "base")
        _lay_out(small, TEXTS, REPOSITORY / "models/finetuned")
        _lay_out(base, 1, _bert_base(Path(folder, "bert-base-shaped")))
        _run("capture", "ours", base)
        found: Runs = {}
        for case in arguments.cases:
            place = small if case == "capture" else base
            if case == "render":
                _write_map(base)
            for state in STATES[case]:
                cold = state == "nothing compiled"
                if not cold:
                    for way in CASES[case]:
                        _run(case, way, place)  # what a first run compiles and caches is there afterwards
                runs: dict[str, list[Run]] = {way: [] for way in CASES[case]}
                for _ in range(arguments.repeats):
                    for way in CASES[case]:
                        runs[way].append(_run(case, way, place, cold))
                found[case, state] = runs
                print(_row((case, state), runs), flush=True)
        table = _table(found, _trust(base) if "joint" in arguments.cases else "")
    print(table)
    if set(arguments.cases) == set(CASES):
        RESULTS.write_text(table, encoding="utf-8")


def _lay_out(folder: Path, texts: int, model: Path) -> None:
    """A folder as the stages expect it, with texts that fill their tokens."""
    (folder / "models").mkdir(parents=True)
    (folder / "models/finetuned").symlink_to(model)
    (folder / "data").symlink_to(REPOSITORY / "data")
    yaml = YAML(typ="safe", pure=True)
    values = yaml.load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
    reviews = pd.read_parquet(REPOSITORY / "data/reviews/test.parquet")["text"].tolist()
    long = [" ".join((reviews[number:] + reviews)[:30]) for number in range(texts)]
    values["capture"].update(documents=[], texts=long, max_length=TOKENS)
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(values, file)


def _bert_base(folder: Path) -> Path:
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig()).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPOSITORY / "models/finetuned" / name, folder)
    return folder


def _write_map(base: Path) -> None:
    """A map to draw: the joint one where that case ran, random places otherwise."""
    sites = stored_sites(base / "features/activations")
    made = base / "joint_ours.npy"
    xy = np.load(made) if made.is_file() else np.random.default_rng(0).normal(size=(len(sites) * TOKENS, 2))
    table = pd.DataFrame(xy, columns=["x", "y"])
    table["layer"] = np.repeat([site.layer for site in sites], TOKENS)
    table["point"] = np.repeat([site.point for site in sites], TOKENS)
    table.to_parquet(base / MAP)


def _run(case: str, way: str, folder: Path, cold: bool = False) -> Run:
    """Wall time and peak memory of a fresh process; `cold`: numba finds nothing that was compiled before."""
    shutil.rmtree(folder / "features/plain", ignore_errors=True)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    if cold:
        compiled = folder / "compiled"
        shutil.rmtree(compiled, ignore_errors=True)
        environment["NUMBA_CACHE_DIR"] = str(compiled)
    start = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cases", case, way]
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start, float((folder / "peak_memory").read_text(encoding="ascii"))


def _trust(base: Path) -> str:
    """Trustworthiness of the joint map, both ways."""
    here = Path.cwd()
    os.chdir(base)
    try:
        x = np.concatenate(vectors())
        names = ("ours", "plain", "plain_transformed")
        layouts = [np.load(f"joint_{name}.npy").astype(np.float32) for name in names]
    finally:
        os.chdir(here)
    rows = scored_rows(np.zeros(len(x), dtype=np.int64), seed=0)
    ours, plain, moved = (float(each[:, 0].mean()) for each in scores(x, layouts, "euclidean", rows))
    return (
        f"Trustworthiness of the joint map (k = 15, {len(rows)} of its {len(x)} vectors): {ours:.4f}; "
        f"plain fit {plain:.4f}, its 62 transforms {moved:.4f}.\n"
    )


def _row(name: tuple[str, str], found: dict[str, list[Run]]) -> str:
    (ours, ours_mb), (plain, plain_mb) = (
        (statistics.median(run[0] for run in found[way]), statistics.median(run[1] for run in found[way]))
        for way in ("ours", "plain")
    )
    case, state = name
    return (
        f"| {case} | {WHAT[case]} | {state} | {ours:.1f} s | {plain:.1f} s | {plain / ours:.1f} x "
        f"| {ours_mb:,.0f} MB | {plain_mb:,.0f} MB |"
    )


def _table(found: Runs, trust: str) -> str:
    repeats = len(next(iter(found.values()))["ours"])
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "umap-learn", "numba", "matplotlib", "zarr"))
    lines = [
        "# Stages beside the plain way",
        "",
        f"Made by `make bench`. Every run is a fresh process, imports included; medians of {repeats} runs,",
        "the two ways in turn. numba's folder of compiled functions is empty, or filled by earlier runs. "
        f"{os.cpu_count()} cores, {'a GPU' if torch.cuda.is_available() else 'no GPU'},",
        f"Python {platform.python_version()}, {packages}.",
        "",
        "| | what | numba | pipeline | plain | ratio | peak memory | plain |",
        "|---|---|---|---:|---:|---:|---:|---:|",
        *(_row(name, runs) for name, runs in found.items()),
        "",
        trust,
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
