"""Tables of the measurements in `benchmarks/RESULTS.md`, and the cost of a billion tokens computed from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from attnmix.core.store.files import read_results

RESULTS = Path(__file__).parents[1] / "benchmarks" / "RESULTS.md"
PLAN = ("work", "tokens a second", "core-hours", "kept")
RATIOS = "Mixing ratios, default model, portable arithmetic"
BILLION = 10**9
SECONDS = 3600
FLOAT16 = 2  # bytes
POINTS = r"(\d+) points"


class Work(NamedTuple):
    """A row of the cost table, computed from a row (`way`) of a section of `benchmarks/RESULTS.md`."""

    name: str
    section: str
    way: str


WORKS = (
    Work("forward passes of the default model", "Capture, default model", "bare forward passes"),
    Work("`capture` of it", "Capture, default model", "stage capture"),
    Work("forward passes of BERT-base's shape", "Capture, BERT-base's shape", "bare forward passes"),
    Work("`capture` of it", "Capture, BERT-base's shape", "stage capture"),
    Work("six ratios of the default model", RATIOS, "mixing ratios"),
    Work("all that `measure` reads of it", RATIOS, "all that `measure` reads from a batch"),
)


def plan() -> list[tuple[str, ...]]:
    """Return the rows of the cost table, one for each of `WORKS`, with the columns `PLAN`."""
    sections = _sections()
    return [_row(work, sections[work.section]) for work in WORKS]


def terabytes(section: str) -> float:
    """Return the terabytes of a billion tokens' vectors in float16, at the capture points in a section of RESULTS."""
    text = _sections()[section]
    return _number(POINTS, text) * _number(r"points of (\d+) numbers", text) * FLOAT16 * BILLION / 1e12


def read_rates(row: str, path: str = "benchmarks/card_h200.csv") -> tuple[int, int]:
    """Return the tokens per second in a row of the GPU measurements, for the stage and for bare forward passes."""
    result = read_results(Path(path)).set_index("row").loc[row, "result"]
    return _number(r"([\d,]+) tokens/s", result), _number(r"bare ([\d,]+)", result)


def _sections() -> dict[str, str]:
    """Return the sections of the results by their headings."""
    return {each.partition("\n")[0]: each for each in RESULTS.read_text(encoding="utf-8").split("\n## ")[1:]}


def _row(work: Work, section: str) -> tuple[str, ...]:
    """Return a row with the columns `PLAN`; `section` is the text of the work's section of the results."""
    tokens = _number(r"([\d,]+) tokens", section)
    cores = _number(r"(\d+) cores", section)
    seconds = _median(section, work.way)
    tokens_per_second = tokens / seconds
    core_hours = cores * BILLION / tokens_per_second / SECONDS  # for a billion tokens
    if "forward" in work.name:
        kept = "nothing"
    elif "capture" in work.name:
        points = _number(POINTS, section)
        kept = f"{terabytes(work.section):.0f} TB ({points} points)"
    else:
        kept = "sums"
    return work.name, f"{tokens_per_second:,.0f}", f"{core_hours:,.0f}", kept


def _number(pattern: str, section: str) -> int:
    """Return the first number in a section that matches the group of a regular expression."""
    found = re.search(pattern, section)
    if not found:
        raise ValueError(f"{RESULTS}: no {pattern} in {section[:80]!r}")
    return int(found[1].replace(",", ""))


def _median(section: str, way: str) -> float:
    """Return the median seconds in the row of a way in the table of a section."""
    cells = next(line.split(" | ") for line in section.splitlines() if line.startswith(f"| {way} | "))
    return float(cells[1].partition(" ")[0])
