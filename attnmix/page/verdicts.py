"""Functions that describe differences and their intervals in words, with the same verdicts everywhere on the page.

The verdicts follow the rules of `attnmix.compare`: there is no verdict for fewer than `MIN_SIMULTANEOUS` texts, a
difference is "inconclusive" if its interval includes 0, and no verdict states that there is no change.
"""

from __future__ import annotations

import math

from attnmix.core.statistics import MIN_INTERVAL_DOCUMENTS, MIN_SIMULTANEOUS, Verdict, verdict

MAX_DIGITS = 3  # decimal places of a difference in percentage points
VERBS = {
    Verdict.HIGHER: "rises",
    Verdict.LOWER: "falls",
    Verdict.INCONCLUSIVE: "is inconclusive",
    Verdict.TOO_FEW_TEXTS: "has no verdict",
    Verdict.NO_INTERVAL: "has no verdict",
}


def signed(number: float, form: str = ".2f") -> str:
    """Return a number as text with a typographic minus sign; zero has no minus sign."""
    text = f"{number:{form}}"
    return text.replace("-", "\N{MINUS SIGN}" if float(text) else "")


def points(difference: float) -> str:
    """Return a difference of shares in percentage points, with its sign."""
    return signed(100 * difference, "+.1f")


def points_alike(*differences: float) -> list[str]:
    """Return differences in percentage points, with the fewest decimal places for which nonzero values differ from 0.

    If the limit of an interval were rounded to 0, readers could not see whether the interval includes 0. All
    differences have the same number of decimal places. If three decimal places are not enough, one decimal place is
    used.

    Example:
        >>> points_alike(-0.0004, 0.001)
        ['\N{MINUS SIGN}0.04', '+0.10']
    """
    digits = 1
    for candidate in range(1, MAX_DIGITS + 1):
        if not any(_rounds_to_zero(difference, candidate) for difference in differences):
            digits = candidate
            break
    return [signed(100 * difference, f"+.{digits}f") for difference in differences]


def _rounds_to_zero(difference: float, digits: int) -> bool:
    """Return True for a nonzero difference that becomes 0 in percentage points with `digits` decimal places."""
    if difference == 0:
        return False
    text = f"{100 * difference:.{digits}f}"
    return float(text) == 0


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, such as `40 reviews` or `1 review`; `noun` is the plural."""
    if number == 1:
        noun = noun.removesuffix("s")
    return f"{number:.0f} {noun}"


def too_few(number: float, noun: str) -> str:
    """Return the beginning of a reason such as `3 reviews are too few`; `noun` is the plural."""
    verb = "is" if number == 1 else "are"
    return f"{counted(number, noun)} {verb} too few"


def interval_text(low: float, high: float, documents: float, noun: str, kind: str = "95% interval") -> str:
    """Return the interval of a difference and the number of texts, or only the number if there are too few texts.

    Example:
        >>> interval_text(0.01, 0.02, 40, "reviews")
        '95% interval +1.0 to +2.0, 40 reviews'
    """
    number = counted(documents, noun)
    if documents < MIN_INTERVAL_DOCUMENTS or math.isnan(low) or math.isnan(high):
        return number
    first, last = points_alike(low, high)
    return f"{kind} {first} to {last}, {number}"


def why_no_verdict(low: float, high: float, documents: float, noun: str) -> str:
    """Return the reason why the direction of a difference is not known; an empty string if it is known."""
    outcome = verdict(low, high, documents)
    if outcome is Verdict.TOO_FEW_TEXTS:
        return f"{too_few(documents, noun)} for a verdict, which needs {MIN_SIMULTANEOUS} or more"
    if outcome is Verdict.NO_INTERVAL:
        return f"the difference is the same in all {noun}, so it has no interval"
    if outcome is Verdict.INCONCLUSIVE:
        return "the interval includes 0"
    return ""
