"""The pipeline: one module for each stage, started by `python -m stages <stage>`."""
