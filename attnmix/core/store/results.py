"""Results of measured texts for the page and the figures, from the files of a run or from memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import INPUT_PARTS, STEP_MEASURES, Site, in_forward_order
from attnmix.core.settings import MIN_TYPED_UMAP_TOKENS

if TYPE_CHECKING:
    import xarray

Array = npt.NDArray[Any]
COMPONENTS_TOLERANCE = 1e-3  # tolerance for recomputed components, relative to the largest component
PICTURE_MATRICES = (INPUT_PARTS, "alti")
"""Matrices in the picture of a page: contributions of the input tokens, and weights of the lines between layers."""
SCORE_COLUMNS = ["document", "position", "method", "score"]


class Components(NamedTuple):
    """Two principal components that are displayed as map coordinates."""

    scale: float
    """Ratio of a vector's component to its coordinate on the map."""
    shares: tuple[float, float]
    """Share of the variance of the vectors along each component."""


class Results(Protocol):
    """The interface of results for a page: `attnmix.core.store.runs.Run` (files) or `TextResults` (memory)."""

    @property
    def documents(self) -> pd.DataFrame:
        """A table with one row per text; `attnmix.core.store.texts` documents the columns."""

    @property
    def texts(self) -> dict[str, str]:
        """The captured texts by document name."""

    @property
    def tokens(self) -> pd.DataFrame:
        """A table with one row per captured token; `attnmix.core.store.texts` documents the columns."""

    @property
    def predictions(self) -> pd.DataFrame:
        """A table with `document, predicted, probability, read_position` of captured texts; empty without a classifier.

        `read_position` is the position of the final vector that the classifier reads, or -1 if the classifier reads
        several vectors.
        """

    @property
    def token_scores(self) -> pd.DataFrame:
        """A table with `document, position, method, score`."""

    @property
    def layouts(self) -> list[str]:
        """The names of the available layouts."""

    @property
    def min_umap_tokens(self) -> int:
        """The minimum number of tokens for UMAP."""

    @property
    def map_quality(self) -> pd.DataFrame:
        """A table with `layout, layer, point, measure, value, chance`."""

    @property
    def nearest(self) -> pd.DataFrame:
        """A table with `document, position, layer, point, nearest`; `nearest` is a list of row indices of `tokens`."""

    @property
    def mixing(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The mean ratios of each checkpoint, and the differences between the checkpoints."""

    @property
    def steps(self) -> pd.DataFrame:
        """A table of the measures of vectors after each step of a layer; the column `step` contains the step's name."""

    def metrics(self, stage: str) -> dict[str, Any]:
        """Return the metrics of a stage."""

    def table(self, name: str, **options: Any) -> pd.DataFrame:
        """Return a table by its `name`, `<stage>/<table>`; `options` are those of `pandas.read_csv`."""

    def captured_ratios(self, documents: Sequence[str]) -> pd.DataFrame:
        """Return the ratios of all tokens of `documents`.

        Columns: checkpoint, document, layer, position, and one column per method.
        """

    def matrices(self, checkpoint: str, document: str) -> list[str]:
        """Return the names of the available contribution matrices for a text and a checkpoint."""

    def matrix(self, checkpoint: str, document: str, method: str) -> Array:
        """Return the contribution matrices `[layers, tokens, sources]` of `method` for a text and a checkpoint."""

    def heads(self, checkpoint: str, document: str) -> dict[str, Array]:
        """Return the arrays of a text's attention heads by name; empty if there are none."""

    def map(self, layout: str) -> pd.DataFrame:
        """Return a table of `document, position, layer, point` and the coordinates `x, y` in one layout."""

    @property
    def components(self) -> dict[Site, Components]:
        """The principal components of each site in the layout `pca`; the maps of all sites have the same extent."""


class MixingTables:
    """Base class of `Run` (result files) and `TextResults` (memory), with properties derived from `table`."""

    def table(self, name: str, **options: Any) -> pd.DataFrame:
        """Return a table by its `name`, `<stage>/<table>`."""
        raise NotImplementedError

    @property
    def mixing(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The mean ratios of each checkpoint, and the differences between the checkpoints."""
        table = self.table("measure/mixing")
        is_difference = table["checkpoint"] == "difference"
        return table[~is_difference], table[is_difference]

    @property
    def steps(self) -> pd.DataFrame:
        """A table of the measures of vectors after each step of a layer; the column `step` contains the step's name."""
        table = self.table("measure/geometry")
        step_rows = table[table["measure"].isin(STEP_MEASURES)]
        return step_rows.rename(columns={"point": "step"})


@dataclass
class TextResults(MixingTables):
    """Results as plain data in memory, instead of in the files of a run."""

    documents: pd.DataFrame
    tokens: pd.DataFrame
    computed_on: str
    """The device and the arithmetic, as in the metrics of `measure`."""
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    """The tables by name; a name has the form `<stage>/<table>`."""
    ratios: pd.DataFrame = field(default_factory=pd.DataFrame)
    matrices_by_text: dict[tuple[str, str], dict[str, Array]] = field(default_factory=dict)
    """Matrices by checkpoint and text, then by method."""
    heads_by_text: dict[tuple[str, str], dict[str, Array]] = field(default_factory=dict)
    maps: dict[str, pd.DataFrame] = field(default_factory=dict)
    map_quality: pd.DataFrame = field(default_factory=pd.DataFrame)
    components: dict[Site, Components] = field(default_factory=dict)
    nearest: pd.DataFrame = field(default_factory=pd.DataFrame)
    predictions: pd.DataFrame = field(default_factory=pd.DataFrame)
    model_names: tuple[str, ...] | None = None
    """The display names of two compared models; None for one model before and after fine-tuning."""
    detailed_documents: Sequence[str] = ()
    """Names of the texts with own shares and exact contributions of the input tokens; empty if all texts have both."""
    token_scores: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=SCORE_COLUMNS))

    def without_heads(self) -> TextResults:
        """Return a copy without the arrays of attention heads, and with fewer matrices.

        Of the matrices of a text, only `PICTURE_MATRICES` are kept, or all matrices if the text has none of them.
        """
        kept_matrices = {}
        for key, matrices in self.matrices_by_text.items():
            picture_matrices = {name: matrix for name, matrix in matrices.items() if name in PICTURE_MATRICES}
            kept_matrices[key] = picture_matrices or matrices
        return replace(self, heads_by_text={}, matrices_by_text=kept_matrices)

    @property
    def texts(self) -> dict[str, str]:
        """The texts by document name."""
        return dict(zip(self.documents["document"], self.documents["text"], strict=True))

    @property
    def layouts(self) -> list[str]:
        """The names of the available layouts."""
        return list(self.maps)

    @property
    def min_umap_tokens(self) -> int:
        """The minimum number of tokens for UMAP."""
        return MIN_TYPED_UMAP_TOKENS

    def metrics(self, stage: str) -> dict[str, Any]:
        """Return the metrics of a stage: for every stage, only `computed_on`."""
        return {"computed_on": self.computed_on}

    def table(self, name: str, **_options: Any) -> pd.DataFrame:
        """Return a table by its `name`, `<stage>/<table>`."""
        return self.tables[name]

    def captured_ratios(self, documents: Sequence[str]) -> pd.DataFrame:
        """Return the ratios of the tokens of `documents`."""
        return self.ratios[self.ratios["document"].isin(documents)]

    def matrices(self, checkpoint: str, document: str) -> list[str]:
        """Return the names of the available contribution matrices for a text and a checkpoint."""
        return list(self.matrices_by_text.get((checkpoint, document), {}))

    def matrix(self, checkpoint: str, document: str, method: str) -> Array:
        """Return the contribution matrices `[layers, tokens, sources]` of `method` for a text and a checkpoint."""
        return self.matrices_by_text[checkpoint, document][method]

    def heads(self, checkpoint: str, document: str) -> dict[str, Array]:
        """Return the arrays of a text's attention heads by name; empty if there are none."""
        return self.heads_by_text.get((checkpoint, document), {})

    def map(self, layout: str) -> pd.DataFrame:
        """Return a table of `document, position, layer, point` and the coordinates `x, y` in one layout."""
        return self.maps[layout]


def components_of(vectors: Array, places: Array) -> Components | None:
    """Return the scale of a map of N vectors, and the share of the vectors' variance along each of its two axes.

    `vectors` has shape `[N, D]`, and `places` contains the coordinates of the vectors on the map, `[N, 2]`. Multiplied
    by the scale, the coordinates are principal components of the vectors. Return None if all first coordinates are 0,
    or if they are not principal components, because the metric of the map transforms the vectors first (cosine, for
    example, scales them to length 1).
    """
    centred_ND = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
    places_N2 = places.astype(np.float64)
    squares_2 = np.square(places_N2).sum(axis=0)  # |p|^2 for each of the two axes of the map
    if not squares_2[0] > 0:
        return None
    # X are the centred vectors, v is a principal direction with X'Xv = bv, and the coordinates along v are p = sXv with
    # an unknown factor s. Then |p|^2 = s^2 b and |X'p| = s b. Hence the eigenvalue is b = |X'p|^2 / |p|^2, and the
    # scale of the map is 1 / s = |X'p| / |p|^2.
    products_D2 = centred_ND.T @ places_N2
    lengths_2 = np.linalg.norm(products_D2, axis=0)  # |X'p|
    eigenvalues_2 = np.divide(lengths_2**2, squares_2, out=np.zeros(2), where=squares_2 > 0)
    scale = lengths_2[0] / squares_2[0]
    if not _is_principal_component(centred_ND, places_N2[:, 0], lengths_2[0], scale):
        return None
    total_square = np.square(centred_ND).sum()
    first_share, second_share = (eigenvalues_2 / total_square).tolist()
    return Components(float(scale), (first_share, second_share))


def _is_principal_component(centred_ND: Array, places_N: Array, length: float, scale: float) -> bool:
    """Return True if the coordinates p = `places_N`, multiplied by `scale`, are the principal component Xv.

    X are the centred vectors, and v = X'p / |X'p| with |X'p| = `length`.
    """
    direction_D = centred_ND.T @ places_N / length
    component_N = centred_ND @ direction_D
    tolerance = COMPONENTS_TOLERANCE * np.abs(component_N).max()
    return np.allclose(component_N, scale * places_N, rtol=0, atol=tolerance)


class PointVectors(NamedTuple):
    """The vectors of one capture point in all captured layers."""

    layers: list[int]
    array: Array
    """`[layers, tokens, width]`."""


def allocate_vectors(widths: Mapping[Site, int], tokens: int, dtype: str) -> dict[str, PointVectors]:
    """Return one uninitialised array per capture point; `widths` maps each site to the width of its vectors."""
    layers_by_point: dict[str, list[int]] = defaultdict(list)
    for site in widths:
        layers_by_point[site.point].append(site.layer)
    vectors = {}
    for point, layers in layers_by_point.items():
        width = widths[Site(layers[0], point)]
        array = np.empty((len(layers), tokens, width), dtype)
        vectors[point] = PointVectors(layers, array)
    return vectors


def by_site(vectors: Mapping[str, PointVectors]) -> dict[Site, Array]:
    """Return views `[tokens, width]` of the vectors by site, in the order of the forward pass."""
    views = {}
    for point, point_vectors in vectors.items():
        for layer, view in zip(point_vectors.layers, point_vectors.array, strict=True):
            views[Site(layer, point)] = view
    return {site: views[site] for site in in_forward_order(views)}


def token_coordinates(tokens: pd.DataFrame) -> dict[str, Any]:
    """Return the columns of a table of tokens as coordinates of the dimension `token` of an xarray object."""
    return {str(name): ("token", tokens[name].to_numpy()) for name in tokens}


def labelled_vectors(vectors: Mapping[str, PointVectors], tokens: pd.DataFrame) -> dict[str, xarray.DataArray]:
    """Return the vectors `[layer, token, hidden]` by capture point, with the columns of `tokens` as coordinates."""
    import xarray

    labelled = {}
    for point, (layers, array) in vectors.items():
        coordinates = token_coordinates(tokens)
        coordinates["layer"] = layers
        labelled[point] = xarray.DataArray(array, coordinates, ("layer", "token", "hidden"), name=point)
    return labelled
