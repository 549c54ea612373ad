"""The reference computation against each family's own forward pass: what it measures is what the model does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, write_family
from family_reference import run_reference
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

TEXT = "the film was very good . time flies like an arrow , and the plot was so lovely ! it is not dull ."
# The library's RMSNorm, rotary embedding and softmax compute in float32 whatever the model's type.
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize("name", FAMILIES)
def test_features_and_attention_are_the_models_own(name: str, tmp_path: Path) -> None:
    write_family(name, tmp_path)
    logging.set_verbosity_error()  # the classifier's head is left out
    base = AutoModel.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float64).eval()
    ids = AutoTokenizer.from_pretrained(tmp_path)(TEXT)["input_ids"]
    with torch.no_grad():
        own = base(torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
    sides = ("encoder_", "decoder_") if name == "bart" else ("",)
    reference = run_reference(name, base, ids)

    attentions = [weights[0].numpy() for side in sides for weights in own[f"{side}attentions"]]
    assert len(attentions) == len(reference.layers)
    for layer, weights in zip(reference.layers, attentions, strict=True):
        np.testing.assert_allclose(layer.attention, weights, **CLOSE)

    number = 0
    for side in sides:
        states = [state[0].numpy() for state in own[f"{side}hidden_states"]]
        embedding = "decoder_embedding_output" if side == "decoder_" else "embedding_output"
        np.testing.assert_allclose(reference.features[0, embedding], states[0], **CLOSE)
        for state in states[1:]:
            number += 1
            output = reference.features[number, "layer_output"]
            if state is states[-1] and not reference.layers[-1].post_norm:
                continue  # after the final norm
            np.testing.assert_allclose(output, state, **CLOSE)
