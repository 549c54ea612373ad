"""Reviews of three classes in scripts other than Latin, made up here; their words settle the class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Script:
    """What reviews are made of: a sentence's parts, and for each class its name and verdicts."""

    columns: tuple[str, str]
    subjects: tuple[str, ...]
    verdicts: dict[str, tuple[str, ...]]
    sentence: str
    signs: tuple[str, ...]


JAPANESE = Script(
    columns=("感想", "評価"),
    subjects=("この映画", "脚本", "主演の演技", "音楽", "最後の場面"),
    verdicts={
        "肯定": ("とても良かった", "素晴らしい", "心に残った"),
        "否定": ("退屈だった", "ひどい", "二度と見たくない"),
        "中立": ("普通だった", "どちらとも言えない", "まあまあだ"),
    },
    sentence="{subject}は{verdict}。",
    signs=("👨‍👩‍👧", "😀", "カフェ"),
)
ARABIC = Script(
    columns=("المراجعة", "الحكم"),
    subjects=("الفيلم", "السيناريو", "أداء الممثلة", "الموسيقى", "المشهد الأخير"),
    verdicts={
        "إيجابي": ("رائع جدا", "جميل ومؤثر", "ممتاز"),
        "سلبي": ("ممل للغاية", "سيئ", "مخيب للآمال"),
        "محايد": ("عادي", "لا بأس به", "متوسط"),
    },
    sentence="{subject} {verdict}.",
    signs=("IMAX 3D", "٢٠٢٤", "«نعم»"),
)


def reviews_in(script: Script, number: int) -> pd.DataFrame:
    """Classes in turn, no text twice."""
    generator = np.random.default_rng(0)
    names = list(script.verdicts)
    rows: dict[str, str] = {}
    while len(rows) < number:
        name = names[len(rows) % len(names)]
        parts = [
            script.sentence.format(
                subject=generator.choice(script.subjects), verdict=generator.choice(script.verdicts[name])
            )
            for _ in range(generator.integers(2, 5))
        ]
        rows[" ".join([*parts, str(generator.choice(script.signs))])] = name
    return pd.DataFrame(rows.items(), columns=list(script.columns))
