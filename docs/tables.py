"""The tables in the documents that follow from the code's declarations.

    python -m docs.tables

Writes them between `<!-- table: NAME -->` and `<!-- end of table -->` in README.md and docs/measures.md; a test holds
them equal to the code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from stages.mixing.matrices import MATRICES
from stages.mixing.ratios import RATIOS
from stages.sites import EMBEDDING_POINTS, POINTS
from stages.vocabulary import POINT_MEANINGS

DOCUMENTS = ("README.md", "docs/measures.md")
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """Every table by its name, as Markdown."""
    ratios = [
        (f"`{each.name}`", each.mark.label, _code(each.definition), each.covers, each.source)
        for each in RATIOS.values()
    ]
    matrices = [
        (f"`{each.name}`", each.label, _code(each.definition), each.rows, each.source) for each in MATRICES.values()
    ]
    points = [
        (f"`{point}`" + (" (level 0)" if point in EMBEDDING_POINTS else ""), POINT_MEANINGS[point]) for point in POINTS
    ]
    return {
        "ratios": _markdown(("column", "name", "ratio", "of", "source"), ratios),
        "matrices": _markdown(("method", "name", "entry", "rows", "source"), matrices),
        "points": _markdown(("point", "what it is"), points),
    }


def with_tables(text: str) -> str:
    """A document with its tables made anew."""
    made = tables()
    return MARKED.sub(lambda match: match[1] + made[match[2]] + match[3], text)


def _code(formula: str) -> str:
    return formula.replace("|", "\\|")


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    for name in DOCUMENTS:
        path = Path(name)
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
