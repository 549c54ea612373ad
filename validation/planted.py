"""The values of the mixing measures for planted cases, which are models with known contributions of other tokens.

    python -m validation.planted [--seed 0] [--to docs/measures]

A case fools a measure if the measure's value is wrong. If nothing comes from other tokens, an absolute value above
`LIMIT` is wrong. If something comes from other tokens, a value that is missing or at most `LIMIT` is wrong. If other
tokens contribute only little, the value must instead be at least -`LIMIT` and less than half of the value for the case
`REFERENCE`, in which attention is uniform. If everything comes from other tokens, the value must also be above nine
tenths of the value for `REFERENCE`. Values are averaged over tokens 2 to 8, because the first token is the source or
the sink in some cases.

Shapes: B texts, T tokens, D hidden, L layers, M ratios, C controls, E = heads * head width, F features.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor
from torch.func import jvp

from attnmix.core.names import LAYER_POINTS, PREACTIVATION
from attnmix.measures.contributions import contributions, layer_contributions
from attnmix.measures.controls import SAME_PASS, ControlValues, control_ratios
from attnmix.measures.derivatives import FORMS, derivative_norms, document_chains, levels
from attnmix.measures.input_parts import PartsReader
from attnmix.measures.layers import LayerPass, map_layers
from attnmix.measures.matrices import LAYER_MATRICES, MATRICES, ROLLOUTS, select_layer_matrices
from attnmix.measures.ratios import RATIOS, mixing_ratios, split_layer
from attnmix.measures.swaps import swap_ratio
from attnmix.models.attention import attention_by, explicit
from attnmix.models.families import PROJECTED
from validation.planted_cases import CASES, RECEIVER, TOKENS, WIDTH, Case, planted_model

# Numbers of texts: for swaps, probes and the conditional derivative; for ratios, matrices and parts; for derivatives.
TEXTS, MEASURED, DERIVED = 2000, 64, 8
NOISE = 0.05  # standard deviation of noise added to the input of probes, so that they cannot decode very weak signals
LIMIT = 0.02
ROUNDING = 1e-12  # vectors of a smaller length are rounding errors
MIN_SINGULAR_VALUE = 1e-8  # relative to the largest one; directions with smaller singular values are rounding errors
MAX_SHARE = 1e6  # shares with a larger absolute value are quotients of rounding errors
REFERENCE = "uniform_average"
DIGITS = 4
POINTS = (*LAYER_POINTS, PROJECTED, PREACTIVATION)
BIAS = "without_value_bias"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table of planted cases; this takes half a minute."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.planted", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts and the noise")
    parser.add_argument("--to", type=Path, default=Path("docs/measures"), help="folder of planted.csv")
    options = parser.parse_args(arguments)
    write_planted(options.to, options.seed)
    return 0


def write_planted(to: Path, seed: int) -> None:
    """Write `planted.csv` to the folder `to`: case, measure, value, and whether the case fools the measure."""
    table = planted_table(seed)
    to.mkdir(parents=True, exist_ok=True)
    table.to_csv(to / "planted.csv", index=False, lineterminator="\n")
    print(f"{to / 'planted.csv'}: {len(CASES)} cases, {table['measure'].nunique()} measures")


def planted_table(seed: int) -> pd.DataFrame:
    """Return a table `[case, measure, value, fooled]`. The value is NaN if a measure is undefined for a case."""
    values = {case.name: scores(case, torch.Generator().manual_seed(seed)) for case in CASES}
    rows = []
    for case in CASES:
        for measure, value in values[case.name].items():
            value = round(value, DIGITS) + 0.0  # avoids -0
            rows.append((case.name, measure, value, fooled(case, value, values[REFERENCE].get(measure, np.nan))))
    return pd.DataFrame(rows, columns=["case", "measure", "value", "fooled"])


def fooled(case: Case, value: float, reference: float) -> bool:
    """Return True if the `value` of a measure is wrong for the case.

    `reference` is the measure's value for the case `REFERENCE`. A missing value (NaN) is wrong unless nothing comes
    from other tokens.
    """
    if case.comes == "nothing":
        return abs(value) > LIMIT
    if case.comes == "little":
        return not -LIMIT <= value < reference / 2
    lower_limit = LIMIT
    if case.comes == "all":
        lower_limit = max(LIMIT, 0.9 * reference)
    return not value > lower_limit


def scores(case: Case, generator: torch.Generator) -> dict[str, float]:
    """Return the value of each measure for the case, averaged over texts and over tokens 2 to 8."""
    contents = case.contents(TEXTS, generator)
    base = planted_model(case, contents)
    others_TT = case.others_TT
    ids = torch.arange(1, 1 + TEXTS * TOKENS).view(TEXTS, TOKENS)
    layers = document_chains(base, ids)[0].layers
    x_BTD = layers[0].whole.hidden

    def output(x_BTD: Tensor) -> Tensor:
        """Return the output of the last layer for the input vectors of the first layer."""
        for call in layers:
            x_BTD = call.whole(x_BTD)
        return x_BTD

    by_token = {}  # values `[B, T]` or `[T]` of each measure
    if not case.two_before:
        by_token |= ratio_scores(base, ids[:MEASURED], case.layers[0].bias)
    by_token |= matrix_scores(base, ids[:MEASURED], others_TT)
    model_without_bias = planted_model(case.without_value_bias(), contents)
    scores_without_bias = matrix_scores(model_without_bias, ids[:MEASURED], others_TT, ["alti", "alti_rollout"])
    for name, score in scores_without_bias.items():
        by_token[f"{name}, {BIAS}"] = score
    by_token |= parts_scores(case, base, ids[:MEASURED])
    by_token |= derivative_scores(case, base, ids[:DERIVED])
    by_token["conditional_derivative"] = conditional_derivative(output, x_BTD, others_TT)
    donors_BTD = x_BTD.roll(1, 0)  # each text has another text as donor
    by_token["swap"] = swap_ratio(output, x_BTD, donors_BTD, others_TT.bool())
    by_token |= probe_scores(contents, output(x_BTD), case.givers_TT, generator)
    # Token 1 is omitted, because it is the source or the sink in some cases.
    return {name: float(score[..., 1:].nanmean()) for name, score in by_token.items()}


def ratio_scores(base: Any, ids_BT: Tensor, value_bias_E: Tensor) -> dict[str, Tensor]:
    """Return, for a one-layer model, each ratio `[B, T]`, each ratio without b_V, and each ratio minus each control.

    The control `without_special_sources` is omitted. If all contributions are rounding errors, `attn_n` and its
    controls are set to 0, because their ratio is meaningless. `value_bias_E` is b_V.
    """
    methods = list(RATIOS)

    def measure(layer_pass: LayerPass) -> Tensor:
        """Return the ratios and their controls `[1 + C, M, B, T]`."""
        controls = _controls(methods, layer_pass, value_bias_E)
        controls_CMBT = torch.stack([controls[name] for name in SAME_PASS])
        ratios_1MBT = mixing_ratios(methods, layer_pass)[None]
        ratios_CMBT = torch.cat([ratios_1MBT, controls_CMBT])
        norms = []  # by text, the lengths of all contributions
        for text in range(len(ids_BT)):
            matrices = layer_contributions([LAYER_MATRICES["norm"]], layer_pass.document(text))
            norms.append(matrices["norm"])
        is_rounding_BT = torch.stack(norms).sum(-1) < ROUNDING
        ratios_CMBT[:, methods.index("attn_n")].masked_fill_(is_rounding_BT, 0)
        return ratios_CMBT

    (measured_CMBT,) = map_layers(measure, base, _batch(ids_BT), POINTS)  # a single layer
    ratios_MBT, *controls = measured_CMBT
    by_token = dict(zip(RATIOS, ratios_MBT, strict=True))
    for control, controls_MBT in zip(SAME_PASS, controls, strict=True):
        if control == "without_special_sources":
            continue  # the planted texts have no special tokens
        for name, ratio_BT, control_BT in zip(RATIOS, ratios_MBT, controls_MBT, strict=True):
            by_token[f"{name} - {control}"] = ratio_BT - control_BT
            if control == BIAS:
                by_token[f"{name}, {BIAS}"] = control_BT
    return by_token


def _controls(methods: Sequence[str], layer_pass: LayerPass, value_bias_E: Tensor) -> dict[str, Tensor]:
    """Return the ratios `[M, B, T]` under each control of `SAME_PASS`, for texts without special tokens."""
    value_BTE = layer_pass.value
    texts = len(value_BTE)
    values = ControlValues(
        bias_E=value_bias_E,
        corpus_BTE=(value_BTE.sum(0) - value_BTE) / (texts - 1),  # the mean over other texts at each position
        mean_B1E=value_BTE.mean(1, keepdim=True),
        special_SB=torch.empty(0, texts, dtype=torch.int64),
    )
    return control_ratios(methods, layer_pass, split_layer(layer_pass), values, values.attended(layer_pass))


def matrix_scores(
    base: Any, ids_BT: Tensor, others_TT: Tensor, names: Collection[str] = tuple(MATRICES)
) -> dict[str, Tensor]:
    """Return the share of other tokens `[B, T]` in the rows of each named matrix of the last layer.

    For models with two layers, the shares are those in the rollouts instead. `others_TT[i, j]` is 1 if token j counts
    as another token for token i, and 0 otherwise. `value_zeroing_sum` is the sum of a row of Value Zeroing over other
    tokens, before normalization; `value_zeroing_without_bias_sum` is the same sum without b_V.
    """
    layer_matrices = select_layer_matrices(names)

    def measure(layer_pass: LayerPass) -> list[dict[str, Tensor]]:
        """Return the unnormalized matrices of each text."""
        return [layer_contributions(layer_matrices, layer_pass.document(text)) for text in range(len(ids_BT))]

    by_layer = map_layers(measure, base, _batch(ids_BT), POINTS)
    has_one_layer = len(by_layer) == 1
    by_text = []
    for text_layers in zip(*by_layer, strict=True):
        shares = {}
        for name, rows_LTT in contributions(names, text_layers).items():
            is_rollout = name in ROLLOUTS
            if is_rollout != has_one_layer:  # rollouts for two layers, the other matrices for one layer
                shares[name] = _share_of_others(rows_LTT[-1], others_TT)
        if has_one_layer:
            for name in ("value_zeroing", "value_zeroing_without_bias"):
                if name in names:
                    shares[f"{name}_sum"] = (text_layers[0][name] * others_TT).sum(-1)
        by_text.append(shares)
    return {name: torch.stack([shares[name] for shares in by_text]) for name in by_text[0]}


def _share_of_others(rows_TT: Tensor, others_TT: Tensor) -> Tensor:
    """Return the share of other tokens `[T]` in each row of a matrix.

    If the contributions in a row cancel, the output of attention is a rounding error, and the share is meaningless; it
    is set to NaN.
    """
    is_rounding_T = rows_TT.abs().sum(-1) > MAX_SHARE
    shares_T = _share((rows_TT * others_TT).sum(-1), rows_TT.sum(-1))
    return shares_T.masked_fill(is_rounding_T, torch.nan)


def parts_scores(case: Case, base: Any, ids_BT: Tensor) -> dict[str, Tensor]:
    """Return the share of other tokens `[B, T]` in the last layer's output, by the length and projection of its parts.

    A vector is the sum of a part from each source token and a part from the biases. If the case concerns the
    contribution of token i-2, the share by length is relative to the sum of the lengths of the source tokens' parts.
    """
    reader = PartsReader(base)
    by_length = []
    by_projection = []
    for ids_T in ids_BT:
        parts = {name: values[-1] for name, values in reader.read(_batch(ids_T[None])).items()}
        if case.two_before:
            others_T = (parts["length"] * case.others_TT).sum(-1)
            by_length.append(_share(others_T, parts["length"].sum(-1)))
        else:
            by_length.append(1 - parts["own_share"])
        by_projection.append((parts["projection"] * case.others_TT).sum(-1))
    return {"parts": torch.stack(by_length), "parts_projection": torch.stack(by_projection)}


def derivative_scores(case: Case, base: Any, ids_BT: Tensor) -> dict[str, Tensor]:
    """Return the share of other tokens `[B, T]` in the derivatives of the last layer's output, by form (`FORMS`).

    If the case concerns the contribution of token i-2, only the first form is computed.
    """
    norms = [derivative_norms(document_chains(base, ids_T[None]), "word_embedding", WIDTH, seed=0) for ids_T in ids_BT]
    if not case.two_before:
        shares_FBT = torch.stack([levels(each)[-1] for each in norms], 1)  # F forms
        return dict(zip(FORMS, shares_FBT, strict=True))
    entries_BTT = torch.stack([each.entries_LTT[-1] for each in norms])
    return {FORMS[0]: _share((entries_BTT * case.others_TT).sum(-1), entries_BTT.sum(-1))}


def conditional_derivative(output: Callable[[Tensor], Tensor], x_BTD: Tensor, others_TT: Tensor) -> Tensor:
    """Return a / (a + o) `[T]`: the share of other tokens in derivatives, weighted by the variation of the inputs.

        a^2 = E |sum_j J_ij e_j|^2          o^2 = E |sum_j J_ij (x_j - E x_j - e_j)|^2

    J_ij is the derivative of the output vector i with respect to the input vector x_j, and E is the mean over texts.
    e_j is the residual of a linear regression of x_j on x_i over texts if `others_TT[i, j]` is 1, and 0 otherwise.
    """
    centred_BTD = x_BTD - x_BTD.mean(0)
    tokens = len(others_TT)
    directions = []  # two for each token i: e, then x - E x - e
    for i in range(tokens):
        is_other_T1 = others_TT[i].unsqueeze(-1)
        residual_BTD = _residuals_given(centred_BTD[:, i], centred_BTD) * is_other_T1
        directions.append(residual_BTD)
        directions.append(centred_BTD - residual_BTD)
    # One pass computes the changes of the output along all directions; N = T * 2 * B.
    x_NTD = x_BTD.repeat(len(directions), 1, 1)
    directions_NTD = torch.cat(directions)
    with attention_by(explicit()):
        _, changes_NTD = jvp(output, (x_NTD,), (directions_NTD,))
    changes_T2BTD = changes_NTD.view(tokens, 2, *x_BTD.shape)
    shares = []
    for i in range(tokens):
        changes_2BD = changes_T2BTD[i, :, :, i]  # of the output vector i, along the two directions of token i
        mean_squares_2 = changes_2BD.square().sum(-1).mean(-1)
        a, o = mean_squares_2.sqrt()
        shares.append(_share(a, a + o))
    return torch.stack(shares)


def _residuals_given(own_BD: Tensor, centred_BTD: Tensor) -> Tensor:
    """Return the residuals `[B, T, D]` of linear regressions of all tokens' vectors on the vector of one token.

    Both arguments have mean 0 over the texts. The regressions are least-squares fits over the texts.
    """
    inverse_DB = torch.linalg.pinv(own_BD, rtol=MIN_SINGULAR_VALUE)
    coefficients_DTE = torch.einsum("db,bte->dte", inverse_DB, centred_BTD)
    predicted_BTD = torch.einsum("bd,dte->bte", own_BD, coefficients_DTE)
    return centred_BTD - predicted_BTD


def probe_scores(
    contents_BT4: Tensor, y_BTD: Tensor, givers_TT: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return the gain in R^2 `[T]` when a token's output vector is used to predict the content of its sources.

    The predicted number is the mean, with the weights `givers_TT`, of the first entry of the sources' content vectors.
    A gain is relative to the prediction from the token's own content alone, and at least 0. The predictions are linear
    regressions. In addition to the token's own content, the input of `probe` is the whole output vector, and the input
    of `head` is a single entry of the output vector: the first of the four dimensions that receive the contents of
    other tokens (`RECEIVER`).
    """
    noisy_BTD = y_BTD + NOISE * torch.randn(y_BTD.shape, generator=generator, dtype=y_BTD.dtype)
    probe_gains = []
    head_gains = []
    for i, givers_T in enumerate(givers_TT):
        target_B = (contents_BT4[..., 0] @ givers_T).numpy()
        own_B4 = contents_BT4[:, i]
        output_BD = noisy_BTD[:, i]
        own_r2 = held_out_r2(own_B4.numpy(), target_B)
        probe_r2 = held_out_r2(torch.cat([own_B4, output_BD], 1).numpy(), target_B)
        head_r2 = held_out_r2(torch.cat([own_B4, output_BD[:, [RECEIVER]]], 1).numpy(), target_B)
        probe_gains.append(probe_r2 - own_r2)
        head_gains.append(head_r2 - own_r2)
    return {"probe": torch.tensor(probe_gains).clamp_min(0), "head": torch.tensor(head_gains).clamp_min(0)}


def held_out_r2(features_BF: npt.NDArray[Any], target_B: npt.NDArray[Any]) -> float:
    """Return R^2 on the second half of the texts for a least-squares fit with intercept on the first half."""
    design = np.column_stack([np.ones(len(target_B)), features_BF])
    half = len(target_B) // 2
    coefficients = np.linalg.lstsq(design[:half], target_B[:half], rcond=None)[0]
    held_out = target_B[half:]
    squared_errors = (held_out - design[half:] @ coefficients) ** 2
    squared_deviations = (held_out - held_out.mean()) ** 2
    return float(1 - squared_errors.sum() / squared_deviations.sum())


def _share(others: Tensor, total: Tensor) -> Tensor:
    """Return others / total, or 0 if the total is a rounding error."""
    return (others / total).masked_fill(total < ROUNDING, 0)


def _batch(ids_BT: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}


if __name__ == "__main__":
    sys.exit(main())
