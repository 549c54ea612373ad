"""What the reviews and the model were when they were last looked at: a digest of each file, kept in git."""

from pathlib import Path

SOURCES = Path("reports/sources.json")
