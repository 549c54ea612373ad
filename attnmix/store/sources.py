"""What a data set or model of one's own was when it was last looked at: `reports/sources.json`, kept in git."""

from __future__ import annotations

import json
from pathlib import Path

SOURCES = Path("reports/sources.json")

Sources = dict[str, dict[str, dict[str, str]]]
"""By parameter, its value and the sha256 of each file under it."""


def write_sources(files: Sources) -> None:
    """`watched`, which dvc.yaml reads, is empty where there is nothing to look at."""
    found = {"files": files, "watched": ["own"] if files else []}
    part = SOURCES.with_name(f"{SOURCES.name}.part")  # a half of it would stop DVC, which reads it first
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(SOURCES)


def read_sources() -> Sources:
    files: Sources = json.loads(SOURCES.read_text(encoding="utf-8"))["files"] if SOURCES.exists() else {}
    return files
