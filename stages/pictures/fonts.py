"""The figures' own font, and which fonts of this machine draw the letters that it lacks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

from fontpkg_arimo import ROOT
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.ft2font import FaceFlags

OWN = ROOT / "files" / "Arimo[wght].ttf"
"""Its letters are as wide as Helvetica's, and it goes into a PDF as it is, as Type 42."""
IN_ITS_PLACE = "'Arimo', Helvetica, Arial, 'Liberation Sans'"  # where an svg is read that has no Arimo
JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"  # they shape the letters beside them, and are not drawn
NO_LETTERS = "Last Resort"  # matplotlib's font of boxes
NAMED = 10  # letters in one warning
REGULAR = (400, "normal", "regular", "book")


@cache
def know_own_font() -> None:
    """Tell matplotlib of it; a font of that name that this machine has comes after it."""
    fontManager.addfont(OWN)
    fontManager.ttflist.insert(0, fontManager.ttflist.pop())


@cache
def letters_of(family: str) -> frozenset[str]:
    """The letters that matplotlib draws with a font family."""
    font = get_font(findfont(FontProperties(family=[family])))
    return frozenset(map(chr, font.get_charmap()))


def can_draw(char: str, families: Iterable[str]) -> bool:
    """Whether one of the fonts has a sign for it."""
    return char in JOINERS or (char.isprintable() and any(char in letters_of(family) for family in families))


def fallbacks(texts: Iterable[str], families: Iterable[str]) -> list[str]:
    """Font families for the letters of `texts` that `families` lack, the one that has most of them first.

    A warning names those that none has.
    """
    own = list(families)
    lacking = {char for char in set().union(*texts) if char.isprintable() and not can_draw(char, own)}
    chosen: list[str] = []
    candidates = _regular_families() if lacking else []
    while lacking:
        # Of several that have as many, one without serifs, like the figures' own; names settle the rest.
        best = min(candidates, key=lambda name: (-len(lacking & letters_of(name)), "Sans" not in name, name))
        if not lacking & letters_of(best):
            break
        chosen.append(best)
        lacking -= letters_of(best)
    if lacking:
        named = ", ".join(f"{char} (U+{ord(char):04X})" for char in sorted(lacking)[:NAMED])
        more = f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
        logging.warning(
            "no font of this machine has %s%s: the figures show their code points; install one that has them",
            named,
            more,
        )
    return chosen


def _regular_families() -> list[str]:
    """Those with a face that is upright, regular and drawn in one colour; a face that cannot be read is none."""
    found = set()
    for entry in fontManager.ttflist:
        regular = entry.weight in REGULAR and entry.style == entry.variant == entry.stretch == "normal"
        if regular and entry.name not in found and not entry.name.startswith(NO_LETTERS):
            try:
                coloured = FaceFlags.COLOR in get_font(entry.fname).face_flags
                letters_of(entry.name)
            except (OSError, RuntimeError):
                continue
            if not coloured:
                found.add(entry.name)
    return sorted(found)
