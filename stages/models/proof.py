"""What `download` proves of a model before anything long begins: that it can be looked into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stages.errors import InputError
from stages.models.attention import AttentionCall, attention_by, observed
from stages.models.families import family_of
from stages.models.loading import load_base, load_config, load_tokenizer

SAME = 1e-4  # relative; rounding is 1e-6


def prove_model(folder: Path, text: str) -> None:
    """`InputError` for a family that is not in the table, or a model of it that attends in another way.

    One text runs twice, with the library's own attention and with that which the measures look through.
    """
    family_of(load_config(folder))
    base: Any = load_base(folder)
    tokens = load_tokenizer(folder)(text, truncation=True, max_length=32, return_tensors="pt")["input_ids"]
    calls: list[AttentionCall] = []

    def listen(_module: Any, call: AttentionCall) -> None:
        calls.append(call)

    with torch.inference_mode():
        true = base(tokens).last_hidden_state
        with attention_by(observed(listen)):
            found = base(tokens).last_hidden_state
    if not calls:
        raise InputError(f"model.name: {folder} does not call the library's attention function; it cannot be measured")
    error = float((found - true).abs().max() / true.abs().max())
    if not error <= SAME:
        raise InputError(
            f"model.name: {folder} attends to tokens in a way that cannot be looked into: with query, key, value and "
            f"mask alone its vectors are {error:.2g} of their size away from its own"
        )
