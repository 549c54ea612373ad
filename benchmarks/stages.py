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
from stages.mixing.storage import MIXING
from stages.store import stored_sites

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "RESULTS.md"
TOKENS = 256
TEXTS = 16
WHAT = {
    "capture": f"{TEXTS} texts of {TOKENS} tokens, default model, 32 points",
    "joint": f"joint map of 62 x {TOKENS} vectors of 768; plain: fit, then 62 times `transform`",
    "separate": f"{SEPARATE_MAPS} separate maps of {TOKENS} vectors of 768, 200 epochs; plain: `UMAP().fit` in turn, "
    "500 epochs, its default for so few",
    "reduce": f"the whole stage on 62 x {TOKENS} vectors of 768: three layouts, three seeds of each, scores, files",
    "render": "62 pages, PNG and PDF; plain: a new figure for each",
}
STATES = {"capture": ("",), "joint": ("nothing compiled", "compiled before"), "render": ("",)}
STATES["separate"] = STATES["reduce"] = STATES["joint"]
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
            if case == "reduce":
                _write_ratios(base)
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
        table = _table(found, "".join(_trust(base, case) for case in ("joint", "separate") if case in arguments.cases))
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


def _write_ratios(base: Path) -> None:
    """Random ratios for the tokens, so that moves can be set against them."""
    tokens = pd.read_parquet(base / "features/activations/tokens.parquet")[["document", "position"]]
    layers = [tokens.assign(checkpoint="finetuned", layer=layer) for layer in range(1, 13)]
    table = pd.concat(layers, ignore_index=True)
    (base / MIXING).mkdir(parents=True, exist_ok=True)
    table["attn_n"] = np.random.default_rng(0).uniform(size=len(table))
    table.to_parquet(base / MIXING / "tokens.parquet", index=False)


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


def _trust(base: Path, case: str) -> str:
    """Trustworthiness of the maps of a case, both ways."""
    here = Path.cwd()
    os.chdir(base)
    try:
        arrays = vectors()
        layouts = {path.stem.removeprefix(f"{case}_"): np.load(path) for path in sorted(Path().glob(f"{case}_*.npy"))}
    finally:
        os.chdir(here)
    spaces = [np.concatenate(arrays)] if case == "joint" else arrays[:SEPARATE_MAPS]
    parts = [np.array_split(xy.astype(np.float32), len(spaces)) for xy in layouts.values()]
    found = []
    for number, x in enumerate(spaces):
        rows = scored_rows(np.zeros(len(x), dtype=np.int64), seed=0)
        found.append([each[:, 0].mean() for each in scores(x, [part[number] for part in parts], "euclidean", rows)])
    each = ", ".join(f"{name} {value:.4f}" for name, value in zip(layouts, np.mean(found, axis=0), strict=True))
    return f"Trustworthiness (k = 15) of the {case} {'map' if case == 'joint' else 'maps'}: {each}.\n\n"


def _row(name: tuple[str, str], found: dict[str, list[Run]]) -> str:
    case, state = name
    middle = {way: [statistics.median(column) for column in zip(*runs, strict=True)] for way, runs in found.items()}
    (ours, ours_mb), plain = middle["ours"], middle.get("plain")
    there = ["", "", ""]
    if plain is not None:
        there = [f"{plain[0]:.1f} s", f"{plain[0] / ours:.1f} x", f"{plain[1]:,.0f} MB"]
    columns = [case, WHAT[case], state, f"{ours:.1f} s", *there[:2], f"{ours_mb:,.0f} MB", there[2]]
    return f"| {' | '.join(columns)} |"


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
        trust.rstrip(),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
