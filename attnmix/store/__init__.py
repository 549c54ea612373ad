"""What the stages leave on disk: every path, with its reader and its writer."""

from pathlib import Path

ACTIVATIONS = Path("features/capture")
