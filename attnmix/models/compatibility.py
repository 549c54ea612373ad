"""Checks of a downloaded model, before anything long begins: that it reads the reviews, and can be observed."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from attnmix.core.errors import InputError
from attnmix.models.attention import AttentionCall, attention_by, observed
from attnmix.models.families import family_of
from attnmix.models.loading import load_base, load_config, load_tokenizer

RELATIVE_TOLERANCE = 1e-4  # rounding is 1e-6
SAMPLE_REVIEWS = 1000  # in which words are looked up
MAX_UNKNOWN_SHARE = 0.5  # of the words; beyond it most vectors are one token's
SHAPE_KEYS = ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_size")


def prove_model(folder: Path, texts: Sequence[str]) -> None:
    """Raise `InputError` for a model that cannot read `texts`, is of no known family, or attends in another way.

    The first text runs twice, by the library's own attention and by the one that the measures observe.
    """
    family_of(load_config(folder))
    base: Any = load_base(folder)
    tokenizer = load_tokenizer(folder)
    _check_vocabulary(folder, tokenizer, base.get_input_embeddings().num_embeddings)
    _check_words(folder, tokenizer, texts[:SAMPLE_REVIEWS])
    tokens = tokenizer(texts[0], truncation=True, max_length=32, return_tensors="pt")["input_ids"]
    calls: list[AttentionCall] = []
    with torch.inference_mode():
        expected = base(tokens).last_hidden_state
        with attention_by(observed(lambda _module, call: calls.append(call))):
            vectors = base(tokens).last_hidden_state
    if not calls:
        raise InputError(f"model.name: {folder} does not call the library's attention function; it cannot be measured")
    if not expected.isfinite().all():
        raise InputError(f"model.name: {folder} gives NaN or infinite values for a review; its weights are broken")
    error = float((vectors - expected).abs().max() / expected.abs().max())
    if not error <= RELATIVE_TOLERANCE:
        raise InputError(
            f"model.name: {folder} attends to tokens in a way that cannot be looked into: with query, key, value and "
            f"mask alone its vectors are {error:.2g} of their size away from its own"
        )


def prove_pair(base: Path, own: Path, texts: Sequence[str]) -> None:
    """Raise `InputError` where two checkpoints cannot be compared token by token and layer by layer."""
    configs = [load_config(folder) for folder in (base, own)]
    for key in SHAPE_KEYS:
        first, second = (getattr(config, key) for config in configs)
        if first != second:
            raise InputError(f"model.base: its {key} is {first}, that of model.name {second}; allowed: the same")
    tokenizers = [load_tokenizer(folder) for folder in (base, own)]
    for text in texts[:SAMPLE_REVIEWS]:
        if tokenizers[0](text)["input_ids"] != tokenizers[1](text)["input_ids"]:
            raise InputError(
                f"model.base: its tokenizer reads {text[:60]!r} otherwise than that of model.name; allowed: the same"
            )


def _check_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerFast, rows: int) -> None:
    """Raise `InputError` where a text can give a token without a row; special tokens' names in a text are text."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    known = {number: token for token, number in tokenizer.get_vocab().items() if token not in special}
    known |= {number: str(tokenizer.convert_ids_to_tokens(number)) for number in tokenizer("")["input_ids"]}
    beyond = sorted(number for number in known if number >= rows)
    if beyond:
        raise InputError(
            f"model.name: the tokenizer of {folder} knows {len(beyond)} tokens that the embedding of {rows} rows does "
            f"not have, the first {known[beyond[0]]!r} with the number {beyond[0]}; take the tokenizer of these weights"
        )


def _check_words(folder: Path, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
    """Raise `InputError` where the vocabulary lacks most words, each counted as often as it occurs."""
    words = Counter(word for text in texts for word in re.findall(r"\w+", text))
    if tokenizer.unk_token_id is None or not words:
        return
    encoded = tokenizer(list(words), add_special_tokens=False)["input_ids"]
    unknown = [word for word, ids in zip(words, encoded, strict=True) if tokenizer.unk_token_id in ids]
    share = sum(words[word] for word in unknown) / words.total()
    extent = f"{100 * share:.1f} % of the words of {len(texts)} reviews"
    if share > MAX_UNKNOWN_SHARE:
        raise InputError(
            f"model.name: the vocabulary of {folder} has no token for {extent}, such as "
            f"{', '.join(map(repr, unknown[:3]))}; allowed: half of them at most, so a model of the reviews' language"
        )
    if unknown:
        logging.info("unknown to the model's tokenizer: %s", extent)
