"""What `download` proves of a model before anything long begins: that it can read the reviews, and be looked into."""

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

SAME = 1e-4  # relative; rounding is 1e-6
READ = 1000  # reviews in which words are looked up
MOST_UNKNOWN = 0.5
"""Of the words: beyond it most vectors are one token's, and what is measured is not of the texts."""
SHAPE = ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_size")


def prove_model(folder: Path, texts: Sequence[str]) -> None:
    """`InputError` for a model that cannot read `texts`, is of no family in the table, or attends in another way.

    The first text runs twice, with the library's own attention and with that which the measures look through.
    """
    family_of(load_config(folder))
    base: Any = load_base(folder)
    tokenizer = load_tokenizer(folder)
    _check_vocabulary(folder, tokenizer, base.get_input_embeddings().num_embeddings)
    _check_words(folder, tokenizer, texts[:READ])
    tokens = tokenizer(texts[0], truncation=True, max_length=32, return_tensors="pt")["input_ids"]
    calls: list[AttentionCall] = []

    def listen(_module: Any, call: AttentionCall) -> None:
        calls.append(call)

    with torch.inference_mode():
        true = base(tokens).last_hidden_state
        with attention_by(observed(listen)):
            found = base(tokens).last_hidden_state
    if not calls:
        raise InputError(f"model.name: {folder} does not call the library's attention function; it cannot be measured")
    if not true.isfinite().all():
        raise InputError(f"model.name: {folder} gives NaN or infinite values for a review; its weights are broken")
    error = float((found - true).abs().max() / true.abs().max())
    if not error <= SAME:
        raise InputError(
            f"model.name: {folder} attends to tokens in a way that cannot be looked into: with query, key, value and "
            f"mask alone its vectors are {error:.2g} of their size away from its own"
        )


def prove_pair(base: Path, own: Path, texts: Sequence[str]) -> None:
    """`InputError` where two checkpoints cannot be set beside each other, token by token and layer by layer."""
    configs = [load_config(folder) for folder in (base, own)]
    for key in SHAPE:
        there, here = (getattr(config, key) for config in configs)
        if there != here:
            raise InputError(f"model.base: its {key} is {there}, that of model.name {here}; allowed: the same")
    tokenizers = [load_tokenizer(folder) for folder in (base, own)]
    for text in texts[:READ]:
        if tokenizers[0](text)["input_ids"] != tokenizers[1](text)["input_ids"]:
            raise InputError(
                f"model.base: its tokenizer reads {text[:60]!r} otherwise than that of model.name; allowed: the same"
            )


def _check_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerFast, rows: int) -> None:
    """Every token that a text can give has its row; the name of a special token in a text is text."""
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
    """The vocabulary has a name for most words: runs of letters and digits, each as often as it stands there."""
    words = Counter(word for text in texts for word in re.findall(r"\w+", text))
    if tokenizer.unk_token_id is None or not words:
        return
    encoded = tokenizer(list(words), add_special_tokens=False)["input_ids"]
    unknown = [word for word, ids in zip(words, encoded, strict=True) if tokenizer.unk_token_id in ids]
    share = sum(words[word] for word in unknown) / words.total()
    said = f"{100 * share:.1f} % of the words of {len(texts)} reviews"
    if share > MOST_UNKNOWN:
        examples = ", ".join(repr(word) for word in unknown[:3])
        raise InputError(
            f"model.name: the vocabulary of {folder} has no token for {said}, such as {examples}; allowed: half of "
            "them at most, so a model of the reviews' language"
        )
    if unknown:
        logging.info("unknown to the model's tokenizer: %s", said)
