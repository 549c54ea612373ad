"""Cases of `benchmarks.stages`, each timed in a fresh process: the pipeline's way and the strongest plain way.

    python -m benchmarks.cases joint pipeline
    python -m benchmarks.cases joint check

run one of them in the current folder, which `benchmarks.stages` has laid out. Every way imports for itself what it
needs, as an import is part of its time.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from attnmix.arithmetic.settings import PORTABLE
from attnmix.core.names import ACTIVATIONS
from attnmix.core.settings import UmapParameters
from attnmix.store.features import read_features, stored_sites
from attnmix.store.runs import Run
from benchmarks import capturing, corpora, long_texts, mixing
from benchmarks.timing import COLD, WARM, Case, keep_measured
from stages.common.parameters import read_parameters

PAGES = Path("pages")
MAP = Path("map.parquet")
N_EPOCHS = 200  # as in attnmix.maps.layouts, whose import would count in the time of the plain ways


def vectors() -> list[Any]:
    """The captured vectors `[tokens, hidden]` of every point, in forward order."""
    return [read_features(ACTIVATIONS, site).astype(np.float32) for site in stored_sites(ACTIVATIONS)]


# Maps.


def map_options() -> dict[str, Any]:
    """The parameters of one map, in the order of `fit_map`."""
    umap = read_parameters().umap
    return {name: getattr(umap, name) for name in ("metric", "n_neighbors", "min_dist", "seed")}


def joint_pipeline() -> None:
    from attnmix.maps.layouts import fit_map

    np.save("joint_pipeline.npy", fit_map(np.concatenate(vectors()), **map_options()))


def joint_plain(name: str, seeded: bool) -> None:
    """One fit; its own coordinates, no `transform`."""
    np.save(f"joint_{name}.npy", plain_map(np.concatenate(vectors()), read_parameters().umap, seeded))


def plain_map(x: Any, parameters: UmapParameters, seeded: bool = True) -> Any:
    """`umap.UMAP` on exact neighbours, which scikit-learn finds by brute force."""
    import umap
    from sklearn.neighbors import NearestNeighbors

    distances, indices = NearestNeighbors(n_neighbors=parameters.n_neighbors, algorithm="brute").fit(x).kneighbors(x)
    return umap.UMAP(
        n_neighbors=parameters.n_neighbors,
        min_dist=parameters.min_dist,
        n_epochs=N_EPOCHS,
        random_state=parameters.seed if seeded else None,
        n_jobs=1 if seeded else -1,
        precomputed_knn=(indices.astype(np.int32), distances.astype(np.float32)),
    ).fit_transform(x)


def separate_pipeline() -> None:
    from attnmix.maps.layouts import fit_map
    from attnmix.maps.parallel import in_parallel

    calls = [(array, *map_options().values()) for array in vectors()]
    np.save("separate_pipeline.npy", np.stack(in_parallel(fit_map, calls, "maps")))


def separate_plain(name: str, n_jobs: int) -> None:
    """`n_jobs`: 1, or -1 for a process on every core. Threads take turns: umap-learn holds the interpreter lock."""
    import joblib

    umap = read_parameters().umap
    with joblib.parallel_config("loky", n_jobs=n_jobs, inner_max_num_threads=1 if n_jobs != 1 else None):
        maps = joblib.Parallel()(joblib.delayed(plain_map)(x, umap) for x in vectors())
    np.save(f"separate_{name}.npy", np.stack(maps))


def maps_worth(case: str) -> str:
    """Trustworthiness of every way's maps, which start elsewhere where their graph is not connected."""
    from attnmix.maps.quality import N_NEIGHBOURS, score_map

    umap, arrays = read_parameters().umap, vectors()
    spaces = [np.concatenate(arrays)] if case == "joint" else arrays
    layouts = {path.stem.removeprefix(f"{case}_"): np.load(path) for path in sorted(Path().glob(f"{case}_*.npy"))}
    worth = []
    for number, x in enumerate(spaces):
        maps = [xy.reshape(len(spaces), len(x), 2)[number] for xy in layouts.values()]
        worth.append([score_map(x, [xy], umap.metric, umap.seed).loc["trustworthiness", "value"] for xy in maps])
    named = ", ".join(f"{name} {value:.4f}" for name, value in zip(layouts, np.mean(worth, axis=0), strict=True))
    return (
        f"{len(arrays)} x {len(arrays[0])} vectors of {arrays[0].shape[1]}, {N_EPOCHS} epochs, exact neighbours. "
        f"Trustworthiness (k = {N_NEIGHBOURS}): {named}."
    )


# The stage `reduce`.


def reduce_stage(**changed: Any) -> None:
    from stages import reduce

    parameters = read_parameters()
    umap = parameters.umap.model_copy(update=changed)
    reduce.main(parameters.model_copy(update={"umap": umap}))


def layouts_made() -> str:
    umap = read_parameters().umap
    made = {layout: len(pd.read_parquet(Run(Path()).maps / f"{layout}.parquet")) for layout in umap.layouts}
    seeds = 1 + len(umap.stability_seeds)
    return f"{', '.join(f'{layout} of {number} vectors' for layout, number in made.items())}; {seeds} seeds of each."


# Pages.


def pages_pipeline() -> None:
    from attnmix.figures.maps import write_joint_pages
    from attnmix.figures.style import paper_style

    figures = read_parameters().render
    with paper_style():
        write_joint_pages(pd.read_parquet(MAP), None, PAGES / "pipeline", figures.formats)


def pages_plain(name: str, one_figure: bool) -> None:
    """All points up to the page's and a legend of them, on a new figure for each page, or added to one figure."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("agg")
    figures, folder = read_parameters().render, PAGES / name
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.read_parquet(MAP)
    groups = list(table.groupby(["layer", "point"], sort=False))
    for number, (title, _) in enumerate(groups, start=1):
        if number == 1 or not one_figure:
            figure, axes = plt.subplots(figsize=(7, 4.6), dpi=300, layout=None)
            figure.subplots_adjust(left=0.08, right=0.66)
            axes.set_xlim(table["x"].min() - 1, table["x"].max() + 1)
            axes.set_ylim(table["y"].min() - 1, table["y"].max() + 1)
        for (layer, point), rows in groups[number - 1 if one_figure else 0 : number]:
            axes.scatter(rows["x"], rows["y"], s=8, alpha=0.6, label=f"{layer} {point}")
        axes.set_title(str(title))
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), ncols=2, fontsize=5)
        for suffix in figures.formats:
            figure.savefig(folder / f"{number:02d}.{suffix}")
        if not one_figure:
            plt.close(figure)


def pages_drawn() -> str:
    found = {}
    for folder in sorted(PAGES.iterdir()):
        suffixes = [path.suffix for path in sorted(folder.iterdir())]
        found[folder.name] = {suffix.removeprefix("."): suffixes.count(suffix) for suffix in sorted(set(suffixes))}
    counts = next(iter(found.values()))
    if any(each != counts for each in found.values()):
        raise AssertionError(f"not the same pages: {found}")
    each = " and ".join(f"{number} {suffix.upper()}" for suffix, number in counts.items())
    return f"{len(pd.read_parquet(MAP))} vectors; {each} from every way."


CASES: dict[str, Case] = {
    "capture": capturing.case("default model", "default"),
    "capture-bert": capturing.case("BERT-base's shape", "bert"),
    "peers": capturing.peers("default model", "default"),
    "measure": mixing.case("default model", "full"),
    "mixing-bert": mixing.case("BERT-base's shape", "bert"),
    "long": long_texts.CASE,
    "measure-corpora": corpora.case("measure"),
    "capture-corpora": corpora.case("capture"),
    "joint": Case(
        "Joint map (plain: umap.UMAP on scikit-learn's exact neighbours)",
        "maps",
        partial(maps_worth, "joint"),
        {
            "pipeline": joint_pipeline,
            "plain, seeded": partial(joint_plain, "plain", seeded=True),
            "plain, no seed, all threads": partial(joint_plain, "plain without seed", seeded=False),
        },
        (COLD, WARM),
    ),
    "separate": Case(
        "Separate maps (plain: umap.UMAP on scikit-learn's exact neighbours, seeded)",
        "maps",
        partial(maps_worth, "separate"),
        {
            "pipeline": separate_pipeline,
            "plain, one process": partial(separate_plain, "plain", n_jobs=1),
            "plain, joblib processes": partial(separate_plain, "plain in processes", n_jobs=-1),
        },
        (COLD, WARM),
    ),
    "reduce": Case(
        "Stage reduce: all layouts, several seeds, scores, files", "maps", layouts_made, {"pipeline": reduce_stage}
    ),
    "pages": Case(
        "Pages of the joint map",
        "maps",
        pages_drawn,
        {
            "pipeline": pages_pipeline,
            "plain, a new figure for each": partial(pages_plain, "plain", one_figure=False),
            "plain, one figure": partial(pages_plain, "plain, one figure", one_figure=True),
        },
    ),
}

if __name__ == "__main__":
    case, asked = CASES[sys.argv[1]], sys.argv[2]
    if read_parameters().arithmetic == PORTABLE:
        from attnmix.arithmetic.kernels import use  # torch, which not every way loads

        use(PORTABLE)
    if asked == "check":
        print(case.check())
    else:
        keep_measured(case.ways[asked]())
