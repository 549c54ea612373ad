"""The pipeline: one module for each stage, and packages named after what they know."""

import os
import sys

# Read by huggingface_hub, datasets and transformers when they are imported.
if not sys.stderr.isatty():
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# Its transfers know nothing of `attnmix/hub/retries.py`.
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
# Asked for by torch's deterministic algorithms on a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# So `python -m stages.measure` starts, before Python imports that stage, whose libraries take seconds.
if sys.argv[:1] == ["-m"]:
    from stages.cli import prepare

    prepare()
