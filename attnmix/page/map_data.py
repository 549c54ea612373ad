"""The maps of the page: coordinates of tokens in each layout, and nearest neighbours in the full space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import ONE_PLANE, Site
from attnmix.core.store.results import Components
from attnmix.page.arrays import MISSING_CODE, encode, quantise
from attnmix.page.shape import Data
from attnmix.page.token_arrays import arrange_by_token, find_sites, find_tokens

MAP_MARGIN = 1.08  # length of a map's axes, in multiples of the points' extent
MIN_EXTENT = 1e-3  # minimum extent of the points, in units of the map


def encode_map(
    layout: str,
    table: pd.DataFrame,
    tokens: pd.DataFrame,
    sites: Sequence[Site],
    components: Mapping[Site, Components],
) -> Data:
    """Return the encoded coordinates of the page's tokens in one layout.

    Args:
        layout: The name of the layout.
        table: The coordinates of the layout, with one row per token and site.
        tokens: The tokens of the page.
        sites: The capture points and their layers.
        components: The principal components by site, for the layout `pca`.

    Returns:
        `x` and `y` `[sites, tokens]`, as fractions of the side of a square around the points, and `absent`, the indices
        of the sites without a map.
    """
    site_N = find_sites(table, sites)  # the index of each row's site
    xy_2ST = arrange_by_token(table, tokens, site_N, len(sites), ["x", "y"])
    xy = np.moveaxis(xy_2ST, 0, -1)  # [sites, tokens, 2]
    if layout == "pca":
        # The stored coordinates have the same extent at all sites; these factors restore the principal components.
        scales = [components[site].scale if site in components else 1.0 for site in sites]
        xy *= np.array(scales)[:, None, None]
    limits = _find_map_limits(layout, xy, sites, components)  # [sites or 1, 2 axes, lower and upper]
    low = limits[:, None, :, 0]  # [sites or 1, 1, 2 axes]
    high = limits[:, None, :, 1]
    fractions = (xy - low) / (high - low)
    absent = np.setdiff1d(np.arange(len(sites)), site_N)
    return {
        "x": quantise(fractions[..., 0], 0, 1),
        "y": quantise(fractions[..., 1], 0, 1),
        "absent": absent.tolist(),
    }


def _find_map_limits(
    layout: str,
    xy: npt.NDArray[np.float64],
    sites: Sequence[Site],
    components: Mapping[Site, Components],
) -> npt.NDArray[np.float64]:
    """Return the limits of a square around the tokens at each site: on x and on y, the lower and the upper limit.

    `xy` contains the coordinates `[sites, tokens, 2]`. The shape of the result is `[sites, 2, 2]`, or `[1, 2, 2]` for
    layouts in a single plane, which have one square for all sites. In the layout `pca`, each site has a separate
    centre, and the squares of a capture point have the same size in all layers.
    """
    if layout in ONE_PLANE:
        common_limits = square_limits(xy.reshape(-1, 2))
        return common_limits[None]
    limits = np.stack([square_limits(xy_of_site) for xy_of_site in xy])
    if layout == "pca":
        # If the principal components of a site are unknown, its coordinates have no unit in common with other sites.
        # The site is then a group of its own.
        groups = [site.point if site in components else str(site) for site in sites]
        limits = _equalise_scales(limits, groups)
    return limits


def square_limits(xy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the limits `[2, 2]` of a square around the points `[vectors, 2]`: on x and y, the lower and upper limit.

    Points with NaN are ignored.
    """
    is_known = np.isfinite(xy).all(axis=1)
    points = xy[is_known]
    if len(points) == 0:  # any square is valid without points
        points = np.array([[0.0, 0.0], [1.0, 1.0]])
    low = points.min(axis=0)
    high = points.max(axis=0)
    extent = max(float((high - low).max()), MIN_EXTENT)
    half = MAP_MARGIN * extent / 2
    middle = (low + high) / 2
    return np.stack([middle - half, middle + half], axis=1)


def _equalise_scales(limits: npt.NDArray[np.float64], groups: Sequence[str]) -> npt.NDArray[np.float64]:
    """Enlarge the square of each site around its centre to the size of the largest square in the site's group.

    `limits` `[sites, 2, 2]` contains the limits of each square: on x and on y, the lower and the upper limit. The
    result has the same shape. `groups` contains the name of each site's group.
    """
    widths = limits[:, 0, 1] - limits[:, 0, 0]  # along x; the height of a square is the same
    halves = pd.Series(widths / 2)
    largest_halves = halves.groupby(list(groups)).transform("max")
    half = largest_halves.to_numpy()[:, None]
    middle = limits.mean(axis=-1)
    return np.stack([middle - half, middle + half], axis=-1)


def encode_nearest(table: pd.DataFrame, tokens: pd.DataFrame, sites: Sequence[Site]) -> Data:
    """Return the K nearest neighbours of each token in the full vector space, as token indices `[sites, tokens, K]`.

    Each of the N rows of `table` contains the neighbours of one token at one site, as row indices in the table of all
    captured tokens. The column `row` of `tokens` contains the rows of the page's tokens in that table. Neighbours that
    are not on the page have the code `MISSING_CODE`.
    """
    row_NK = np.stack(table["nearest"].tolist()).astype(np.int64)
    token_of_row = _index_by_row(tokens["row"], max_row=row_NK.max(initial=0))
    token_N = find_tokens(table, tokens)
    site_N = find_sites(table, sites)
    is_shown_N = (token_N >= 0) & (site_N >= 0)
    neighbours = row_NK.shape[1]
    nearest_STK = np.full((len(sites), len(tokens), neighbours), MISSING_CODE, np.uint16)
    nearest_STK[site_N[is_shown_N], token_N[is_shown_N]] = token_of_row[row_NK[is_shown_N]]
    return {"number": neighbours, "tokens": encode(nearest_STK)}


def _index_by_row(row_T: pd.Series, max_row: int) -> npt.NDArray[np.uint16]:
    """Return, for each row of the table of captured tokens, its index on the page, or `MISSING_CODE` if it has none.

    `row_T` contains the rows of the T tokens of the page. The result has entries for all rows up to `max_row` and up to
    the largest of `row_T`.
    """
    last_row = max(max_row, row_T.max())
    token_of_row = np.full(last_row + 1, MISSING_CODE, np.uint16)
    token_of_row[row_T] = np.arange(len(row_T))
    return token_of_row


def list_kept_neighbours(
    quality: pd.DataFrame,
    layout: str,
    sites: Sequence[Site],
) -> list[list[float | None]]:
    """Return for each site the share of nearest neighbours that a map preserves, and the share expected by chance.

    Missing shares are None. Neighbours are searched for among the vectors of the same site. The table `quality` names
    this score `neighbours_kept_within` for the joint map, and `neighbours_kept` for other layouts.
    """
    is_of_site = (quality["layout"] == layout) & quality["point"].notna()
    rows = quality[is_of_site]
    measure = "neighbours_kept_within"
    if measure not in set(rows["measure"]):
        measure = "neighbours_kept"
    rows = rows[rows["measure"] == measure]
    by_site = rows.round(6).set_index(["layer", "point"])
    pairs = by_site[["value", "chance"]].reindex(pd.MultiIndex.from_tuples(sites))  # one row for each of `sites`
    kept = []
    for value, chance in pairs.to_numpy(float).tolist():
        kept.append([_replace_nan(value), _replace_nan(chance)])
    return kept


def _replace_nan(number: float) -> float | None:
    """Return a number, or None for NaN, which JSON does not support."""
    if np.isnan(number):
        return None
    return number
