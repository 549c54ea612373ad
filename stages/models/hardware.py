"""Where the tensors live. Apart from `loading`, so that maps need not import transformers."""

from __future__ import annotations

import torch


def device() -> torch.device:
    """This process's accelerator, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
