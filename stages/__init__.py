"""The pipeline: one module per stage, run with `python -m stages <stage>`."""
