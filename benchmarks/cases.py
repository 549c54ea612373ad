"""What `benchmarks.stages` times, each in a fresh process: the pipeline's way and the plain way to the same thing.

    python -m benchmarks.cases joint plain

runs one of them in the current folder, which `benchmarks.stages` has laid out.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SEPARATE_MAPS = 32
MAP = Path("joint.parquet")


def vectors() -> list[Any]:
    """The captured vectors `[tokens, hidden]` of every point, in forward order."""
    from stages import store

    root = Path("features/activations")
    return [store.read_features(root, site).astype(np.float32) for site in store.stored_sites(root)]


def capture_ours() -> None:
    from stages import capture
    from stages.parameters import read_parameters

    capture.main(read_parameters())


def capture_plain() -> None:
    """A hook at every point, one text at a time, its rows appended to a Zarr array of default settings."""
    import torch
    import zarr
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from stages.models.capture_points import taps
    from stages.parameters import read_parameters

    parameters = read_parameters().capture
    tokenizer = AutoTokenizer.from_pretrained("models/finetuned")
    base = AutoModelForSequenceClassification.from_pretrained("models/finetuned").base_model.eval()
    rows: dict[str, Any] = {}

    def keep(name: str, side: str) -> Callable[..., None]:
        def hook(_module: Any, inputs: Any, output: Any) -> None:
            value = inputs[0] if side == "input" else output
            rows[name] = (value[0] if isinstance(value, tuple) else value)[0].numpy().astype(np.float16)

        return hook

    for tap in taps("bert", base.config.num_hidden_layers, parameters.points):
        base.get_submodule(tap.module).register_forward_hook(keep(str(tap.site), tap.side))
    arrays: dict[str, Any] = {}
    with torch.no_grad():
        for text in parameters.texts:
            base(**tokenizer(text, truncation=True, max_length=parameters.max_length, return_tensors="pt"))
            for name, block in rows.items():
                if name not in arrays:
                    store = f"features/plain/{name}.zarr"
                    arrays[name] = zarr.create_array(store=store, shape=(0, block.shape[1]), dtype="float16")
                arrays[name].append(block)


def joint_ours() -> None:
    from stages.maps.layouts import fit_map
    from stages.parameters import read_parameters

    umap = read_parameters().umap
    np.save("joint_ours.npy", fit_map(np.concatenate(vectors()), umap, umap.seed))


def joint_plain() -> None:
    """One fit of all vectors, then `transform` of each point's, as the reference repository does."""
    import umap

    arrays = vectors()
    fitted = umap.UMAP().fit(np.concatenate(arrays))
    np.save("joint_plain.npy", fitted.embedding_)
    np.save("joint_plain_transformed.npy", np.concatenate([fitted.transform(array) for array in arrays]))


def separate_ours() -> None:
    from stages.maps.layouts import fit_map
    from stages.maps.parallel import in_parallel
    from stages.parameters import read_parameters

    umap = read_parameters().umap
    calls = [(array, umap, umap.seed) for array in vectors()[:SEPARATE_MAPS]]
    np.save("separate_ours.npy", np.concatenate(in_parallel(fit_map, calls, "maps")))


def separate_plain() -> None:
    """One `UMAP()` after the other."""
    import umap

    warnings.filterwarnings("ignore", category=UserWarning)
    np.save("separate_plain.npy", np.concatenate([umap.UMAP().fit(x).embedding_ for x in vectors()[:SEPARATE_MAPS]]))


def reduce_ours() -> None:
    """The whole stage: every layout, several seeds of each, all scores, and the files. No plain way does as much."""
    from stages import reduce
    from stages.parameters import read_parameters

    reduce.main(read_parameters())


def render_ours() -> None:
    from stages.parameters import read_parameters
    from stages.pictures.joint_pages import draw_joint_pages
    from stages.pictures.style import paper_style

    with paper_style():
        draw_joint_pages(pd.read_parquet(MAP), Path("pages/ours"), read_parameters().figures)


def render_plain() -> None:
    """A new figure for each page, with all points up to it and a legend of them."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("agg")
    folder = Path("pages/plain")
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.read_parquet(MAP)
    groups = list(table.groupby(["layer", "point"], sort=False))
    for number in range(1, len(groups) + 1):
        _, axes = plt.subplots(figsize=(7, 4.6), dpi=150)
        for (layer, point), rows in groups[:number]:
            axes.scatter(rows["x"], rows["y"], s=8, alpha=0.6, label=f"{layer} {point}")
        axes.set_xlim(table["x"].min() - 1, table["x"].max() + 1)
        axes.set_ylim(table["y"].min() - 1, table["y"].max() + 1)
        axes.set_title(str(groups[number - 1][0]))
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), ncols=2, fontsize=5)
        for suffix in ("png", "pdf"):
            plt.savefig(folder / f"{number:02d}.{suffix}", bbox_inches="tight")
        plt.close()


CASES: dict[str, dict[str, Callable[[], None]]] = {
    "capture": {"ours": capture_ours, "plain": capture_plain},
    "joint": {"ours": joint_ours, "plain": joint_plain},
    "separate": {"ours": separate_ours, "plain": separate_plain},
    "reduce": {"ours": reduce_ours},
    "render": {"ours": render_ours, "plain": render_plain},
}


def peak_memory() -> float:
    """Peak resident memory of this process in MB."""
    kilobytes = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(kilobytes[1]) / 1024 if kilobytes else float("nan")


if __name__ == "__main__":
    CASES[sys.argv[1]][sys.argv[2]]()
    Path("peak_memory").write_text(str(peak_memory()), encoding="ascii")
