"""Vectors of texts: `capture` records them in a model, and `layout` computes their coordinates on a UMAP map."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from attnmix.core.disk import check_folder, publish_output
from attnmix.core.errors import InputError
from attnmix.core.names import POINTS
from attnmix.core.paths import read_path
from attnmix.core.settings import MIN_UMAP_VECTORS, CaptureParameters, UmapParameters, checked_section
from attnmix.core.store.results import labelled_vectors
from attnmix.core.store.runs import Run
from attnmix.measures.documents import documents_of
from attnmix.model import Model, quiet
from attnmix.models.families import family_of, present_names
from attnmix.results.arguments import check_model, read_names, tokenize_texts
from attnmix.results.measure_names import check_kinds

if TYPE_CHECKING:
    import xarray
    from transformers import PreTrainedModel

    from attnmix.runs.tokens import TokenizedTexts

UMAP_DEFAULTS = UmapParameters()
"""The defaults of `layout`."""

FEATURES = "features"  # folder of the outputs in a run
UNFINISHED = "unfinished"  # folder of incomplete outputs in a run


@overload
def capture(
    model: Model,
    texts: Any,
    path: None = None,
    *,
    points: str | Sequence[str] | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    max_length: int | None = None,
) -> dict[str, xarray.DataArray]: ...


@overload
def capture(
    model: Model,
    texts: Any,
    path: Path | str,
    *,
    points: str | Sequence[str] | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    max_length: int | None = None,
) -> Run: ...


def capture(
    model: Model,
    texts: Any,
    path: Path | str | None = None,
    *,
    points: str | Sequence[str] | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    max_length: int | None = None,
) -> dict[str, xarray.DataArray] | Run:
    """Return the vectors of `texts` at the capture `points` of every layer, or write them to the folder `path`.

    Args:
        model: A model that `load` returned.
        texts: The texts, in any form that `measure` accepts. They are tokenized as in `measure`.
        path: A new or empty folder, or a folder with an earlier capture; None to return the vectors.
        points: One or more names of `attnmix.core.names.POINTS`; by default the capture points of the pipeline.
        dtype: The dtype of the vectors.
        max_length: The number of tokens to which texts are truncated, with a warning; by default the model's limit.

    Returns:
        If `path` is None, an array for each point, with the dimensions `layer`, `token` and `hidden`. Its coordinates
        are `layer` and the columns of `tokens.parquet` (`attnmix.core.store.texts`), such as `document`, `position` and
        `token`. If `path` is given, the run that is stored in this folder; `open_run(path)` can open the run later. The
        folder contains a Zarr store `[tokens, hidden]` for each layer and point.

    Raises:
        InputError: For invalid texts, an unknown point, a number outside the range of `dtype`, or a folder with other
            contents.

    Example:
        >>> vectors = attnmix.capture(model, ["time flies", "like an arrow"], points=["layer_output"])
        >>> vectors["layer_output"].sizes
        Frozen({'layer': 6, 'token': 9, 'hidden': 384})
        >>> run = attnmix.capture(model, ["time flies", "like an arrow"], "run", points=["layer_output"])
        >>> bool((run.features("layer_output").numpy() == vectors["layer_output"]).all())
        True
    """
    call = "capture(model, texts, path)"
    run = None
    if path is not None:
        run = Run(read_path("path", path, call))
        check_folder("path", run.root, [FEATURES, UNFINISHED])
    check_model(model, call)
    given_points = {}
    if points is not None:
        given_points["points"] = read_names(points)
        check_kinds("points", given_points["points"], POINTS)
    settings = checked_section(CaptureParameters, dtype=dtype, **given_points)
    tokenized = tokenize_texts(model, texts, max_length)
    with model.observed(tokenized.pairs) as base, quiet():
        if run is None:
            return _capture_in_memory(base, tokenized, settings, model.pad_token_id)
        _capture_to_run(base, tokenized, settings, model.pad_token_id, run)
    return run


def _capture_in_memory(
    base: PreTrainedModel, tokenized: TokenizedTexts, settings: CaptureParameters, pad_token_id: int
) -> dict[str, xarray.DataArray]:
    """Return the vectors of the texts as an array `[layer, token, hidden]` for each capture point of the model."""
    from attnmix.runs.capture import captured_vectors

    points = present_names("points", settings.points, family_of(base.config), POINTS)
    ids = [document.ids for document in documents_of(tokenized.texts, tokenized.tokens)]
    vectors = captured_vectors(base, ids, points, settings.dtype, pad_token_id, settings.batch_tokens)
    return labelled_vectors(vectors, tokenized.tokens)


def _capture_to_run(
    base: PreTrainedModel, tokenized: TokenizedTexts, settings: CaptureParameters, pad_token_id: int, run: Run
) -> None:
    """Write the texts and their vectors to the folder of `run`.

    The files of an earlier capture are replaced when the new ones are complete.
    """
    from attnmix.runs.capture import capture_texts

    unfinished = run.root / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    new_run = Run(unfinished / "run")
    tokenized.write(new_run.captured)
    capture_texts(settings, base, pad_token_id, new_run, unfinished / "stores")
    publish_output(new_run.root / FEATURES, run.root / FEATURES)
    shutil.rmtree(unfinished)


def layout(
    vectors: Any,
    *,
    metric: str = UMAP_DEFAULTS.metric,
    n_neighbors: int = UMAP_DEFAULTS.n_neighbors,
    min_dist: float = UMAP_DEFAULTS.min_dist,
    seed: int = UMAP_DEFAULTS.seed,
) -> npt.NDArray[np.float32]:
    """Return the coordinates `[..., 2]` of vectors `[..., hidden]` on one UMAP map, initialised with PCA.

    Equal vectors have equal coordinates. The first call in a process takes seconds, because it loads umap-learn.

    Args:
        vectors: An array, a tensor on any device, a table or list of numbers, or a result of `Run.features`.
        metric: The metric of umap-learn for distances between vectors, such as `cosine`.
        n_neighbors: The number of nearest neighbours of each vector that UMAP uses, including the vector itself.
        min_dist: The approximate distance on the map between the vectors that are closest to each other.
        seed: The random seed.

    Raises:
        InputError: For invalid arguments, for NaN, and for fewer than 20 distinct vectors, which are too few for
            neighbourhoods of UMAP.

    Example:
        >>> attnmix.layout(np.random.default_rng(0).normal(size=(2, 30, 8)), metric="cosine").shape
        (2, 30, 2)
    """
    given = {"metric": metric, "n_neighbors": n_neighbors, "min_dist": min_dist, "seed": seed}
    settings = checked_section(UmapParameters, **given, stability_seeds=[])
    from attnmix.maps.layouts import fit_map
    from attnmix.maps.vectors import distinct_rows, read_vectors

    array = read_vectors(vectors)
    rows = array.reshape(-1, array.shape[-1])
    first_rows, _ = distinct_rows(rows)
    distinct = len(first_rows)
    if distinct < MIN_UMAP_VECTORS:
        problem = f"{len(rows)}, of which {distinct} are distinct"
        advice = "for fewer, use sklearn.decomposition.PCA(2)"
        raise InputError(f"vectors: {problem}; allowed: {MIN_UMAP_VECTORS} or more distinct vectors; {advice}")
    settings.check_neighbours(distinct, "n_neighbors")
    coordinates = fit_map(rows, settings)
    return coordinates.reshape(*array.shape[:-1], 2)
