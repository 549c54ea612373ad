"""Results of a run for programs and notebooks, loaded lazily.

    from attnmix.core.store.runs import open_run

    run = open_run("another/clone")  # open_run() for the current folder
    run.tokens  # document, position, token_id, token: a row for each captured token
    vectors = run.features("layer_output", layers=range(1, 4), document="test/3")
    vectors.shape  # (layers, tokens, hidden); nothing is loaded yet
    vectors.numpy()  # or .torch(), or .xarray(), which loads the values only for computations
    run.table("measure/mixing")  # a csv under reports/plots/
    run.metrics("measure")  # a json file under reports/metrics/
    run.matrix("finetuned", "test/3", "attention")  # [layers, tokens, sources]

Layers are counted from 1; layer 0 is the embedding. If a stage has not run or its file is damaged, an `InputError` with
the name of the stage is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.extras import require_extra
from attnmix.core.names import ACTIVATIONS, LAYOUTS, Site, in_forward_order
from attnmix.core.paths import read_path
from attnmix.core.selections import is_whole_number
from attnmix.core.settings import MIN_UMAP_VECTORS
from attnmix.core.store import features as stored
from attnmix.core.store.files import open_array, read_array, read_json, read_results, read_table, reading
from attnmix.core.store.heads import DIMENSIONS, HEAD_PARTS
from attnmix.core.store.results import Components, MixingTables, components_of, token_coordinates
from attnmix.core.store.texts import TokenizedFiles
from attnmix.core.terminal import shorten

if TYPE_CHECKING:
    import torch
    import xarray

Array = npt.NDArray[Any]
MAX_SHOWN_DOCUMENTS = 5  # maximum number of texts listed in an error message
CSV_PART_ROWS = 100_000


def arrays_folder(kind: str, checkpoint: str, document: str, inspected: Path) -> Path:
    """Return the folder with the `.zarr` arrays of a text and checkpoint.

    `inspected` is the output folder of the stage `inspect`. For the `kind` `contributions`, the folder has one array
    per method; for `heads`, the names of its arrays are keys of `attnmix.core.store.heads.DIMENSIONS`.
    """
    return inspected / kind / checkpoint / document.replace("/", "_")


def open_run(folder: Path | str = ".") -> Run:
    """Return the run in `folder`, a clone of the project; raise `InputError` if it contains no captured vectors."""
    run = Run(read_path("folder", folder, "open_run(folder)"))
    _ = run.sites  # the property raises the error
    return run


class Run(MixingTables):
    """Paths and readers of all files that the stages write in the folder `root`; the files may not exist yet."""

    def __init__(self, root: Path) -> None:
        """Store the paths without accessing the files."""
        self.root = root
        self.reviews = root / "data/reviews"
        self.pretrained = root / "models/pretrained"
        # If `model.base` is set, it is the checkpoint `pretrained`; `model.name` is then stored in a folder within it.
        self.named_model = self.pretrained / "own"
        self.finetuned = root / "models/finetuned"
        self.checkpoints = {"pretrained": self.pretrained, "finetuned": self.finetuned}
        self.test_predictions_file = root / "features/finetune/test.parquet"
        self.captured = TokenizedFiles(root / "features/tokenize/captured")
        self.drawn_reviews = TokenizedFiles(root / "features/tokenize/reviews")
        self.activations = root / ACTIVATIONS
        self.measured = root / "features/measure"
        self.maps = root / "features/reduce"
        self.inspected = root / "features/inspect"
        self.token_scores_file = self.inspected / "token_scores.parquet"
        self.predictions_file = self.inspected / "predictions.parquet"
        self.metrics_folder = root / "reports/metrics"
        self.tables = root / "reports/plots"
        self.figures = root / "reports/figures"
        self.page = root / "reports/index.html"

    @property
    def initial(self) -> Path:
        """The initial checkpoint of fine-tuning, specified by `model.name`."""
        if self.named_model.is_dir():
            return self.named_model
        return self.pretrained

    @property
    def documents(self) -> pd.DataFrame:
        """A table with one row per captured text, without the column `text`; see `attnmix.core.store.texts`."""
        return self.captured.documents

    @property
    def texts(self) -> dict[str, str]:
        """The captured texts by document name."""
        return self.captured.texts

    @property
    def tokens(self) -> pd.DataFrame:
        """The captured tokens, in the row order of the stores; `attnmix.core.store.texts` documents the columns."""
        return self.captured.tokens

    def check_capture(self) -> None:
        """Raise `InputError` if the captured vectors belong to other texts than those that `tokenize` wrote last."""
        captured = read_table(self.activations / stored.TOKENS_FILE, "capture", columns=["document", "token_id"])
        if not captured.equals(self.tokens[["document", "token_id"]].astype(captured.dtypes)):
            raise InputError(
                f"{self.activations} contains the vectors of other texts than {self.captured.folder}; rerun the stage "
                "capture"
            )

    @cached_property
    def sites(self) -> list[Site]:
        """The captured sites (layers and points), in forward order."""
        return stored.stored_sites(self.activations)

    def width(self, site: Site) -> int:
        """Return the dimension of the vectors at `site`."""
        return int(stored.open_store(self.activations, site).shape[1])

    def rows(self, document: str | None = None) -> slice:
        """Return the rows of a text (the same rows in all stores), or all rows if `document` is None.

        Raise `InputError` for a text that was not captured.
        """
        if document is None:
            return slice(0, len(self.tokens))
        rows = np.flatnonzero(self.tokens["document"] == document)
        if not len(rows):
            names = self.tokens["document"].unique()
            shown = list(names[:MAX_SHOWN_DOCUMENTS])
            if len(names) > MAX_SHOWN_DOCUMENTS:
                shown.append("...")
            raise InputError(
                f"{shorten(document)!r} was not captured in {self.activations}; captured: {', '.join(shown)}"
            )
        return slice(int(rows[0]), int(rows[-1]) + 1)  # the rows of a text are consecutive

    def read(self, site: Site, rows: npt.NDArray[np.int64]) -> Array:
        """Return the vectors `[rows, width]` of the sorted `rows`, in the store's dtype."""
        return stored.read_rows(self.activations, site, rows)

    def features(self, point: str, layers: Iterable[int] | int | None = None, document: str | None = None) -> Features:
        """Return the vectors of one capture point, by default in all captured layers and for all texts.

        Raise `InputError` for a point, layer or text that was not captured.
        """
        sites = self._select_sites(point, layers)
        rows = self.rows(document)
        first = stored.open_store(self.activations, sites[0])
        shape = (len(sites), rows.stop - rows.start, first.shape[1])
        return Features(self, sites, rows, shape, first.dtype)

    def _select_sites(self, point: str, layers: Iterable[int] | int | None) -> list[Site]:
        """Return the sites of one capture point in the given layers, or in all captured layers if `layers` is None.

        Raise `InputError` for a point or layer that was not captured.
        """
        captured_layers = [site.layer for site in self.sites if site.point == point]
        if not captured_layers:
            points = ", ".join(dict.fromkeys(site.point for site in self.sites))
            raise InputError(f"{shorten(point)!r} was not captured in {self.activations}; captured: {points}")
        if layers is None:
            layers = captured_layers
        layers = list(layers) if isinstance(layers, Iterable) else [layers]
        wrong = [str(layer) for layer in layers if not is_whole_number(layer) or layer not in captured_layers]
        if wrong or not layers:
            captured = ", ".join(map(str, captured_layers))
            raise InputError(f"layers: {', '.join(wrong) or 'none'}; allowed for {point}: {captured}")
        return [Site(layer, point) for layer in layers]

    def metrics(self, stage: str) -> dict[str, Any]:
        """Return the metrics of a stage."""
        return read_json(self.metrics_folder / f"{stage}.json", stage)

    def table(self, name: str, **options: Any) -> pd.DataFrame:
        """Return a csv table by its `name`, `<stage>/<table>`; `options` are those of `read_results`."""
        stage, _, _ = name.partition("/")
        with reading(self.tables / f"{name}.csv", stage) as file:
            table: pd.DataFrame = read_results(file, **options)
            return table

    def table_rows(self, name: str, values: Mapping[str, object]) -> pd.DataFrame:
        """Return the rows of the table `name` that have the value `values[column]` in each `column` of `values`.

        The table is read in parts, to limit memory usage.
        """
        columns = list(values)
        wanted = pd.Series(values)
        parts: Any = self.table(name, chunksize=CSV_PART_ROWS)
        selected: list[pd.DataFrame] = []
        for part in parts:
            is_equal = part[columns] == wanted
            selected.append(part[is_equal.all(axis=1)])
        rows: pd.DataFrame = pd.concat(selected)
        return rows

    def ratios(self, **options: Any) -> pd.DataFrame:
        """Return the mixing ratios of every token in the texts that the stage `measure` uses for statistics.

        Columns: checkpoint, document, position, layer (1..L), a column per ratio, token, word, token_class. `word` is
        the index of a word in its text, from 0, and missing for special tokens. `options` are those of
        `pandas.read_parquet`; rows excluded by `filters` are not loaded into memory.
        """
        return _read_ratios(self.measured, "measure", **options)

    def captured_ratios(self, documents: Sequence[str]) -> pd.DataFrame:
        """Return the ratios of captured `documents`, with the columns of `ratios`."""
        return _read_ratios(self.inspected, "inspect", filters=[("document", "in", list(documents))])

    def matrix(self, checkpoint: str, document: str, method: str) -> npt.NDArray[Any]:
        """Return the matrices `[layers, tokens, sources]` of `method`; unreliable rows of `value_zeroing` are NaN."""
        folder = arrays_folder("contributions", checkpoint, document, self.inspected)
        return _read_array(folder / f"{method}.zarr")

    def matrices(self, checkpoint: str, document: str) -> list[str]:
        """Return the names of the available contribution matrices for a text and a checkpoint, in arbitrary order."""
        folder = arrays_folder("contributions", checkpoint, document, self.inspected)
        return [path.stem for path in folder.glob("*.zarr")]

    def heads(self, checkpoint: str, document: str) -> dict[str, npt.NDArray[Any]]:
        """Return the stored arrays of a text's attention heads by name; empty if there are none for the checkpoint.

        Every text with stored heads has the arrays in `HEAD_PARTS`; only short texts have further arrays.
        """
        folder = arrays_folder("heads", checkpoint, document, self.inspected)
        if not any(folder.glob("*.zarr")):
            return {}
        parts = {}
        for name in DIMENSIONS:
            path = folder / f"{name}.zarr"
            if name in HEAD_PARTS or path.is_dir():
                parts[name] = _read_array(path)
        return parts

    @property
    def token_scores(self) -> pd.DataFrame:
        """A table with `document, position, method, score`; the score is NaN for tokens not scored by the method."""
        return read_table(self.token_scores_file, "inspect")

    @property
    def predictions(self) -> pd.DataFrame:
        """A table with `document, predicted, probability, read_position` of the captured texts."""
        return read_table(self.predictions_file, "inspect")

    @property
    def min_umap_tokens(self) -> int:
        """The minimum number of tokens for UMAP."""
        return MIN_UMAP_VECTORS

    @property
    def layouts(self) -> list[str]:
        """The layouts written by `reduce`, in the order of `LAYOUTS`."""
        return [layout for layout in LAYOUTS if (self.maps / f"{layout}.parquet").is_file()]

    def map(self, layout: str) -> pd.DataFrame:
        """Return a table of `document, position, layer, point` and the coordinates `x, y` in one layout."""
        return read_table(self.maps / f"{layout}.parquet", "reduce")

    @property
    def components(self) -> dict[Site, Components]:
        """The principal components of each site in the layout `pca`; the maps of all sites have the same extent."""
        keys = ["document", "position"]  # identify a token
        stored_tokens = pd.MultiIndex.from_frame(self.tokens[keys])
        table = self.map("pca")  # one row per site and mapped token
        table_by_site = table.groupby(["layer", "point"])
        components = {}
        for site in map_sites(table):
            places = table_by_site.get_group((site.layer, site.point))
            mapped_tokens = pd.MultiIndex.from_frame(places[keys])
            rows = stored_tokens.get_indexer(mapped_tokens)  # the row of each mapped token in the store
            vectors = self.read(site, rows)
            xy = places[["x", "y"]].to_numpy()
            components_of_site = components_of(vectors, xy)
            if components_of_site:
                components[site] = components_of_site
        return components

    @property
    def map_quality(self) -> pd.DataFrame:
        """A table with `layout, layer, point, measure, value, chance`; rows without a point refer to a whole layout."""
        return read_table(self.maps / "quality.parquet", "reduce")

    @property
    def nearest(self) -> pd.DataFrame:
        """A table with `document, position, layer, point, nearest`; `nearest` is a list of row indices of `tokens`."""
        return read_table(self.maps / "nearest.parquet", "reduce")


def _read_array(path: Path) -> npt.NDArray[Any]:
    """Return an array written by the stage `inspect`."""
    return read_array(open_array(path, "inspect"), path, "inspect")


def _read_ratios(folder: Path, stage: str, **options: Any) -> pd.DataFrame:
    """Return the table that `stage` wrote, with the mixing ratios of each token."""
    table = read_table(folder / "tokens.parquet", stage, **options)
    if "word" in table:
        table = table.astype({"word": "Int32"})
    return table


def map_sites(table: pd.DataFrame) -> list[Site]:
    """Return the sites of a map, in forward order."""
    pairs = table[["layer", "point"]].drop_duplicates()
    sites = [Site(int(layer), str(point)) for layer, point in pairs.itertuples(index=False)]
    return in_forward_order(sites)


def row_shares(matrices: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return contributions `[..., tokens, sources]` as shares of their row sums; NaN in rows without contributions."""
    rows = np.asarray(matrices, dtype=np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(rows / rows.sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Features:
    """Vectors `[layers, tokens, hidden]` of one capture point, loaded by `numpy` and `torch`, or lazily by `xarray`."""

    run: Run
    sites: list[Site]
    rows: slice
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]

    def numpy(self) -> Array:
        """Return all vectors as an array `[layers, tokens, hidden]` in memory."""
        vectors = np.empty(self.shape, self.dtype)
        for part, site in zip(vectors, self.sites, strict=True):
            part[:] = stored.read_features(self.run.activations, site, self.rows)
        return vectors

    def torch(self) -> torch.Tensor:
        """Return all vectors as a tensor `[layers, tokens, hidden]` on the CPU."""
        import torch

        return torch.from_numpy(self.numpy())

    def xarray(self) -> xarray.DataArray:
        """Return a `DataArray` backed by dask, with one block per file.

        The coordinates are the layers and the columns of `tokens`.
        """
        require_extra("dask", "Features.xarray()")
        import xarray
        from dask import array

        def read_block(site: Site, block_info: Any) -> Array:
            """Return the rows `[rows, hidden]` of one block; dask passes the block's location in `block_info[None]`."""
            row_range, _ = block_info[None]["array-location"]
            return stored.read_features(self.run.activations, site, slice(*row_range))

        store = stored.open_store(self.run.activations, self.sites[0])  # all stores of a point have the same shape
        chunks = array.core.normalize_chunks(store.shards or store.chunks, store.shape)
        meta = np.empty((0, 0), self.dtype)  # tells dask the dtype and the number of dimensions
        layers = []
        for site in self.sites:
            all_rows = array.map_blocks(partial(read_block, site), chunks=chunks, meta=meta)
            layers.append(all_rows[self.rows])
        coordinates = token_coordinates(self.run.tokens.iloc[self.rows])
        coordinates["layer"] = [site.layer for site in self.sites]
        dimensions = ("layer", "token", "hidden")
        return xarray.DataArray(array.stack(layers), coordinates, dimensions, name=self.sites[0].point)
