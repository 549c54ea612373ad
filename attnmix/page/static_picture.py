"""Static SVG picture of tokens by layers: the own share of each token in each model, and the means over texts.

A page shows the static picture until the script of the page has drawn the interactive one. A notebook shows the
static picture below the cell that returns the result.
Colours follow `src/colours.ts`: CSS mixes them in CIELAB, in a light and a dark scheme. Programs that do not support
`color-mix` and `light-dark` use the attributes `fill` and `stroke`, whose colours are those of the light scheme; cell
colours are then mixed in sRGB.
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


class SchemeColour(NamedTuple):
    """A colour in the light and in the dark colour scheme."""

    light: str
    dark: str

    @property
    def css(self) -> str:
        """The CSS colour, which adapts to the light or dark colour scheme."""
        return f"light-dark({self.light},{self.dark})"


# Sizes and positions are in pixels.
WIDTH = 1232
LEVELS_WIDTH = 44  # width of the column of layer numbers, left of the cells
LEVELS_X = 36  # right end of the layer numbers
MARGIN_WIDTH = 108  # width of the margin for the means, right of the cells
CELLS_WIDTH = WIDTH - LEVELS_WIDTH - MARGIN_WIDTH
MIN_CELL_WIDTH = 15
MAX_CELL_WIDTH = 120
MIN_ROW_HEIGHT = 9  # minimum height of a row including the gap
MAX_ROW_HEIGHT = 30
ROWS_HEIGHT = 304  # total height of the rows
GAP = 0.28  # gap between rows, as a fraction of a row
TITLE_HEIGHT = 24
TITLE_BASELINE = 15  # distance of the title's baseline from the top of a block
NAMES_HEIGHT = 92
NAME_LETTERS = 13
MIN_LEVEL_DISTANCE = 14  # minimum distance between the baselines of layer numbers
FONT_SIZE = 12
LETTER_WIDTH = 0.62  # mean width of a letter, in font sizes
SCALE_START = 12  # position of 0 % in the margin
SCALE_WIDTH = 84  # from 0 to 100 %
DIGIT_MIDDLE = 4  # distance of the vertical centre of digits from the baseline
# Above the margin are the values of the last layer, each to the right of its mark: first the mean over the texts of the
# run (a circle), then the mean over the shown text (a tick). Positions are relative to the left end of the margin.
CIRCLE_X, CORPUS_VALUE_X = 6, 13
TICK_X, TEXT_VALUE_X = 56, 63

COLOUR_STEPS = 50
PAPER = SchemeColour("#ffffff", "#14171c")
"""The colour of a share of 0."""
MIDDLE = SchemeColour("#5896cc", "#3d7fb5")
"""The colour of a share of one half."""
END = SchemeColour("#00386f", "#b5e0ff")
"""The colour of a share of 1."""
BEFORE = SchemeColour("#6b7485", "#a3adbd")
"""The colour of the means of all models except the last, as in `page.css`."""
AFTER = SchemeColour("#0060a0", "#88cfff")
"""The colour of the means of the last model, as in `page.css`."""

Point = tuple[float, float]
"""Coordinates x and y in pixels."""


class ModelShares(NamedTuple):
    """The own shares of the tokens of one text in a model, and the mean own shares over the texts of a run."""

    title: str
    shares_LT: npt.NDArray[np.float64]
    """Own shares by layer and token; NaN if missing."""
    corpus: Mapping[str, Sequence[float | None]] | None = None
    """The lists `values` (means), `low` and `high` (interval bounds) by layer; None if there are no intervals."""


class Block(NamedTuple):
    """The layout of the part of the picture for one model, in pixels: the title, a row per layer, and the margin."""

    top: float
    layers: int
    row_height: float
    cell_width: float
    margin_left: float

    @property
    def title_baseline(self) -> float:
        """The baseline of the title and of the values in the margin."""
        return self.top + TITLE_BASELINE

    @property
    def rows_top(self) -> float:
        """The top of the row of the last layer."""
        return self.top + TITLE_HEIGHT

    @property
    def rows_bottom(self) -> float:
        """The bottom of the row of the first layer."""
        return self.rows_top + self.layers * self.row_height

    @property
    def row_middles(self) -> npt.NDArray[np.floating[Any]]:
        """The vertical centres of the cells by layer, from the first layer (the lowest row) to the last."""
        row_centres_L = self.layers - 0.5 - np.arange(self.layers)  # in rows below the top of the last layer
        cell_centres_L = row_centres_L - GAP / 2  # the gap is at the bottom of a row
        return self.rows_top + cell_centres_L * self.row_height

    def scale_x(self, share: float) -> float:
        """Return the position of a share on the scale in the margin."""
        clipped = min(max(share, 0.0), 1.0)
        return self.margin_left + SCALE_START + SCALE_WIDTH * clipped


def draw_result(results: Results, document: str, labels: Mapping[str, str], curves: Mapping[str, Any]) -> str:
    """Return the SVG picture of a text; an empty string if its own shares were not measured.

    Args:
        results: The measured texts.
        document: The name of the text.
        labels: The names of the models by checkpoint.
        curves: By checkpoint, the lists `values` (mean own shares over texts), `low` and `high` (interval bounds), with
            one entry per layer.
    """
    ratios = results.captured_ratios([document])
    if OWN_SHARE not in ratios:
        return ""
    models = []
    for name, rows in ratios.groupby("checkpoint", sort=False):
        checkpoint = str(name)
        table = rows.pivot(index="layer", columns="position", values=OWN_SHARE)
        shares_LT = table.to_numpy(float)
        means = curves.get(checkpoint)
        # Means over texts are shown only if they have intervals.
        corpus = means if _has_interval(means) else None
        models.append(ModelShares(labels[checkpoint], shares_LT, corpus))
    is_shown = results.tokens["document"] == document
    tokens = results.tokens[is_shown]
    return draw_own_shares(tokens["label"].tolist(), models)


def _has_interval(means: Mapping[str, Any] | None) -> bool:
    """Return True if the means of at least one layer have an interval."""
    if means is None:
        return False
    return any(low is not None for low in means["low"])


def draw_own_shares(tokens: Sequence[str], models: Sequence[ModelShares]) -> str:
    """Return the picture of the own shares of a text as SVG, with a block of rows for each model.

    Args:
        tokens: The labels of the tokens.
        models: The own shares in each model.
    """
    max_tokens = CELLS_WIDTH // MIN_CELL_WIDTH
    names = [visible(token, kept="") for token in tokens[:max_tokens]]
    columns = len(names)
    layers = len(models[0].shares_LT)
    cell_width = _choose_cell_width(columns)
    row_height = _choose_row_height(layers * len(models))
    margin_left = LEVELS_WIDTH + cell_width * columns
    block_height = TITLE_HEIGHT + layers * row_height
    parts = []
    for number, model in enumerate(models):
        top = number * block_height
        block = Block(top, layers, row_height, cell_width, margin_left)
        is_last_model = number == len(models) - 1
        parts.append(_draw_levels(model.title, block))
        parts.append(_draw_cells(model.shares_LT[:, :columns], block))
        parts.append(_draw_margin(model, block, is_last_model=is_last_model))
    names_top = len(models) * block_height
    parts.append(_draw_names(names, cell_width, names_top + 4))
    label = "Own share of each token's vector after each layer"
    if len(tokens) > columns:
        label += f", the first {columns} of {len(tokens)} tokens"
    content = "".join(parts)
    return _wrap_in_svg(
        content,
        label,
        width=margin_left + MARGIN_WIDTH,
        height=names_top + NAMES_HEIGHT,
    )


def _choose_cell_width(columns: int) -> float:
    """Return the width of a cell, within the limits, such that all `columns` fill the picture."""
    width = CELLS_WIDTH / columns
    return float(np.clip(width, MIN_CELL_WIDTH, MAX_CELL_WIDTH))


def _choose_row_height(rows: int) -> float:
    """Return the height of a row in whole pixels, within the limits, such that all `rows` fill the picture."""
    height = ROWS_HEIGHT / rows
    clipped = np.clip(height, MIN_ROW_HEIGHT, MAX_ROW_HEIGHT)
    return float(np.floor(clipped))


def _wrap_in_svg(content: str, label: str, width: float, height: float) -> str:
    """Return the SVG element with an accessible label, and with the colours from which `_mix_in_css` mixes others.

    The CSS variables `--p`, `--m` and `--e` are the colours of the shares 0, 0.5 and 1, each for both colour schemes.
    """
    variables = [
        f"--p:{PAPER.css}",
        f"--m:{MIDDLE.css}",
        f"--e:{END.css}",
    ]
    style = ";".join(["max-width:100%", "height:auto", *variables])
    attributes = {
        "xmlns": "http://www.w3.org/2000/svg",  # for programs that open the picture as a file
        "class": "own-shares",
        "role": "img",
        "aria-label": escape(label),
        "viewBox": f"0 0 {width:.0f} {height:.0f}",
        "width": f"{width:.0f}",
        "style": style,
        "font-family": "Arial, sans-serif",
        "font-size": str(FONT_SIZE),
        "fill": "currentColor",
    }
    return _format_element("svg", content, **attributes)


def _format_element(tag: str, content: str | None = None, **attributes: str | float) -> str:
    """Return an SVG element; `content` and attributes must be escaped already.

    Numbers are rounded to one decimal place. Underscores in the names of attributes become hyphens.
    """
    words = [tag]
    for name, value in attributes.items():
        attribute = name.replace("_", "-")
        text = value if isinstance(value, str) else f"{value:.1f}"
        words.append(f'{attribute}="{text}"')
    opening = " ".join(words)
    if content is None:
        return f"<{opening}/>"
    return f"<{opening}>{content}</{tag}>"


def _format_line(points: Sequence[Point]) -> str:
    """Return the path data of a line through the points."""
    corners = [f"{x:.1f},{y:.1f}" for x, y in points]
    return "M" + "L".join(corners)


def _draw_levels(title: str, block: Block) -> str:
    """Return the SVG elements of a model's title and its layer numbers."""
    title_text = _format_element(
        "text",
        escape(title),
        x="0",
        y=f"{block.title_baseline:.0f}",
        font_size="14",
        font_weight="700",
    )
    texts = [title_text]
    middles = block.row_middles
    # In low rows, only every n-th layer has a number, so that numbers do not overlap.
    step = int(np.ceil(MIN_LEVEL_DISTANCE / block.row_height))
    for layer in range(block.layers, 0, -step):
        baseline = middles[layer - 1] + DIGIT_MIDDLE
        number = _format_element(
            "text",
            str(layer),
            x=str(LEVELS_X),
            y=baseline,
            text_anchor="end",
        )
        texts.append(number)
    return "".join(texts)


def _draw_cells(shares_LT: npt.NDArray[np.float64], block: Block) -> str:
    """Return the SVG paths of a block's cells `[L, T]` (layers by tokens), with one path per colour.

    A colour stands for all shares that are rounded to the same step between 0 and `COLOUR_STEPS`. Cells with NaN are
    omitted.
    """
    width = block.cell_width - 1  # a gap of 1 pixel separates neighbouring cells
    height = block.row_height * (1 - GAP)
    rectangle = f"h{width:.1f}v{height:.1f}h{-width:.1f}z"
    cells_by_step: dict[int, list[str]] = {}
    for layer, token in np.argwhere(np.isfinite(shares_LT)):
        x = LEVELS_WIDTH + token * block.cell_width
        rows_above = block.layers - 1 - layer
        y = block.rows_top + rows_above * block.row_height
        share = float(np.clip(shares_LT[layer, token], 0, 1))
        step = round(share * COLOUR_STEPS)
        cells = cells_by_step.setdefault(step, [])
        cells.append(f"M{x:.1f},{y:.1f}{rectangle}")
    paths = []
    for step, cells in sorted(cells_by_step.items()):
        share = step / COLOUR_STEPS
        path = _format_element(
            "path",
            fill=_mix_in_srgb(share),
            style=f"fill:{_mix_in_css(share)}",
            d="".join(cells),
        )
        paths.append(path)
    return "".join(paths)


def _mix_in_css(share: float) -> str:
    """Return the colour of a share as a CSS mixture in CIELAB.

    The CSS variables `--p`, `--m` and `--e` are the colours of the shares 0, 0.5 and 1.
    """
    if share < 0.5:
        from_colour = "p"
        to_colour = "m"
        percentage = 100 * (2 * share)
    else:
        from_colour = "m"
        to_colour = "e"
        percentage = 100 * (2 * share - 1)
    return f"color-mix(in lab,var(--{to_colour}) {percentage:.0f}%,var(--{from_colour}))"


def _mix_in_srgb(share: float) -> str:
    """Return the colour of a share in the light scheme, interpolated in sRGB between three colours."""
    stops = []  # red, green and blue of the colours for the shares 0, 0.5 and 1
    for colour in (PAPER, MIDDLE, END):
        hex_digits = colour.light.removeprefix("#")
        stops.append(list(bytes.fromhex(hex_digits)))
    mixture = []
    for channel_stops in np.array(stops, float).T:
        value = np.interp(share, (0, 0.5, 1), channel_stops)
        mixture.append(round(float(value)))
    return f"#{bytes(mixture).hex()}"


def _draw_margin(model: ModelShares, block: Block, *, is_last_model: bool) -> str:
    """Return the SVG of the means to the right of a model's cells: a scale, and the mean own shares by layer.

    These are the means over all texts of the run, unless `model.corpus` is None, and those over the shown text. Means
    over all texts have the colour `AFTER` in the last model and `BEFORE` in any other; only the last model's scale has
    labels.
    """
    parts = [_draw_scale(block)]
    if model.corpus is not None:
        colour = AFTER if is_last_model else BEFORE
        parts.append(_draw_corpus_means(model.corpus, block, colour))
    parts.append(_draw_text_means(model.shares_LT, block))
    if is_last_model:
        parts.append(_label_scale(block))
    return "".join(parts)


def _draw_scale(block: Block) -> str:
    """Return an SVG path with vertical lines at 0 and 100 %."""
    lines = []
    for share in (0, 1):
        x = block.scale_x(share)
        lines.append(f"M{x:.1f},{block.rows_top:.1f}V{block.rows_bottom:.1f}")
    return _format_element(
        "path",
        d="".join(lines),
        stroke="currentColor",
        stroke_opacity="0.2",
    )


def _label_scale(block: Block) -> str:
    """Return SVG text elements with the labels of both ends of the scale."""
    y = block.rows_bottom + 10
    low = _format_element("text", "0%", x=block.scale_x(0), y=y, fill_opacity="0.7")
    high = _format_element("text", "100%", x=block.scale_x(1), y=y, text_anchor="end", fill_opacity="0.7")
    return low + high


def _draw_corpus_means(
    corpus: Mapping[str, Sequence[float | None]],
    block: Block,
    colour: SchemeColour,
) -> str:
    """Return the SVG curve of the means over all texts with their intervals, and the value of the last layer.

    `corpus` contains the lists `values` (means), `low` and `high` (interval bounds) by layer.
    """
    means = _locate_means(corpus["values"], block)
    interval = _draw_interval(corpus["low"], corpus["high"], block)
    curve = _format_element(
        "path",
        d=_format_line(means),
        fill="none",
        stroke=colour.light,
        stroke_width="1.5",
        style=f"stroke:{colour.css}",
    )
    parts = [interval, curve]
    for x, y in means:
        parts.append(_draw_circle(x, y))
    last = corpus["values"][-1]
    if last is not None:
        parts.append(_draw_last_corpus_mean(last, block))
    return _format_element(
        "g",
        "".join(parts),
        fill=colour.light,
        style=f"fill:{colour.css}",
    )


def _draw_interval(low: Sequence[float | None], high: Sequence[float | None], block: Block) -> str:
    """Return the SVG band between the lower and the upper interval bounds, which are given by layer."""
    lows = _locate_means(low, block)
    highs = _locate_means(high, block)
    outline = [*lows, *highs[::-1]]  # up along the lower bounds, and back along the upper bounds
    return _format_element(
        "path",
        d=f"{_format_line(outline)}Z",
        fill_opacity="0.2",
    )


def _draw_last_corpus_mean(mean: float, block: Block) -> str:
    """Return the SVG of the last layer's mean over all texts, as a circle and a number above the margin."""
    mark = _draw_circle(block.margin_left + CIRCLE_X, block.title_baseline - DIGIT_MIDDLE)
    value = _format_element(
        "text",
        f"{100 * mean:.0f}%",
        x=block.margin_left + CORPUS_VALUE_X,
        y=block.title_baseline,
        font_weight="700",
    )
    return mark + value


def _locate_means(means: Sequence[float | None], block: Block) -> list[Point]:
    """Return the position of each layer's mean or interval bound in the margin; missing values are omitted."""
    points = []
    for mean, y in zip(means, block.row_middles, strict=True):
        if mean is not None:
            x = block.scale_x(mean)
            points.append((x, y))
    return points


def _draw_circle(x: float, y: float) -> str:
    """Return the SVG of a small circle that marks a mean."""
    return _format_element(
        "circle",
        cx=x,
        cy=y,
        r="2.8",
    )


def _draw_text_means(shares_LT: npt.NDArray[np.float64], block: Block) -> str:
    """Return the SVG of the means over the tokens of the shown text: a tick per layer, and the last layer's value.

    `shares_LT` contains the own shares by layer and token. Layers without own shares have no tick.
    """
    is_known_L = np.isfinite(shares_LT).any(axis=1)
    middles = block.row_middles[is_known_L]
    means = [float(np.nanmean(row)) for row in shares_LT[is_known_L]]
    ticks = []
    for mean, y in zip(means, middles, strict=True):
        x = block.scale_x(mean)
        ticks.append(_draw_tick(x, y))
    value = ""
    if means:
        # The value in the last layer is written above the margin, next to a tick that marks it as a mean over the text.
        x = block.margin_left + TICK_X
        y = block.title_baseline - DIGIT_MIDDLE
        ticks.append(_draw_tick(x, y))
        value = _format_element(
            "text",
            f"{100 * means[-1]:.0f}%",
            x=block.margin_left + TEXT_VALUE_X,
            y=block.title_baseline,
        )
    path = _format_element(
        "path",
        d="".join(ticks),
        stroke="currentColor",
        stroke_width="1.5",
    )
    return value + path


def _draw_tick(x: float, y: float) -> str:
    """Return the path data of a vertical line of 10 pixels, centred on a point."""
    return f"M{x:.1f},{y - 5:.1f}v10"


def _draw_names(tokens: Sequence[str], cell_width: float, top: float) -> str:
    """Return SVG text elements with the tokens' names below the columns; in narrow columns, they are rotated by 90°."""
    longest = max(len(token) for token in tokens)
    letters = min(longest, NAME_LETTERS)
    is_narrow = cell_width < letters * FONT_SIZE * LETTER_WIDTH
    texts = []
    for number, token in enumerate(tokens):
        name = escape(_truncate_name(token))
        x = LEVELS_WIDTH + number * cell_width + (cell_width - 1) / 2  # cells have a gap of 1 pixel
        if is_narrow:
            text = _format_element(
                "text",
                name,
                transform=f"translate({x + 4:.1f} {top:.1f}) rotate(-90)",
                text_anchor="end",
            )
        else:
            text = _format_element(
                "text",
                name,
                x=x,
                y=top + 11,
                text_anchor="middle",
            )
        texts.append(text)
    return "".join(texts)


def _truncate_name(token: str) -> str:
    """Return the name of a token with at most `NAME_LETTERS` letters."""
    if len(token) <= NAME_LETTERS:
        return token
    start = token[: NAME_LETTERS - 1]
    return f"{start}…"
