"""Functions that read cells and pixels of the page's picture of tokens by layers, and compute the expected values."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from attnmix.core.names import INPUT_PARTS
from attnmix.core.store.runs import Run


def drawn(page: Any) -> dict[str, Any]:
    return dict(page.evaluate("document.getElementById('grid-canvas').drawn()"))


def pixels(page: Any) -> Any:
    """Return the pixels of the picture on the screen, one for each CSS pixel."""
    content = page.locator("#grid-canvas").screenshot(scale="css")
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"), dtype=float)


def colour_of(image: Any, cell: Any, size: tuple[float, float]) -> str:
    """Return the colour of a cell near its lower left corner, away from lines and numbers."""
    _, height = size
    red, green, blue = image[round(cell["y"] + height - 3), round(cell["x"] + 2)]
    return f"#{int(red):02x}{int(green):02x}{int(blue):02x}"


def displayed_values(checkpoint: str, document: str, method: str) -> Any:
    """Return the displayed values `[layers, tokens]`, computed from the files of the run."""
    run = Run(Path())
    if method == INPUT_PARTS:
        matrix = np.asarray(run.matrix(checkpoint, document, method), dtype=float)
        return np.diagonal(matrix, axis1=1, axis2=2) / matrix.sum(-1)
    rows = run.captured_ratios([document]).query(f"checkpoint == '{checkpoint}'")
    return rows.pivot(index="layer", columns="position", values=method).to_numpy(float)
