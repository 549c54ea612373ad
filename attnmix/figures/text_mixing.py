"""Figures of mixing within single texts: heat-map strips by token and layer, and contribution matrices.

`draw_strips` and `draw_matrices` return figures; call them within the context manager `paper_style`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from attnmix.core.store.runs import Run, row_shares
from attnmix.figures import style
from attnmix.figures.labels import CHECKPOINTS, MATRIX_LABELS, RATIO_MARKS, layer_label
from attnmix.figures.tokens import TextLayers, short_part
from attnmix.measures.ratios import preferred_ratio

# Strips
MIN_TOKENS_PER_LINE = 12
MAX_TOKENS_PER_LINE = 32  # limited for readable token labels
MAX_STRIP_TOKENS = 128
ROW_HEIGHT = 0.075  # inches, height of the row of a layer
STRIP_GAP = 0.06  # inches, space between strips and below the token labels
STRIPS_HEAD = 0.3  # inches, like the following sizes
STRIPS_FOOT = 0.45
STRIPS_LEFT = 1.0
STRIPS_WIDTH = 5.9

# Matrices
MAX_MATRIX_TOKENS = 20  # limited for readable row labels
PERCENTILE = 99  # percentile of the cells that is the upper end of a colour scale
MATRIX_COLORS = "Blues"
SIDE_COLORS = "Oranges"
UNKNOWN = "0.8"  # grey of rows with unknown contributions
MATRIX = 1.42  # inches, height of a matrix
MATRIX_GAP = 0.15  # inches, space below a matrix
MATRIX_LEFT = 0.85  # inches, like the following sizes
MATRIX_RIGHT = 0.45
MATRIX_HEAD = 0.5
MATRIX_FOOT = 0.9
SIDE_COLUMN_WIDTH = 0.09  # width of each column to the right of a matrix, relative to the matrix
MATRIX_NOTE = (
    "Rows are tokens and columns their sources, with shares of the row's sum over the whole text; colours end at\n"
    "a measure's 99th percentile. Strips show the share of the token itself, which the matrix omits,{rest} above\n"
    "their means in %. Rows whose sum is too small are grey."
)


class StripScale(NamedTuple):
    """The colour scale of strips, and the label of its colour bar."""

    label: str
    colors: Any


class Strip(NamedTuple):
    """A heat map with a row per layer and a column per token: its name, values `[layers, tokens]` and colour scale."""

    name: str
    cells: pd.DataFrame
    scale: StripScale


def draw_strips(rows: pd.DataFrame, document: str, text: TextLayers) -> Figure:
    """Return a figure of heat-map strips with a row per layer and a column per token, wrapped like a text.

    Each checkpoint has a strip of the preferred ratio; with two checkpoints, a third strip shows the difference
    (fine-tuned minus pretrained). Lines of tokens that do not fit on a page are omitted.

    Args:
        rows: The rows of `features/measure/tokens.parquet` for the text and its layers.
        document: The name of the text.
        text: The layers and tokens of the text.
    """
    strips = _list_strips(rows)
    labels = text.labels[:MAX_STRIP_TOKENS]
    tokens_per_line = max(len(labels), MIN_TOKENS_PER_LINE)
    tokens_per_line = min(tokens_per_line, MAX_TOKENS_PER_LINE)
    lines = _split_into_lines(labels, tokens_per_line)

    # The heights and positions are in inches.
    strip_height = ROW_HEIGHT * len(text.layers)
    strips_height = len(strips) * (strip_height + STRIP_GAP)
    line_heights = _measure_lines(lines, strips_height)
    fitting = _count_fitting_lines(line_heights)
    shown_lines = lines[:fitting]
    bottoms = np.cumsum(line_heights[:fitting])  # below the top of the first line
    height = STRIPS_HEAD + bottoms[-1] + STRIPS_FOOT
    tops = height - STRIPS_HEAD - np.array([0, *bottoms[:-1]])  # above the bottom of the figure

    figure = Figure(figsize=(style.TWO_COLUMNS, height))
    for line_number, token_labels in enumerate(shown_lines):
        first_token = line_number * tokens_per_line
        positions = range(first_token, first_token + tokens_per_line)
        _draw_line(figure, strips, positions, token_labels, text, tops[line_number])
    _add_strip_scales(figure, strips, height)
    shown_tokens = sum(len(line) for line in shown_lines)
    _add_strip_title(figure, document, text, shown_tokens, height)
    return figure


def _split_into_lines(labels: list[str], tokens_per_line: int) -> list[list[str]]:
    """Return the token labels as lists of `tokens_per_line` labels; the last list can be shorter."""
    lines = []
    for start in range(0, len(labels), tokens_per_line):
        line = labels[start : start + tokens_per_line]
        lines.append(line)
    return lines


def _add_strip_title(figure: Figure, document: str, text: TextLayers, shown_tokens: int, height: float) -> None:
    """Add the title of strips to a figure of `height` inches, with the number of shown tokens if some are not shown."""
    part = ""
    if shown_tokens < len(text.tokens):
        part = f", its first {shown_tokens} of {len(text.tokens)} tokens"
    title = f"Mixing ratio by layer{text.suffix} in {document}{part}"
    figure.suptitle(title, y=1 - 0.06 / height, fontsize=8)


def _measure_lines(lines: Sequence[Sequence[str]], strips_height: float) -> npt.NDArray[np.float64]:
    """Return the height of each line of tokens `[lines]` in inches, including token labels and the space below them."""
    label_heights = []
    for line in lines:
        longest = max(style.text_width(label, style.LABEL_SIZE) for label in line)
        label_heights.append(longest / 72)  # labels are rotated; 72 points per inch
    return strips_height + np.array(label_heights) + STRIP_GAP


def _count_fitting_lines(line_heights: npt.NDArray[np.float64]) -> int:
    """Return how many lines, counted from the first, fit on a page; the result is at least 1."""
    bottoms = np.cumsum(line_heights)
    available = style.PAGE_HEIGHT - STRIPS_HEAD - STRIPS_FOOT
    fitting = int((bottoms <= available).sum())
    return max(1, fitting)


def _draw_line(
    figure: Figure, strips: Sequence[Strip], positions: range, token_labels: list[str], text: TextLayers, top: float
) -> None:
    """Draw the strips of the tokens at `positions` as one line, with the token labels below the last strip.

    `top` is the position of the line's top in inches above the bottom of the figure.
    """
    height = figure.get_figheight()
    left = STRIPS_LEFT / style.TWO_COLUMNS
    width = STRIPS_WIDTH / style.TWO_COLUMNS
    strip_height = ROW_HEIGHT * len(text.layers)
    last = len(strips) - 1
    for number, strip in enumerate(strips):
        bottom = top - (number + 1) * strip_height - number * STRIP_GAP
        axes = figure.add_axes((left, bottom / height, width, strip_height / height))
        labels_below = token_labels if number == last else []
        _draw_strip(axes, strip, positions, labels_below, text)


def _list_strips(rows: pd.DataFrame) -> list[Strip]:
    """Return a strip of the preferred ratio for each checkpoint and, for two checkpoints, a strip of the difference."""
    method = preferred_ratio(rows.columns)
    ratio_label = f"{RATIO_MARKS[method].label}, one scale in all texts"
    ratio_colors = ScalarMappable(Normalize(0, 1), style.share_cmap())
    ratio_scale = StripScale(ratio_label, ratio_colors)
    ratios = {}
    strips = []
    for name, checkpoint_rows in rows.groupby("checkpoint", sort=False):
        checkpoint = str(name)
        cells = checkpoint_rows.pivot_table(index="layer", columns="position", values=method, dropna=False)
        ratios[checkpoint] = cells
        strip = Strip(CHECKPOINTS[checkpoint], cells, ratio_scale)
        strips.append(strip)
    if len(ratios) == len(CHECKPOINTS):
        difference = ratios["finetuned"] - ratios["pretrained"]
        difference_label = "fine-tuned \N{MINUS SIGN} pretrained"
        difference_colors = ScalarMappable(Normalize(-1, 1), style.change_cmap())
        difference_scale = StripScale(difference_label, difference_colors)
        difference_strip = Strip("Difference", difference, difference_scale)
        strips.append(difference_strip)
    return strips


def _draw_strip(axes: Axes, strip: Strip, positions: range, token_labels: list[str], text: TextLayers) -> None:
    """Draw the tokens at `positions` of a strip, with labels of the tokens and of the first and the last layer."""
    cells = strip.cells.reindex(columns=positions)
    colors = strip.scale.colors
    axes.imshow(cells, colors.cmap, colors.norm, aspect="auto", origin="lower")
    label_tokens(axes, token_labels, "x")
    outer_rows = sorted({0, len(strip.cells) - 1})
    layer_labels = []
    for row in outer_rows:
        label = layer_label(text.layers[row], text.encoder)
        layer_labels.append(label)
    axes.set_yticks(outer_rows, layer_labels)
    axes.tick_params("y", length=0, pad=2, labelsize=style.LABEL_SIZE)
    axes.set_ylabel(strip.name, fontsize=6.5, rotation=0, ha="right", va="center")
    axes.spines[:].set_visible(False)


def _add_strip_scales(figure: Figure, strips: Sequence[Strip], height: float) -> None:
    """Add a colour bar for each distinct scale of the strips, at the bottom of a figure of `height` inches."""
    left = STRIPS_LEFT / style.TWO_COLUMNS
    width = STRIPS_WIDTH / style.TWO_COLUMNS
    bottom = (STRIPS_FOOT - 0.14) / height
    scales = dict.fromkeys(strip.scale for strip in strips)
    for place, scale in enumerate(scales):
        bar_left = left + place * width / 2
        box = figure.add_axes((bar_left, bottom, 0.47 * width, 0.07 / height))
        bar = figure.colorbar(scale.colors, cax=box, orientation="horizontal")
        bar.ax.tick_params(labelsize=style.LABEL_SIZE, length=2, pad=1)
        bar.set_label(scale.label, fontsize=6, labelpad=1)


def draw_matrices(run: Run, checkpoint: str, document: str, text: TextLayers, methods: Sequence[str]) -> Figure:
    """Return a figure of contribution matrices of one text.

    The figure has a row per method and columns for the first, a middle and the last layer. Within a matrix, rows are
    tokens and columns are their sources, for a short part of the text. Every cell is a share of the row's sum over the
    whole text. The shares on the diagonal are usually much larger. They are drawn to the right of the matrix instead,
    next to the share of the tokens that are not shown.
    """
    part = short_part(text.tokens, MAX_MATRIX_TOKENS)  # the indices of the tokens in the figure
    labels = [text.labels[place] for place in part]
    layers = _choose_layers(text.layers)
    layer_indices = [layer - 1 for layer in layers]
    height = MATRIX_HEAD + len(methods) * (MATRIX + MATRIX_GAP) - MATRIX_GAP + MATRIX_FOOT
    figure = Figure(figsize=(style.TWO_COLUMNS, height))
    grid = _add_matrix_grid(figure, len(methods), len(layers), height)  # the last column is for colour bars
    for row, method in enumerate(methods):
        is_last = row == len(methods) - 1
        matrices = run.matrix(checkpoint, document, method)[layer_indices]  # [layers, tokens, sources]
        shares = row_shares(matrices)[:, part]  # [layers, shown tokens, all sources]
        others = _remove_diagonals(shares[:, :, part])  # [layers, shown tokens, shown tokens]
        scale = Normalize(0, _find_scale_end(others))
        for column, layer in enumerate(layers):
            axes = grid[row, column]
            _draw_matrix(axes, others[column], scale)
            labels_below = labels if is_last else []
            label_tokens(axes, labels_below, "x")
            labels_beside = labels if column == 0 else []
            label_tokens(axes, labels_beside, "y")
            _draw_sides(axes, shares[column], part, is_last)
            if row == 0:
                axes.set_title(layer_label(layer, text.encoder), pad=3)
        _add_method_name(figure, method, row, height)
        _add_matrix_scale(figure, grid[row, -1], scale)
    _add_matrix_title(figure, f"{CHECKPOINTS[checkpoint]}, {document}{text.suffix}", part, len(text.tokens), height)
    return figure


def _choose_layers(layers: Sequence[int]) -> list[int]:
    """Return the first, a middle and the last of the layers, without repetition."""
    depth = len(layers)
    places = sorted({0, depth // 2, depth - 1})
    return [layers[place] for place in places]


def _remove_diagonals(matrices: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return matrices `[layers, tokens, tokens]` without the shares of the tokens themselves: diagonals become NaN."""
    is_diagonal = np.eye(matrices.shape[-1], dtype=bool)
    return np.where(is_diagonal, np.float32(np.nan), matrices)


def _add_method_name(figure: Figure, method: str, row: int, height: float) -> None:
    """Add the rotated name of a method to the left of its `row` of matrices, in a figure of `height` inches."""
    name = MATRIX_LABELS[method].replace(" rollout", "\nrollout")
    matrix_top = MATRIX_HEAD + row * (MATRIX + MATRIX_GAP)
    middle = 1 - (matrix_top + MATRIX / 2) / height
    figure.text(0.02, middle, name, rotation=90, va="center", multialignment="center")


def _add_matrix_title(figure: Figure, subject: str, part: range, tokens: int, height: float) -> None:
    """Add the title above the matrices and the note below them, in a figure of `height` inches.

    The title names the `subject` and, if only a part of the text is shown, the indices of the shown tokens (`part`).
    `tokens` is the number of tokens of the text.
    """
    shown = ""
    rest = ""
    if len(part) < tokens:
        shown = f", tokens {part[0]} to {part[-1]} of {tokens}"
        rest = " and of the rest of the text,"
    title = f"{subject}{shown}: contributions of the other tokens"
    figure.suptitle(title, y=1 - 0.06 / height, fontsize=8)
    note = MATRIX_NOTE.format(rest=rest)
    figure.text(0.5, 0.04 / height, note, ha="center", va="bottom", fontsize=5.5)


def _add_matrix_grid(figure: Figure, methods: int, layers: int, height: float) -> Any:
    """Add axes `[methods, layers + 1]` for matrices, with a narrow last column for colour bars."""
    spaces: Any = {
        "left": MATRIX_LEFT / style.TWO_COLUMNS,
        "right": 1 - MATRIX_RIGHT / style.TWO_COLUMNS,
        "top": 1 - MATRIX_HEAD / height,
        "bottom": MATRIX_FOOT / height,
        "hspace": MATRIX_GAP / MATRIX,
        "wspace": 0.06,
        "width_ratios": [1.0] * layers + [0.04],
    }
    return figure.subplots(methods, layers + 1, squeeze=False, gridspec_kw=spaces)


def _find_scale_end(cells: npt.NDArray[np.float32]) -> float:
    """Return a high percentile of the finite cells; 1 if the percentile is 0 or there are no finite cells."""
    known = cells[np.isfinite(cells)]
    if len(known) == 0:
        return 1.0
    end = float(np.percentile(known, PERCENTILE))
    if end == 0:
        return 1.0
    return end


def _add_matrix_scale(figure: Figure, box: Axes, scale: Normalize) -> None:
    """Draw the colour bar of a row of matrices, in percent."""
    colors = ScalarMappable(scale, MATRIX_COLORS)
    bar = figure.colorbar(colors, cax=box, extend="max", extendfrac=0.04)
    bar.ax.tick_params(labelsize=style.LABEL_SIZE, length=2, pad=1)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5))
    bar.ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.4g} %")


def _draw_matrix(axes: Axes, cells: npt.NDArray[np.float32], scale: Normalize) -> None:
    """Draw a matrix of contributions of other tokens, without its diagonal; rows without known cells are grey."""
    number = len(cells)
    ends = [-0.5, number - 0.5]
    cmap = colormaps[MATRIX_COLORS].with_extremes(bad=(0, 0, 0, 0))  # NaN is transparent
    axes.imshow(cells, cmap, scale, aspect="auto")
    is_unknown = np.isnan(cells).all(axis=1)
    for row in np.flatnonzero(is_unknown):
        axes.fill_between(ends, row - 0.5, row + 0.5, color=UNKNOWN, linewidth=0)
    axes.plot(ends, ends, color="0.6", linewidth=0.5)  # the diagonal
    frame = Rectangle((-0.5, -0.5), number, number, fill=False, edgecolor="0.6", linewidth=0.4)
    axes.add_patch(frame)
    axes.spines[:].set_visible(False)


def _draw_sides(axes: Axes, shares: npt.NDArray[np.float32], part: range, is_last: bool) -> None:
    """Draw two columns to the right of a matrix: the shares of the token itself and of the tokens that are not shown.

    `shares` `[part, tokens]` contains the shares of all tokens in each shown token. The second column is omitted if the
    whole text is shown. Below each column is its mean in % and, in the last row of matrices, its name.
    """
    columns = _list_side_columns(shares, part)
    # All positions are in data coordinates, in which each cell of the matrix has a width and a height of 1.
    number = len(part)
    top = -0.5
    bottom = number - 0.5
    matrix_right = number - 0.5
    width = SIDE_COLUMN_WIDTH * number
    left = matrix_right + width / 3  # a third of a column's width separates the columns from the matrix
    right = left + width * len(columns)
    cells = np.stack(list(columns.values()), axis=1)
    cmap = colormaps[SIDE_COLORS].with_extremes(bad=UNKNOWN)
    axes.imshow(cells, cmap, Normalize(0, 1), aspect="auto", extent=(left, right, bottom, top))
    for place, (name, values) in enumerate(columns.items()):
        middle = left + (place + 0.5) * width
        shown_name = name if is_last else ""
        _label_side_column(axes, middle, bottom, values, shown_name)
    # The limits leave space for two columns, so that the width of the matrix does not depend on their number.
    axes.set(xlim=(-0.5, left + 2.3 * width), ylim=(bottom, top))


def _label_side_column(axes: Axes, middle: float, bottom: float, values: npt.NDArray[np.float32], name: str) -> None:
    """Write below a column the mean of its known `values` in % and, if `name` is not empty, the column's name.

    `middle` and `bottom` are the horizontal centre and the lower end of the column in data coordinates.
    """
    below: Any = {"ha": "center", "va": "top", "textcoords": "offset points"}
    known = values[np.isfinite(values)]
    if len(known):
        percent = 100 * known.mean()
        axes.annotate(f"{percent:.0f}", (middle, bottom), (0, -1.5), fontsize=4.5, **below)
    if name:
        axes.annotate(name, (middle, bottom), (0, -8.5), rotation=90, fontsize=style.LABEL_SIZE, **below)


def _list_side_columns(shares: npt.NDArray[np.float32], part: range) -> dict[str, npt.NDArray[np.float32]]:
    """Return the columns beside a matrix by name: each shown token's own share, and the share of tokens not shown.

    `shares` `[part, tokens]` contains the shares of all tokens in each shown token. The second column is omitted if the
    whole text is shown.
    """
    shown, tokens = shares.shape
    columns = {"itself": shares[np.arange(shown), list(part)]}
    if shown < tokens:
        shares_outside = np.delete(shares, part, axis=1)
        columns["rest of text"] = shares_outside.sum(axis=1)
    return columns


def label_tokens(axes: Axes, labels: list[str], side: Any) -> None:
    """Write the labels of tokens along an axis; `side` is `x` or `y`."""
    rotation = 90 if side == "x" else 0
    axes.tick_params(side, length=0, pad=1, labelsize=style.LABEL_SIZE, labelrotation=rotation)
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_ticks(range(len(labels)), labels)
