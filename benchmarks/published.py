"""The published table of mixing ratios, for any checkpoint folder and any texts, offline.

    python -m benchmarks.published <checkpoint folder> <texts> [--documents 992] [--max-length 512]

`<texts>` is a parquet, csv or jsonl file with a column `text`, or a plain file with one text a line.
Prints each method's mean over all tokens and layers in per cent, each layer's `attention_gain`, and beside
them what Kobayashi et al. (EMNLP 2021, table 2) give for BERT-base and RoBERTa-base on Wikipedia.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from stages.errors import InputError
from stages.maps.neighbours import device
from stages.mixing.batches import BatchMeasurer
from stages.mixing.documents import chosen_documents
from stages.mixing.layers import attention_gain
from stages.models.encoding import batches_by_tokens
from stages.models.loading import check_max_length, load_base, load_tokenizer
from stages.reviews.source import READERS

PUBLISHED = {
    "attn_w": (97.1, 95.8),
    "attnres_w": (48.6, 47.9),
    "attn_n": (85.2, 84.4),
    "attnres_n": (22.3, 19.6),
    "attnresln_n": (18.8, 16.2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--documents", type=int, default=992)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    folder = arguments.checkpoint
    check_max_length("--max-length", arguments.max_length, folder)
    tokenizer, base = load_tokenizer(folder), load_base(folder).to(device())
    texts = {f"text/{i}": text for i, text in enumerate(_read_texts(arguments.texts)[: arguments.documents])}
    documents = chosen_documents(tokenizer, {}, texts, arguments.max_length, arguments.max_length)
    measurer = BatchMeasurer(base, folder, tuple(PUBLISHED), tokenizer.pad_token_id)
    sums, tokens = np.zeros((len(PUBLISHED), measurer.layers)), 0
    batches = batches_by_tokens([len(document) for document in documents], arguments.batch_tokens)
    for batch in tqdm(batches, unit="batch", disable=not sys.stderr.isatty()):
        for measures in measurer.measures([documents[i] for i in batch]):
            sums += measures.ratios.sum(-1, dtype=np.float64)
            tokens += measures.ratios.shape[-1]
    print(f"{folder}: {len(documents)} texts, {tokens} tokens, {measurer.layers} layers")
    print(f"{'method':12s} {'measured':>9s} {'BERT-base':>10s} {'RoBERTa-base':>13s}   by layer")
    for (method, (bert, roberta)), by_layer in zip(PUBLISHED.items(), 100 * sums / tokens, strict=True):
        shown = " ".join(f"{value:.1f}" for value in by_layer)
        print(f"{method:12s} {by_layer.mean():9.1f} {bert:10.1f} {roberta:13.1f}   {shown}")
    print("attention_gain", " ".join(f"{attention_gain(weights):.3f}" for weights in measurer.weights))


def _read_texts(path: Path) -> list[str]:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    if path.suffix not in READERS:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    frame: pd.DataFrame = READERS[path.suffix](path)
    if "text" not in frame:
        raise InputError(f"{path} has no column 'text'; it has {', '.join(map(str, frame.columns))}")
    return frame["text"].astype(str).tolist()


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
