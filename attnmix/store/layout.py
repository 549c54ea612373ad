"""The paths of a run's files below its root folder."""

from __future__ import annotations

from pathlib import Path

ACTIVATIONS = Path("features/capture")
"""Where `capture` writes the token vectors below the root, unless `capture.store` names another place."""
LAYER_PARTS = "layer_parts.json"  # in the folder that `measure` writes


class Layout:
    """The paths of everything that a run of the pipeline in the folder `root` reads and writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reviews = root / "data/reviews"
        self.pretrained = root / "models/pretrained"
        self.named_model = self.pretrained / "own"  # model.name, where model.base is the pretrained checkpoint
        self.finetuned = root / "models/finetuned"
        self.checkpoints = {"pretrained": self.pretrained, "finetuned": self.finetuned}
        self.test_predictions_file = root / "features/finetune/test.parquet"
        self.texts_file = root / "features/tokenize/texts.parquet"
        self.tokens_file = root / "features/tokenize/tokens.parquet"
        self.activations = root / ACTIVATIONS
        self.measured = root / "features/measure"
        self.maps = root / "features/reduce"
        self.token_scores_file = root / "features/faithfulness/captured.parquet"
        self.predictions_file = root / "features/faithfulness/predictions.parquet"
        self.layer_parts_file = self.measured / LAYER_PARTS
        self.metrics_folder = root / "reports/metrics"
        self.tables = root / "reports/plots"
        self.figures = root / "reports/figures"
        self.page = root / "reports/index.html"
        self.sources_file = root / "reports/sources.json"
        self.shown = root / "reports/show"

    @property
    def initial(self) -> Path:
        """The checkpoint that fine-tuning starts from: that of `model.name`."""
        return self.named_model if self.named_model.is_dir() else self.pretrained


def contributions_folder(checkpoint: str, document: str, measured: Path) -> Path:
    """Return the folder of a document's contribution matrices in one checkpoint, a `.zarr` for each method."""
    return measured / "contributions" / checkpoint / document.replace("/", "_")


def heads_folder(checkpoint: str, document: str, measured: Path) -> Path:
    """Return the folder of the parts of a document's heads, a `.zarr` for each of `attnmix.store.heads.DIMENSIONS`."""
    return measured / "heads" / checkpoint / document.replace("/", "_")
