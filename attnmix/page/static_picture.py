"""Static SVG picture of tokens by layers: the own share of each token in each model, with the means over texts.

A page shows it until its script has drawn the interactive picture; a notebook shows it below the cell of a result.
Colours follow `src/colours.ts`: CSS mixes them in CIELAB, in a light and a dark scheme. Programs without `color-mix`
use the attribute `fill`, which is mixed in sRGB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnmix.core.names import OWN_SHARE
from attnmix.core.store.results import Results
from attnmix.page.arrays import visible

WIDTH, LEVELS_WIDTH, MARGIN_WIDTH = 1232, 44, 108  # pixels: picture, layer numbers, means
CELL_WIDTHS = (15, 120)  # pixels, minimum and maximum
ROW_HEIGHTS = (9, 30)  # pixels, minimum and maximum, including the gap
ROWS_HEIGHT = 304  # pixels, of all rows together
GAP = 0.28  # fraction of a row
TITLE_HEIGHT, NAMES_HEIGHT, NAME_LETTERS = 24, 92, 13
COLOUR_STEPS = 50
PAPER, MIDDLE, END = ("#ffffff", "#14171c"), ("#5896cc", "#3d7fb5"), ("#00386f", "#b5e0ff")
"""Colours of a share of 0, one half, and 1, in the light and the dark scheme."""
BEFORE, AFTER = ("#6b7485", "#a3adbd"), ("#0060a0", "#88cfff")
"""Colours of the means in both schemes, as in `page.css`: for the previous and for the last model."""
SCALE_PLACES = (12, 96)  # positions of 0 and 100 % in the margin, in pixels


class ModelShares(NamedTuple):
    """The own shares of one text in a model, and their means over the texts of a run."""

    title: str
    shares_LT: npt.NDArray[np.float64]
    """Own shares by layer and token; NaN if missing."""
    corpus: Mapping[str, Sequence[float | None]] | None = None
    """`values`, `low` and `high` by layer; None without an interval."""


def draw_result(results: Results, document: str, labels: Mapping[str, str], curves: Mapping[str, Any]) -> str:
    """Return the picture of a text; an empty string if its own shares were not measured.

    Args:
        results: The measured texts.
        document: The name of the text.
        labels: The names of the models by checkpoint.
        curves: The means of the own share over texts by checkpoint, in the format of the page's data.
    """
    ratios = results.captured_ratios([document])
    if OWN_SHARE not in ratios:
        return ""
    tokens = results.tokens[results.tokens["document"] == document]
    models = []
    for checkpoint, rows in ratios.groupby("checkpoint", sort=False):
        by_layer = rows.pivot(index="layer", columns="position", values=OWN_SHARE)
        means = curves.get(str(checkpoint))
        has_interval = means is not None and any(low is not None for low in means["low"])
        models.append(ModelShares(labels[str(checkpoint)], by_layer.to_numpy(float), means if has_interval else None))
    return draw_own_shares(tokens["label"].tolist(), models)


def draw_own_shares(tokens: Sequence[str], models: Sequence[ModelShares]) -> str:
    """Return the picture as SVG.

    Args:
        tokens: The labels of the tokens.
        models: Their own shares in each model, one block of rows for each.
    """
    fitting = (WIDTH - LEVELS_WIDTH - MARGIN_WIDTH) // CELL_WIDTHS[0]
    shown = [visible(token, kept="") for token in tokens[:fitting]]
    room = WIDTH - LEVELS_WIDTH - MARGIN_WIDTH
    cell_width = float(np.clip(room / len(shown), *CELL_WIDTHS))
    layers = len(models[0].shares_LT)
    row_height = float(np.floor(np.clip(ROWS_HEIGHT / (layers * len(models)), *ROW_HEIGHTS)))
    block_height = TITLE_HEIGHT + layers * row_height
    parts = []
    for number, model in enumerate(models):
        top = number * block_height
        parts.append(_draw_levels(model.title, layers, top, row_height))
        parts.append(_draw_cells(model.shares_LT[:, : len(shown)], top, cell_width, row_height))
        left = LEVELS_WIDTH + cell_width * len(shown)
        parts.append(_draw_means(model, left, top, row_height, is_last=number == len(models) - 1))
    height = len(models) * block_height + NAMES_HEIGHT
    parts.append(_draw_names(shown, cell_width, height - NAMES_HEIGHT + 4))
    colours = ";".join(
        f"--{name}:light-dark({light},{dark})" for name, (light, dark) in zip("pme", (PAPER, MIDDLE, END), strict=True)
    )
    width = LEVELS_WIDTH + cell_width * len(shown) + MARGIN_WIDTH
    more = f", the first {len(shown)} of {len(tokens)} tokens" if len(tokens) > len(shown) else ""
    label = escape(f"Own share of each token's vector after each layer{more}")
    return (
        f'<svg class="own-shares" role="img" aria-label="{label}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" style="max-width:100%;height:auto;{colours}" font-family="Arial, sans-serif" '
        f'font-size="12" fill="currentColor">{"".join(parts)}</svg>'
    )


def _draw_levels(title: str, layers: int, top: float, row_height: float) -> str:
    """Return the title of a model and the numbers of its layers."""
    texts = [f'<text x="0" y="{top + 15:.0f}" font-size="14" font-weight="700">{escape(title)}</text>']
    every = int(np.ceil(14 / row_height))  # layer numbers must not overlap
    for layer in range(layers, 0, -every):
        y = top + TITLE_HEIGHT + (layers - layer + 0.5 - GAP / 2) * row_height + 4
        texts.append(f'<text x="36" y="{y:.1f}" text-anchor="end">{layer}</text>')
    return "".join(texts)


def _draw_cells(shares_LT: npt.NDArray[np.float64], top: float, cell_width: float, row_height: float) -> str:
    """Return the cells of a block, with one path for each colour."""
    layers = len(shares_LT)
    boxes: dict[int, list[str]] = {}
    for layer, token in zip(*np.nonzero(np.isfinite(shares_LT)), strict=True):
        x = LEVELS_WIDTH + token * cell_width
        y = top + TITLE_HEIGHT + (layers - 1 - layer) * row_height
        step = round(float(np.clip(shares_LT[layer, token], 0, 1)) * COLOUR_STEPS)
        height = row_height * (1 - GAP)
        boxes.setdefault(step, []).append(f"M{x:.1f},{y:.1f}h{cell_width - 1:.1f}v{height:.1f}h{1 - cell_width:.1f}z")
    paths = []
    for step, drawn in sorted(boxes.items()):
        share = step / COLOUR_STEPS
        paths.append(f'<path fill="{_mix(share)}" style="fill:{_mix_in_css(share)}" d="{"".join(drawn)}"/>')
    return "".join(paths)


def _mix_in_css(share: float) -> str:
    """Return the colour of a share as a CSS mixture in CIELAB, as in the page's script."""
    from_colour, to_colour, part = ("p", "m", 2 * share) if share < 0.5 else ("m", "e", 2 * share - 1)
    return f"color-mix(in lab,var(--{to_colour}) {100 * part:.0f}%,var(--{from_colour}))"


def _mix(share: float) -> str:
    """Return the colour of a share in the light scheme, mixed in sRGB."""
    stops = np.array([list(bytes.fromhex(colours[0][1:])) for colours in (PAPER, MIDDLE, END)], float)
    channels = [round(float(np.interp(share, (0, 0.5, 1), stops[:, channel]))) for channel in range(3)]
    return f"#{bytes(channels).hex()}"


def _draw_means(model: ModelShares, left: float, top: float, row_height: float, *, is_last: bool) -> str:
    """Return the means over all texts and over the shown text next to a block, with values for the last layer."""
    layers = len(model.shares_LT)
    middles = top + TITLE_HEIGHT + (layers - 0.5 - np.arange(layers) - GAP / 2) * row_height
    bottom = top + TITLE_HEIGHT + layers * row_height
    colour = AFTER if is_last else BEFORE
    style = f'style="color:light-dark({colour[0]},{colour[1]})"'
    low, high = SCALE_PLACES

    def place(share: float) -> float:
        return left + low + (high - low) * min(max(share, 0.0), 1.0)

    parts = [
        f'<path d="M{place(0):.1f},{top + TITLE_HEIGHT:.1f}V{bottom:.1f}M{place(1):.1f},{top + TITLE_HEIGHT:.1f}'
        f'V{bottom:.1f}" stroke="currentColor" stroke-opacity="0.2"/>'
    ]
    title = top + 15
    if model.corpus is not None:
        means, lows, highs = (
            [(place(value), y) for value, y in zip(model.corpus[name], middles, strict=True) if value is not None]
            for name in ("values", "low", "high")
        )
        last = model.corpus["values"][-1]
        parts.append(
            f'<g {style}><path d="{_path([*lows, *highs[::-1]])}Z" fill="currentColor" fill-opacity="0.2"/>'
            f'<path d="{_path(means)}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
        )
        parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill="currentColor"/>' for x, y in means)
        if last is not None:
            parts.append(f'<circle cx="{left + 6:.1f}" cy="{title - 4:.1f}" r="2.8" fill="currentColor"/>')
            parts.append(_write_share(last, left + 13, title, ' font-weight="700" fill="currentColor"'))
        parts.append("</g>")
    known = np.isfinite(model.shares_LT).any(axis=1)
    of_text = [float(np.nanmean(row)) for row in model.shares_LT[known]]
    ticks = "".join(f"M{place(share):.1f},{y - 5:.1f}v10" for share, y in zip(of_text, middles[known], strict=True))
    if of_text:
        ticks += f"M{left + 56:.1f},{title - 9:.1f}v10"
        parts.append(_write_share(of_text[-1], left + 63, title))
    parts.append(f'<path d="{ticks}" stroke="currentColor" stroke-width="1.5"/>')
    if is_last:
        parts.append(f'<text x="{place(0):.1f}" y="{bottom + 10:.1f}" fill-opacity="0.7">0%</text>')
        parts.append(f'<text x="{place(1):.1f}" y="{bottom + 10:.1f}" text-anchor="end" fill-opacity="0.7">100%</text>')
    return "".join(parts)


def _write_share(share: float, x: float, y: float, looks: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{looks}>{100 * share:.0f}%</text>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _draw_names(tokens: Sequence[str], cell_width: float, top: float) -> str:
    """Return the names of the tokens below their columns, rotated by 90 degrees in narrow columns."""
    letters = min(max(map(len, tokens)), NAME_LETTERS)
    is_upright = cell_width < letters * 12 * 0.62
    texts = []
    for number, token in enumerate(tokens):
        name = escape(token if len(token) <= NAME_LETTERS else f"{token[: NAME_LETTERS - 1]}…")
        x = LEVELS_WIDTH + number * cell_width + (cell_width - 1) / 2
        if is_upright:
            texts.append(
                f'<text transform="translate({x + 4:.1f} {top:.1f}) rotate(-90)" text-anchor="end">{name}</text>'
            )
        else:
            texts.append(f'<text x="{x:.1f}" y="{top + 11:.1f}" text-anchor="middle">{name}</text>')
    return "".join(texts)
