"""Capture the feature vectors of the selected texts at the selected capture points.

    python -m stages capture
    torchrun --nproc-per-node 4 -m stages capture

Writes `features/capture/`; if `capture.store` is a different location, the arrays are written there and a manifest
refers to them.
"""

from pathlib import Path

from attnmix.core.arithmetic.kernels import set_arithmetic
from attnmix.core.device import chosen_device
from attnmix.core.disk import check_folder
from attnmix.core.errors import InputError
from attnmix.core.names import ACTIVATIONS
from attnmix.core.settings import CaptureParameters
from attnmix.core.store.runs import Run
from attnmix.runs.capture import capture_checkpoint
from stages.common.parameters import Parameters
from stages.common.resume import unfinished_folder


def main(parameters: Parameters) -> None:
    """Capture the vectors of the selected texts in the fine-tuned classifier."""
    run = Run(Path())
    capture = parameters.capture
    check_store(capture)
    set_arithmetic(parameters.arithmetic)
    folder = unfinished_folder("capture", parameters, run.root)
    capture_checkpoint(capture, run.finetuned, run, folder, device=chosen_device())


def check_store(capture: CaptureParameters) -> None:
    """Raise `InputError` if `capture.store` is a folder inside `ACTIVATIONS`, or contains unrelated files."""
    if not capture.elsewhere or "://" in capture.store:
        return
    folder = Path(capture.store)
    if folder.absolute().is_relative_to(ACTIVATIONS.absolute()):
        problem = f"{capture.store} is in {ACTIVATIONS}, which each run replaces"
        raise InputError(f"capture.store: {problem}; allowed: {ACTIVATIONS}, or a folder outside it")
    check_folder("capture.store", folder, ["layer_[0-9]*"])
