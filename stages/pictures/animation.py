"""The pages of the joint map as one animation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from stages.pictures.figure_files import Pixels

WIDTH = 840  # pixels
COLORS = 96
LAST_FRAME = 8  # times as long as the others


def write_animation(frames: Sequence[Pixels], path: Path, frames_per_second: int) -> None:
    """An endless GIF of `frames`, `[height, width, 3]` each, with one palette for all."""
    height, width = frames[0].shape[:2]
    size = (WIDTH, round(height * WIDTH / width))
    small = [Image.fromarray(frame).resize(size, Image.Resampling.LANCZOS) for frame in frames]
    palette = _side_by_side([small[1 % len(small)], small[-1]]).quantize(COLORS, method=Image.Quantize.MAXCOVERAGE)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in small]
    durations = [round(1000 / frames_per_second)] * len(images)
    durations[-1] *= LAST_FRAME
    path.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=False)


def _side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """The first pages show kinds of points that later ones cover, the last page all the others."""
    width, height = images[0].size
    joined = Image.new("RGB", (width * len(images), height))
    for place, image in enumerate(images):
        joined.paste(image, (place * width, 0))
    return joined
