"""The pipeline: one module per stage, run with `python -m stages <stage>`."""

import sys
from pathlib import Path

try:
    from attnmix.core.extras import require_extra

    require_extra("pipeline", "the pipeline")
except ImportError as error:
    # DVC runs the first `python` on PATH, which is a different Python if the project's environment is not active.
    environment = Path(".venv")
    is_inactive = environment.exists() and Path(sys.prefix).resolve() != environment.resolve()
    advice = "; activate the environment first: source .venv/bin/activate" if is_inactive else ""
    sys.exit(f"error: {sys.executable}: {error}{advice}")
