"""The pictures in the README, from the figures of the last run.

python -m docs.pictures
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from stages.outputs.reports import FIGURES

DOCS = Path("docs")
WIDTH = 1100  # pixels
COLORS = 128


def main() -> None:
    last_page = max((FIGURES / "joint").glob("*.png"))
    _stack([FIGURES / "mixing_by_layer.png", last_page], DOCS / "result.png")
    _stack([FIGURES / "mixing_steps.png"], DOCS / "steps.png")
    _stack([FIGURES / "mixing_reviews.png"], DOCS / "reviews.png")


def _stack(sources: list[Path], output: Path) -> None:
    """One picture above the other, small enough for git."""
    parts = [Image.open(path).convert("RGB") for path in sources]
    scaled = [part.resize((WIDTH, round(part.height * WIDTH / part.width)), Image.Resampling.LANCZOS) for part in parts]
    picture = Image.new("RGB", (WIDTH, sum(part.height for part in scaled)), "white")
    top = 0
    for part in scaled:
        picture.paste(part, (0, top))
        top += part.height
    output.parent.mkdir(exist_ok=True)
    picture.quantize(COLORS).save(output, optimize=True)


if __name__ == "__main__":
    main()
