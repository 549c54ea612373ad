"""Run one stage in a folder with params.yaml.

python -m stages measure
torchrun --nproc-per-node 4 -m stages measure
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    try:
        from attnmix.core.extras import require_extra

        require_extra("pipeline", "the pipeline")
        from stages.common.cli import main
    except ImportError as error:
        # DVC runs the first `python` of PATH, which is another one if the project's environment is not active.
        inactive = Path(".venv").exists() and Path(sys.prefix).resolve() != Path(".venv").resolve()
        advice = "; activate the environment first: source .venv/bin/activate" if inactive else ""
        sys.exit(f"error: {sys.executable}: {error}{advice}")
    main(sys.argv[1:])
