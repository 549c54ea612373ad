"""The pipeline: one module per stage, run with `python -m stages <stage>`."""

from attnmix.core.extras import require_extra

require_extra("pipeline", "the pipeline")
