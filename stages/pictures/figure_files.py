"""Figures to files, byte for byte the same every time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

Pixels = npt.NDArray[np.uint8]

# No date and no version of the program in the file.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "ModDate": None, "Producer": None, "Creator": None},
    "svg": {"Date": None, "Creator": None},
}


def save_figure(figure: Figure, path: Path, formats: Sequence[str], dpi: int) -> None:
    """Save as `path` with each format's suffix; draw under `paper_style`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in formats:
        figure.savefig(path.with_suffix(f".{suffix}"), format=suffix, dpi=dpi, metadata=METADATA[suffix])


def save_pixels(pixels: Pixels, path: Path, dpi: int) -> None:
    """Save `[height, width, 3 or 4]` as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, dpi=(dpi, dpi), compress_level=4)


def canvas_pixels(canvas: FigureCanvasAgg) -> Pixels:
    """A copy of what the canvas shows, `[height, width, 3]`."""
    return np.array(canvas.buffer_rgba(), dtype=np.uint8)[..., :3]
