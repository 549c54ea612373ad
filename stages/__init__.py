"""The pipeline: one module for each stage, started by `python -m stages <stage>`."""

from attnmix.core.extras import require_extra

require_extra("pipeline", "the pipeline")
