"""Where the two checkpoints of the model lie: configuration, tokenizer, safetensors. `stages.models` reads them."""

from pathlib import Path

PRETRAINED = Path("models/pretrained")
FINETUNED = Path("models/finetuned")
CHECKPOINT_FOLDERS = {"pretrained": PRETRAINED, "finetuned": FINETUNED}
