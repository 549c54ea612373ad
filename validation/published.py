"""Compute the table of mixing ratios of Kobayashi et al. (EMNLP 2021) for a local checkpoint and local texts.

    python -m validation.published <checkpoint folder> <texts> [--protocol plain] [--documents 992] [--max-length 128]

The protocol follows the authors' public scripts (`data_extract.py`, `mixing_ratio_stats_bert.py`): pairs of segments of
at most 128 tokens, with 12 % of the tokens masked. `<texts>` is one of three kinds of files: a json file of records
with `tokens` of the form `[CLS] A [SEP] B [SEP]`; a parquet, csv or jsonl file with the columns `first` and `second`,
or `text`; or a plain file with one text per line. Single texts are split after half of their words. `--protocol plain`
measures each unchanged text as one segment, without masking. The program prints the mean, maximum and minimum of each
method over all tokens and layers in per cent, next to the values of Kobayashi et al. (EMNLP 2021) for BERT-base and
RoBERTa-base on Wikipedia. It also prints the `attention_gain` and the `expansion_rate` of each layer.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.core.device import chosen_device
from attnmix.core.errors import InputError
from attnmix.data.files import read_file
from attnmix.data.formats import data_suffix
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.contributions import attention_gain
from attnmix.measures.layers import LayerPass, map_layers, run_layers, value_map
from attnmix.measures.ratios import mixing_ratios
from attnmix.measures.weights import Linear
from attnmix.models.checkpoint import check_max_length, load_tokenizer
from attnmix.models.encoding import batches_by_tokens, padded
from attnmix.models.loading import load_base

PUBLISHED = {
    "attn_w": (97.1, 95.8),
    "attnres_w": (48.6, 47.9),
    "attn_n": (85.2, 84.4),
    "attnres_n": (22.3, 19.6),
    "attnresln_n": (18.8, 16.2),
}
"""Mean ratios of BERT-base and RoBERTa-base in the paper's table, in per cent."""
STORED = {
    "attn_w": (96.41, 95.81),
    "attnres_w": (48.21, 47.91),
    "attn_n": (85.28, 84.42),
    "attnres_n": (22.25, 19.55),
    "attnresln_n": (18.75, 16.24),
}
"""Mean ratios of the same models in the stored output of the authors' public notebook `emnlp2021/run.ipynb`."""
MASKED = 0.12  # share of the tokens that are masked
MASK_SEED = 0


class Text(NamedTuple):
    """The token IDs of a text, and the segment (0 or 1) of each token."""

    ids: list[int]
    segments: list[int]


def main() -> None:
    """Measure the ratios, and print them next to the published values."""
    arguments = _parse_arguments()
    folder = arguments.checkpoint
    check_max_length("--max-length", arguments.max_length, folder)
    tokenizer = load_tokenizer(folder)
    base = load_base(folder).to(chosen_device())
    read = read_pairs if arguments.protocol == "published" else read_plain
    texts = read(arguments.texts, tokenizer, arguments.documents, arguments.max_length)
    if arguments.protocol == "published":
        texts = masked(texts, tokenizer)
    methods = BatchMeasurer(base, tuple(PUBLISHED), tokenizer.pad_token_id).methods
    ratios = measure(base, folder, tokenizer.pad_token_id, methods, texts, arguments.batch_tokens)
    print(f"{folder}: {len(texts)} texts, {ratios.shape[-1]} tokens, {ratios.shape[1]} layers, {arguments.protocol}")
    print(f"{'':12s} {'measured':>30s}   {'BERT-base':>17s}   {'RoBERTa-base':>17s}")
    print(f"{'method':12s} {'mean':>10s}{'largest':>10s}{'smallest':>10s}" + 2 * f"   {'paper':>8s} {'notebook':>8s}")
    for method, values in zip(methods, 100 * ratios, strict=True):
        published = ""
        for in_paper, in_notebook in zip(PUBLISHED[method], STORED[method], strict=True):
            published += f"   {in_paper:8.1f} {in_notebook:8.2f}"
        print(f"{method:12s} {values.mean():10.2f}{values.max():10.2f}{values.min():10.2f}{published}")
        print(f"{'':12s} by layer: {' '.join(f'{value:.1f}' for value in values.mean(-1))}")
    for name, by_layer in gains(base, folder).items():
        print(f"{name:15s} {' '.join(f'{value:.3f}' for value in by_layer)}, mean {np.mean(by_layer):.3f}")


def _parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--protocol", choices=("published", "plain"), default="published")
    parser.add_argument("--documents", type=int, default=992)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    return parser.parse_args()


def read_pairs(path: Path, tokenizer: PreTrainedTokenizerFast, documents: int, max_length: int) -> list[Text]:
    """Return the first `documents` pairs of segments in a file, truncated to `max_length` tokens.

    Texts that are not pairs are split after half of their words; texts of a single word are skipped.
    """
    if path.suffix == ".json":
        return [_of_tokens(tokens, tokenizer, max_length, path) for tokens in _read_tokens(path)[:documents]]
    frame = _read_frame(path)
    if {"first", "second"} <= set(frame):
        pairs = list(zip(frame["first"].astype(str), frame["second"].astype(str), strict=True))
    else:
        pairs = []
        for text in _texts(frame, path):
            words = text.split()[:max_length]  # every word has at least one token, so further words would be truncated
            if len(words) > 1:
                middle = (len(words) + 1) // 2
                pairs.append((" ".join(words[:middle]), " ".join(words[middle:])))
    texts = []
    for first, second in pairs[:documents]:
        encoding = tokenizer(first, second, truncation=True, max_length=max_length).encodings[0]
        texts.append(Text(list(encoding.ids), list(encoding.type_ids)))
    return texts


def read_plain(path: Path, tokenizer: PreTrainedTokenizerFast, documents: int, max_length: int) -> list[Text]:
    """Return the first `documents` texts, each as one segment."""
    texts = _texts(_read_frame(path), path)[:documents]
    encoded: list[list[int]] = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    return [Text(ids, [0] * len(ids)) for ids in encoded]


def masked(texts: Sequence[Text], tokenizer: PreTrainedTokenizerFast) -> list[Text]:
    """Return the texts with 12 % of their tokens masked (rounded down, but at least one token of each text).

    Special tokens are not masked. As in the authors' script, a single `random.Random(0)` samples the positions of each
    text without replacement. The same tokens therefore result in the same masked positions.
    """
    if tokenizer.mask_token_id is None:
        raise InputError("the tokenizer has no mask token; use --protocol plain")
    generator = random.Random(MASK_SEED)
    special = {tokenizer.cls_token_id, tokenizer.sep_token_id}
    changed = []
    for text in texts:
        candidates = [position for position, token in enumerate(text.ids) if token not in special]
        number = max(1, int(len(candidates) * MASKED))
        ids = list(text.ids)
        for position in generator.sample(candidates, number):
            ids[position] = tokenizer.mask_token_id
        changed.append(text._replace(ids=ids))
    return changed


def measure(
    base: PreTrainedModel,
    folder: Path,
    pad_token_id: int,
    methods: Sequence[str],
    texts: Sequence[Text],
    batch_tokens: int,
) -> npt.NDArray[np.float32]:
    """Return the ratios `[methods, layers, tokens]` of all tokens, including special and masked tokens."""
    measurer = BatchMeasurer(base, methods, pad_token_id)
    ratios_by_batch = []
    batches = batches_by_tokens([len(text.ids) for text in texts], batch_tokens)
    for batch in tqdm(batches, unit="batch", disable=not sys.stderr.isatty()):
        inputs = _inputs(base, [texts[i] for i in batch], pad_token_id)
        ratios_by_layer = map_layers(partial(mixing_ratios, measurer.methods), base, inputs)
        ratios_MLBT = torch.stack(ratios_by_layer, dim=1)  # M methods, L layers, B texts, T tokens
        is_token_BT = inputs["attention_mask"].bool()  # False for padding
        ratios_by_batch.append(ratios_MLBT[:, :, is_token_BT].cpu().numpy())
    return np.concatenate(ratios_by_batch, axis=-1)


def _inputs(base: PreTrainedModel, texts: Sequence[Text], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Return the padded inputs of the model, with segments if the model has segment embeddings."""
    inputs = padded([text.ids for text in texts], pad_token_id, base.device)
    if "token_type_ids" in inspect.signature(base.forward).parameters and base.config.type_vocab_size > 1:
        inputs["token_type_ids"] = padded([text.segments for text in texts], 0, base.device)["input_ids"]
    return inputs


def gains(base: PreTrainedModel, folder: Path) -> dict[str, list[float]]:
    """Return the lists `attention_gain` and `expansion_rate`, with one value per layer.

    The authors' `expansion_rate` is defined only if W_O is square; otherwise, it is omitted.
    """
    attention_gains: list[float] = []
    expansion_rates: list[float] = []

    def visit(layer_pass: LayerPass, _features: Mapping[Any, torch.Tensor]) -> None:
        """Append the values of one layer."""
        attention_gains.append(attention_gain(layer_pass))
        output = layer_pass.block.output
        is_square = len(output.W) == len(output.b)
        if is_square:
            expansion_rates.append(expansion_rate(value_map(layer_pass), output))

    one_token = padded([[1]], 0, base.device)  # any token, because the values depend only on the weights
    with torch.inference_mode():
        run_layers(base, one_token, visit)
    results = {"attention_gain": attention_gains}
    if expansion_rates:
        results["expansion_rate"] = expansion_rates
    return results


def expansion_rate(value: Linear, output: Linear) -> float:
    """Return |[W_V, 0; b_V, 1] [W_O, b_O; 0, 1]|_F / sqrt(d + 1), as in the authors' `expansion_rate_attn_f.py`.

    |.|_F is the Frobenius norm, and d is the width of vectors. In the authors' matrix, b_O is in the last column. In an
    affine map of [x, 1], b_O would be in the last row, as in `attention_gain`. `attention_gain` omits the last column
    (0, ..., 0, 1), which maps the constant 1 to itself.
    """
    W_V, b_V, W_O, b_O = (part.double() for part in (value.W, value.b, output.W, output.b))
    square = (W_V @ W_O).square().sum() + (W_V @ b_O).square().sum() + (b_V @ W_O).square().sum()
    return float(torch.sqrt((square + (b_V @ b_O + 1).square()) / (len(W_V) + 1)))


def _of_tokens(tokens: Sequence[str], tokenizer: PreTrainedTokenizerFast, max_length: int, path: Path) -> Text:
    """Return the text that consists of `tokens`; the second segment of the text starts after the first [SEP].

    Raise `InputError` for too many tokens or a missing [SEP]; `path` is the file for the error message.
    """
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(tokens))
    if len(ids) > max_length:
        raise InputError(f"{path}: a record has {len(ids)} tokens, more than --max-length {max_length}; increase it")
    if tokenizer.sep_token_id not in ids:
        raise InputError(f"{path}: a record has no {tokenizer.sep_token}; allowed: [CLS] A [SEP] B [SEP]")
    first = ids.index(tokenizer.sep_token_id) + 1
    return Text(ids, [0] * first + [1] * (len(ids) - first))


def _read_tokens(path: Path) -> list[list[str]]:
    """Return the `tokens` of each record in a json file."""
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    records = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(records, list) or not all(isinstance(each, dict) and "tokens" in each for each in records):
        raise InputError(f"{path} is not a list of records with `tokens`")
    return [each["tokens"] for each in records]


def _read_frame(path: Path) -> pd.DataFrame:
    """Return the texts in a file as a table; a plain file has one text per line, in the column `text`."""
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    if not data_suffix(path.name):
        lines: Iterator[str] = filter(str.strip, path.read_text(encoding="utf-8").splitlines())
        return pd.DataFrame({"text": list(lines)})
    return read_file(path)


def _texts(frame: pd.DataFrame, path: Path) -> list[str]:
    """Return the column `text`; raise `InputError` if it is missing in the file `path`."""
    if "text" not in frame:
        raise InputError(f"{path} has no column 'text'; it has {', '.join(map(str, frame.columns))}")
    return frame["text"].astype(str).tolist()


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
