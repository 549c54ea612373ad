"""A run's results, for a program or a notebook; everything is read when it is asked for.

    from attnmix.core.store.runs import open_run

    run = open_run("another/clone")  # open_run() for the current folder
    run.tokens  # document, position, token_id, token: a row for each captured token
    vectors = run.features("layer_output", layers=range(1, 4), document="test/3")
    vectors.shape  # (layers, tokens, hidden); nothing is read yet
    vectors.numpy()  # or .torch(), or .xarray(), which still reads nothing until it is computed with
    run.table("measure/mixing")  # a csv under reports/plots/
    run.metrics("measure")  # a json file under reports/metrics/
    run.matrix("finetuned", "test/3", "attention")  # [layers, tokens, sources]

Layers are counted from 1; level 0 is the embedding. Where a stage has not run, or a file is damaged, every reader
raises an `InputError` that names the stage.
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
from attnmix.core.settings import MIN_UMAP_VECTORS
from attnmix.core.store import features as stored
from attnmix.core.store.files import open_array, read_array, read_json, read_results, read_table, reading
from attnmix.core.store.heads import DIMENSIONS, HEAD_PARTS
from attnmix.core.store.results import Components, MixingTables, components_of
from attnmix.core.store.texts import TokenizedFiles
from attnmix.core.terminal import shorten

if TYPE_CHECKING:
    import torch
    import xarray

Array = npt.NDArray[Any]
MAX_SHOWN_DOCUMENTS = 5  # documents in an error
CSV_PART_ROWS = 100_000


def arrays_folder(kind: str, checkpoint: str, document: str, inspected: Path) -> Path:
    """Return the folder of a document's arrays in one checkpoint, each a `.zarr`.

    `contributions` holds one for each method, `heads` one for each of `attnmix.core.store.heads.DIMENSIONS`.
    """
    return inspected / kind / checkpoint / document.replace("/", "_")


def open_run(folder: Path | str = ".") -> Run:
    """Return the run in `folder`, a clone of the project; raise `InputError` where `capture` left no vectors in it."""
    run = Run(read_path("folder", folder, "open_run(folder)"))
    _ = run.sites
    return run


class Run(MixingTables):
    """Everything that the stages read and write below the folder `root`, which need not be there yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reviews = root / "data/reviews"
        self.pretrained = root / "models/pretrained"
        self.named_model = self.pretrained / "own"  # model.name, where model.base is the pretrained checkpoint
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
        """The checkpoint that fine-tuning starts from: that of `model.name`."""
        return self.named_model if self.named_model.is_dir() else self.pretrained

    @property
    def documents(self) -> pd.DataFrame:
        """A row for each captured text, without the text; `attnmix.core.store.texts` names the columns."""
        return self.captured.documents

    @property
    def texts(self) -> dict[str, str]:
        """The captured texts by document."""
        return self.captured.texts

    @property
    def tokens(self) -> pd.DataFrame:
        """The captured tokens, a row for each row of a store; `attnmix.core.store.texts` names the columns."""
        return self.captured.tokens

    @cached_property
    def sites(self) -> list[Site]:
        """The layers and points that were captured, in forward order."""
        return stored.stored_sites(self.activations)

    def width(self, site: Site) -> int:
        """Return the length of a vector at `site`."""
        return int(stored.open_store(self.activations, site).shape[1])

    def rows(self, document: str | None = None) -> slice:
        """Return a document's rows in every store; all of them without a name."""
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
        return slice(int(rows[0]), int(rows[-1]) + 1)

    def read(self, site: Site, rows: npt.NDArray[np.int64]) -> Array:
        """Return the vectors `[rows, width]` of the sorted `rows`, in the store's dtype."""
        return stored.read_rows(self.activations, site, rows)

    def features(self, point: str, layers: Iterable[int] | None = None, document: str | None = None) -> Features:
        """Return the vectors of one point, in all layers that have it or in `layers`, of one document or of all."""
        captured_layers = [site.layer for site in self.sites if site.point == point]
        if not captured_layers:
            points = ", ".join(dict.fromkeys(site.point for site in self.sites))
            raise InputError(f"{shorten(point)!r} was not captured in {self.activations}; captured: {points}")
        layers = captured_layers if layers is None else list(layers)
        wrong = [str(layer) for layer in layers if layer not in captured_layers]
        if wrong or not layers:
            captured = ", ".join(map(str, captured_layers))
            raise InputError(f"layers: {', '.join(wrong) or 'none'}; {point} was captured in {captured}")
        sites = [Site(layer, point) for layer in layers]
        rows = self.rows(document)
        first = stored.open_store(self.activations, sites[0])
        shape = (len(sites), rows.stop - rows.start, first.shape[1])
        return Features(self, sites, rows, shape, first.dtype)

    def metrics(self, stage: str) -> dict[str, Any]:
        """Return the metrics of a stage."""
        return read_json(self.metrics_folder / f"{stage}.json", stage)

    def table(self, name: str, **options: Any) -> pd.DataFrame:
        """Return a csv by its `name`, `<stage>/<table>`, as `read_results` does, with its `options`."""
        stage, _, _ = name.partition("/")
        with reading(self.tables / f"{name}.csv", stage) as file:
            table: pd.DataFrame = read_results(file, **options)
            return table

    def table_rows(self, name: str, values: Mapping[str, object]) -> pd.DataFrame:
        """Return the rows of `table` with these `values` by column, holding a part of the file in memory at a time."""
        parts: Any = self.table(name, chunksize=CSV_PART_ROWS)
        rows: pd.DataFrame = pd.concat(part[(part[list(values)] == pd.Series(values)).all(axis=1)] for part in parts)
        return rows

    def ratios(self, **options: Any) -> pd.DataFrame:
        """Return the ratios of every token of the reviews in the statistics.

        Columns: checkpoint, document, position, layer (1..L), the methods, token, word, token_class. `word` numbers the
        words of a document from 0 on and is missing for special tokens. `options` are those of `pandas.read_parquet`;
        rows that its `filters` leave out are not held in memory.
        """
        return _read_ratios(self.measured, "measure", **options)

    def captured_ratios(self, documents: Sequence[str]) -> pd.DataFrame:
        """Return the ratios of captured `documents`, in the columns of `ratios`."""
        return _read_ratios(self.inspected, "inspect", filters=[("document", "in", list(documents))])

    def matrix(self, checkpoint: str, document: str, method: str) -> npt.NDArray[Any]:
        """Return one method's matrices `[layers, tokens, sources]`; NaN rows of `value_zeroing` show no structure."""
        return _read_array(arrays_folder("contributions", checkpoint, document, self.inspected) / f"{method}.zarr")

    def matrices(self, checkpoint: str, document: str) -> list[str]:
        """Return the methods that have matrices, in no order."""
        return [
            path.stem for path in arrays_folder("contributions", checkpoint, document, self.inspected).glob("*.zarr")
        ]

    def heads(self, checkpoint: str, document: str) -> dict[str, npt.NDArray[Any]]:
        """Return the stored parts of a document's heads; none where the checkpoint was not measured or lacks them."""
        folder = arrays_folder("heads", checkpoint, document, self.inspected)
        names = [name for name in DIMENSIONS if name in HEAD_PARTS or (folder / f"{name}.zarr").is_dir()]
        return {name: _read_array(folder / f"{name}.zarr") for name in names} if any(folder.glob("*.zarr")) else {}

    @property
    def token_scores(self) -> pd.DataFrame:
        """`document, position, method, score`; the score is NaN for a token that the method does not score."""
        return read_table(self.token_scores_file, "inspect")

    @property
    def predictions(self) -> pd.DataFrame:
        """`document, predicted, probability, read_position` of the captured texts."""
        return read_table(self.predictions_file, "inspect")

    @property
    def min_umap_tokens(self) -> int:
        """The number of tokens below which there is no UMAP."""
        return MIN_UMAP_VECTORS

    @property
    def layouts(self) -> list[str]:
        """The layouts that `reduce` wrote, in the order of `LAYOUTS`."""
        return [layout for layout in LAYOUTS if (self.maps / f"{layout}.parquet").is_file()]

    def map(self, layout: str) -> pd.DataFrame:
        """Return `document, position, layer, point, x, y` of one layout."""
        return read_table(self.maps / f"{layout}.parquet", "reduce")

    @property
    def components(self) -> dict[Site, Components]:
        """The principal components that the layout `pca` shows: of every site, fitted into one extent."""
        keys = ["document", "position"]
        row_of_token = pd.MultiIndex.from_frame(self.tokens[keys])
        components = {}
        places = self.map("pca")
        by_site = places.groupby(["layer", "point"])
        for site in map_sites(places):
            table = by_site.get_group((site.layer, site.point))
            rows = row_of_token.get_indexer(pd.MultiIndex.from_frame(table[keys]))
            known = components_of(self.read(site, rows), table[["x", "y"]].to_numpy())
            if known:
                components[site] = known
        return components

    @property
    def map_quality(self) -> pd.DataFrame:
        """`layout, layer, point, measure, value, chance`; a row without layer and point is the whole layout's."""
        return read_table(self.maps / "quality.parquet", "reduce")

    @property
    def nearest(self) -> pd.DataFrame:
        """`document, position, layer, point, nearest`: lists of row numbers of `tokens`."""
        return read_table(self.maps / "nearest.parquet", "reduce")


def _read_array(path: Path) -> npt.NDArray[Any]:
    return read_array(open_array(path, "inspect"), path, "inspect")


def _read_ratios(folder: Path, stage: str, **options: Any) -> pd.DataFrame:
    table = read_table(folder / "tokens.parquet", stage, **options)
    return table.astype({"word": "Int32"}) if "word" in table else table


def map_sites(table: pd.DataFrame) -> list[Site]:
    """Return the sites of a map, in forward order."""
    pairs = table[["layer", "point"]].drop_duplicates()
    return in_forward_order(Site(int(layer), str(point)) for layer, point in pairs.itertuples(index=False))


def row_shares(matrices: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return every contribution `[..., tokens, sources]` as a share of its row's sum; NaN in a row without any."""
    rows = np.asarray(matrices, dtype=np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(rows / rows.sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Features:
    """Vectors `[layers, tokens, hidden]` that are read when they are asked for."""

    run: Run
    sites: list[Site]
    rows: slice
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]

    def numpy(self) -> Array:
        """Return all of them in memory."""
        vectors = np.empty(self.shape, self.dtype)
        for part, site in zip(vectors, self.sites, strict=True):
            part[:] = stored.read_features(self.run.activations, site, self.rows)
        return vectors

    def torch(self) -> torch.Tensor:
        """Return all of them in memory, on the CPU."""
        import torch

        return torch.from_numpy(self.numpy())

    def xarray(self) -> xarray.DataArray:
        """Return a `dask` array of the stores' chunks, labelled by layer, document, position and token."""
        require_extra("dask", "features as an xarray")
        import xarray
        from dask import array

        def read(site: Site, block_info: Any) -> Array:
            (start, stop), _ = block_info[None]["array-location"]
            return stored.read_features(self.run.activations, site, slice(start, stop))

        store = stored.open_store(self.run.activations, self.sites[0])
        chunks = array.core.normalize_chunks(store.chunks, store.shape)
        meta = np.empty((0, 0), self.dtype)
        layers = []
        for site in self.sites:
            whole = array.map_blocks(partial(read, site), chunks=chunks, meta=meta)
            layers.append(whole[self.rows])
        tokens = self.run.tokens.iloc[self.rows]
        labels: dict[str, Any] = {str(name): ("token", tokens[name].to_numpy()) for name in tokens}
        labels["layer"] = "layer", [site.layer for site in self.sites]
        return xarray.DataArray(array.stack(layers), labels, ("layer", "token", "hidden"), name=self.sites[0].point)
