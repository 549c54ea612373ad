"""Where the two checkpoints of the model lie: configuration, tokenizer, safetensors. `attnmix.models` reads them."""

from pathlib import Path

PRETRAINED = Path("models/pretrained")
FINETUNED = Path("models/finetuned")
OWN = PRETRAINED / "own"
"""Of `model.name`, where `model.base` is the pretrained checkpoint."""
CHECKPOINT_FOLDERS = {"pretrained": PRETRAINED, "finetuned": FINETUNED}


def start() -> Path:
    """What fine-tuning starts from: the checkpoint of `model.name`."""
    return OWN if OWN.is_dir() else PRETRAINED
