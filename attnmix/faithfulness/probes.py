"""Probes of single token vectors, layer by layer: the classifier's own head (class lens), and linear probes.

For each checkpoint, linear probes are fitted to tokens of training texts and evaluated on tokens of the sampled test
texts. A probe predicts the text's class, the token's identity (among the `FREQUENT_TOKENS` most frequent tokens), or
the token's position (`attnmix.measures.documents.POSITIONS`). Each target has a control task with permuted labels:
classes are permuted over texts, other labels over tokens. The vectors are layer outputs of the last stack (encoder or
decoder). There are two groups of tokens. `read` is the token that the head reads; it is absent if the head pools
several tokens. `others` are up to `OTHER_TOKENS + 1` equally spaced tokens of each text.

Shapes: N chosen tokens of all texts, T tokens of a text, D hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from attnmix.core.names import DECODER_INPUT, Site
from attnmix.faithfulness.class_use import CLASS_USE_COLUMNS, padded_batches, table_row
from attnmix.faithfulness.classifier import Classifier
from attnmix.faithfulness.lens import head_scores, probe_predictions
from attnmix.measures.documents import Document, position_groups
from attnmix.models.capture_points import recording

OTHER_TOKENS = 16  # maximum number of equally spaced tokens per text minus 1; the head usually reads one of them
PROBE_TEXTS = 64  # maximum number of training texts
FREQUENT_TOKENS = 8  # number of the most frequent tokens of the training texts, used as labels
TARGETS = (
    ("read", "class"),
    ("read", "class_control"),
    ("others", "class"),
    ("others", "class_control"),
    ("others", "token"),
    ("others", "token_control"),
    ("others", "position"),
    ("others", "position_control"),
)
"""The token group and the target of each probe."""
NO_LABEL = -1  # marks tokens that have no label for a target


def probes(
    classifier: Classifier,
    bases: Iterable[tuple[str, Any]],
    training: Sequence[Document],
    documents: Sequence[Document],
    seed: int,
) -> pd.DataFrame:
    """Return a table with `CLASS_USE_COLUMNS`: the accuracies `probe_<target>` and `probe_<target>_control`.

    Probes are fitted to `training` texts. An accuracy is the share of a text's tokens with correct predictions,
    averaged over `documents`. `bases` contains the name and the model of each checkpoint. For the classifier's own
    model, the table also contains `lens_agreement`: the share of a text's tokens for which the head predicts the same
    class as for the whole text, averaged over `documents`. Targets with fewer than two labels in the `training` texts,
    or without labels in `documents`, are omitted.
    """
    generator = np.random.default_rng(seed)
    rows: list[list[Any]] = []
    # Tables of training tokens and of test tokens, with one row per token.
    fitted = chosen_tokens(classifier, training)
    tested = chosen_tokens(classifier, documents)
    word_counts = fitted.loc[fitted["word"], "token"].value_counts()
    frequent_ids = word_counts.index[:FREQUENT_TOKENS]
    for tokens, texts in ((fitted, training), (tested, documents)):
        # The target `token` has only the IDs of frequent words as labels.
        is_frequent_word = tokens["word"] & tokens["token"].isin(frequent_ids)
        tokens["token"] = tokens["token"].where(is_frequent_word, NO_LABEL)
        _add_controls(tokens, texts, generator)
    for checkpoint, base in bases:
        fitted_vectors = token_vectors(classifier, base, training, fitted)
        tested_vectors = token_vectors(classifier, base, documents, tested)
        if base is classifier.base:
            rows.extend(_list_lens_rows(classifier, documents, tested, tested_vectors, seed))
        rows.extend(_list_probe_rows(checkpoint, fitted, fitted_vectors, tested, tested_vectors, seed))
    return pd.DataFrame(rows, columns=CLASS_USE_COLUMNS)


def _list_probe_rows(
    checkpoint: str,
    fitted: pd.DataFrame,
    fitted_vectors: dict[int, torch.Tensor],
    tested: pd.DataFrame,
    tested_vectors: dict[int, torch.Tensor],
    seed: int,
) -> Iterator[list[Any]]:
    """Yield a row with the accuracy of the probe for each of `TARGETS` and each layer of a checkpoint.

    A target is a group of tokens and the label to predict, a column of the tables. `fitted` and `tested` are tables of
    N training and N test tokens (see `chosen_tokens`); `fitted_vectors` and `tested_vectors` contain the vectors
    `[N, D]` of these tokens by layer.
    """
    for group, target in TARGETS:
        is_fitted = _has_label(fitted, group, target)
        is_tested = _has_label(tested, group, target)
        labels = fitted.loc[is_fitted, target]
        tested_tokens = tested[is_tested]
        # A probe cannot be fitted to a single label, or evaluated without test tokens.
        if labels.nunique() < 2 or tested_tokens.empty:
            continue
        for layer in fitted_vectors:
            fitted_ND = fitted_vectors[layer].double().numpy()[is_fitted]
            tested_ND = tested_vectors[layer].double().numpy()[is_tested]
            predictions = probe_predictions(fitted_ND, labels.tolist(), tested_ND)
            is_right = predictions == tested_tokens[target]
            scored = tested_tokens.assign(right=is_right)
            shares = _compute_shares(scored)
            yield table_row(checkpoint, f"probe_{target}", group, layer, shares, seed)


def _add_controls(tokens: pd.DataFrame, texts: Sequence[Document], generator: np.random.Generator) -> None:
    """Add to `tokens` the column `<target>_control` of each target, with permuted labels.

    Classes are permuted over texts, other labels over the tokens that have a label.
    """
    labels_of_texts = np.array([text.label for text in texts], np.int64)
    tokens["class_control"] = generator.permutation(labels_of_texts)[tokens["text"]]
    for target in ("token", "position"):
        labels_N = tokens[target].to_numpy(copy=True)
        has_label_N = labels_N != NO_LABEL
        labels_N[has_label_N] = generator.permutation(labels_N[has_label_N])
        tokens[f"{target}_control"] = labels_N


def _has_label(tokens: pd.DataFrame, group: str, target: str) -> npt.NDArray[np.bool_]:
    """Return a mask of the N rows of `tokens` that belong to `group` and have a label in the column `target`."""
    is_in_group = tokens["group"] == group
    is_labelled = tokens[target] != NO_LABEL
    return (is_in_group & is_labelled).to_numpy()


def _list_lens_rows(
    classifier: Classifier,
    documents: Sequence[Document],
    tokens: pd.DataFrame,
    vectors: dict[int, torch.Tensor],
    seed: int,
) -> Iterator[list[Any]]:
    """Yield a row of `lens_agreement` for each layer and group of tokens.

    `lens_agreement` is the share of a text's tokens for which the head predicts the same class as for the whole text.
    `vectors` contains, by layer, the vectors `[N, D]` of `tokens`.
    """
    all_ids = [document.ids.tolist() for document in documents]
    predicted_by_text = classifier.logits(all_ids).argmax(-1).numpy()
    predicted_N = predicted_by_text[tokens["text"]]
    token_id = _choose_read_token(classifier, documents)
    for layer, vectors_ND in vectors.items():
        vectors_on_device = vectors_ND.to(classifier.model.device)
        scores_NC = head_scores(classifier.model, vectors_on_device, token_id)
        lens_predicted_N = scores_NC.argmax(-1).cpu().numpy()
        is_same_N = lens_predicted_N == predicted_N
        scored = tokens.assign(right=is_same_N)
        for group, tokens_of_group in scored.groupby("group"):
            shares = _compute_shares(tokens_of_group)
            yield table_row("finetuned", "lens_agreement", str(group), layer, shares, seed)


def _choose_read_token(classifier: Classifier, documents: Sequence[Document]) -> int:
    """Return the ID of a token that the head reads in a text of one token.

    This can be any token, such as the first one of `documents`; but the heads of encoder-decoders search for the end
    token.
    """
    is_encoder_decoder = len(classifier.family.stacks) > 1
    if is_encoder_decoder:
        return int(classifier.model.config.eos_token_id)
    first_document = documents[0]
    return int(first_document.ids[0])


def chosen_tokens(classifier: Classifier, documents: Sequence[Document]) -> pd.DataFrame:
    """Return a table with one row per chosen token of the `documents`.

    The columns are the index of the text (`text`), the `group` (`read` or `others`), the position in the text
    (`place`), whether the token belongs to a word (`word`), and the labels: the token ID (`token`), the text's `class`,
    and the group of positions (`position`). For special tokens, `word` is False and `position` is `NO_LABEL`. In
    encoder-decoders, the labels describe the decoder inputs, which are shifted right by one.
    """
    read_position = _find_read_position(classifier, documents[0]) if documents else None
    is_encoder_decoder = len(classifier.family.stacks) > 1
    rows = []
    for text, document in enumerate(documents):
        ids_T = document.ids
        words_T = document.words
        if is_encoder_decoder:  # the decoder's start token, which has no labels, precedes the text's tokens
            ids_T = np.insert(ids_T, 0, NO_LABEL)
            words_T = np.insert(words_T, 0, NO_LABEL)
        is_word_T = words_T >= 0
        positions_T = np.where(is_word_T, position_groups(len(words_T)), NO_LABEL)
        for group, places in _choose_places(len(document), read_position).items():
            for place in places:
                row = (text, group, place, ids_T[place], is_word_T[place], document.label, positions_T[place])
                rows.append(row)
    columns = ["text", "group", "place", "token", "word", "class", "position"]
    table = pd.DataFrame(rows, columns=columns)
    return table.astype({"word": bool, "text": int, "token": int})


def _choose_places(tokens: int, read_position: int | None) -> dict[str, list[int]]:
    """Return the positions of the chosen tokens of a text by group, `read` and `others`; `tokens` is the text's length.

    `read_position` is the index of the token that the head reads: 0 for the first token, or a negative index that is
    counted from the end. It is None if the head reads several tokens.
    """
    read = []
    if read_position is not None:
        read.append(read_position % tokens)  # counted from the start
    number = min(OTHER_TOKENS + 1, tokens)
    equally_spaced = np.linspace(0, tokens - 1, number).round()
    others = np.setdiff1d(equally_spaced.astype(int), read)
    return {"read": read, "others": others.tolist()}


def token_vectors(
    classifier: Classifier, base: Any, documents: Sequence[Document], tokens: pd.DataFrame
) -> dict[int, torch.Tensor]:
    """Return the vectors `[N, D]` of `tokens` after each layer of the last stack (encoder or decoder), by layer.

    `tokens` is the result of `chosen_tokens` for `documents`; its N rows are the rows of the vectors.
    """
    rows: list[Any] = []  # for each text, in the order of the batches, the indices of its rows of `tokens`
    vectors: dict[int, list[torch.Tensor]] = defaultdict(list)  # for each layer, the vectors of each text in this order
    all_places = tokens["place"].to_numpy()
    for batch, inputs in padded_batches(classifier, documents):
        with torch.inference_mode(), recording(base, ("layer_output", DECODER_INPUT)) as features:
            base(**inputs)
        sites = _list_last_outputs(list(features))
        for number, text in enumerate(batch):
            rows_of_text = np.flatnonzero(tokens["text"] == text)
            rows.append(rows_of_text)
            places = all_places[rows_of_text]
            for site in sites:
                vectors_of_text = features[site][number, places]
                vectors[site.layer].append(vectors_of_text.cpu())
    order: Any = []  # sorts the vectors by the rows of `tokens`
    if rows:
        order = np.argsort(np.concatenate(rows))
    in_order = {}
    for layer, vectors_of_texts in vectors.items():
        vectors_ND = torch.cat(vectors_of_texts)
        in_order[layer] = vectors_ND[order]
    return in_order


def _list_last_outputs(sites: Sequence[Site]) -> list[Site]:
    """Return the sites of the layer outputs of the last stack: the decoder's layers; all layers if there is no decoder.

    `sites` are layer outputs and, in encoder-decoders, the decoder input, whose layer is the encoder's last layer.
    """
    last_encoder_layer = 0  # layers are numbered from 1
    for site in sites:
        if site.point == DECODER_INPUT:
            last_encoder_layer = site.layer
    return [site for site in sites if site.layer > last_encoder_layer]


def _compute_shares(tokens: pd.DataFrame) -> torch.Tensor:
    """Return each text's share of tokens with True in the column `right`, `[texts]`."""
    shares = tokens.groupby("text")["right"].mean()
    return torch.tensor(shares.to_numpy())


def _find_read_position(classifier: Classifier, document: Document) -> int | None:
    """Return the position of the token that the head reads, or None if it reads several tokens.

    A position other than 0 is returned as a negative index, which counts from the end of a text.
    """
    # The head reads the same tokens for all classes, so the gradients of the first class's logit suffice.
    gradients = classifier.gradients(document.ids.tolist(), 0)
    position = gradients.read_position
    if position < 0:
        return None
    if position == 0:
        return 0
    return position - len(document)
