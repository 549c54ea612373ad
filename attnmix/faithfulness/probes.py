"""Probes of single token vectors, layer by layer: the classifier's own head (class lens), and linear probes.

For each checkpoint, linear probes are fitted to tokens of training texts and evaluated on tokens of the sampled test
texts. A probe predicts the text's class, the token's identity (among the `FREQUENT_TOKENS` most frequent tokens), or
the token's position (`attnmix.measures.documents.POSITIONS`). Each target has a control task with permuted labels:
classes are permuted over texts, other labels over tokens. The vectors are layer outputs of the last stack (encoder or
decoder). There are two groups of tokens: the token that the head reads (`read`; absent if the head pools several
tokens), and up to `OTHER_TOKENS + 1` equally spaced tokens of each text (`others`).

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

from attnmix.core.names import DECODER_INPUT
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
    # Only the IDs of frequent words are labels of the target `token`.
    word_counts = fitted.loc[fitted["word"], "token"].value_counts()
    frequent = word_counts.index[:FREQUENT_TOKENS]
    for tokens, texts in ((fitted, training), (tested, documents)):
        is_frequent_word = tokens["word"] & tokens["token"].isin(frequent)
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

    `fitted` and `tested` are tables of training and test tokens; `fitted_vectors` and `tested_vectors` contain the
    vectors `[N, D]` of these tokens by layer.
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
    """Return a mask `[N]` of the rows of `chosen_tokens` that belong to `group` and have a label for `target`."""
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
    # In a text of one token, the head reads this token. The heads of encoder-decoders search for the end token instead.
    has_encoder = len(classifier.family.stacks) > 1
    if has_encoder:
        token_id = classifier.model.config.eos_token_id
    else:
        first_document = documents[0]
        token_id = first_document.ids[0]
    for layer, vectors_ND in vectors.items():
        vectors_on_device = vectors_ND.to(classifier.model.device)
        scores_NC = head_scores(classifier.model, vectors_on_device, int(token_id))
        lens_predicted_N = scores_NC.argmax(-1).cpu().numpy()
        is_same_N = lens_predicted_N == predicted_N
        scored = tokens.assign(right=is_same_N)
        for group, tokens_of_group in scored.groupby("group"):
            shares = _compute_shares(tokens_of_group)
            yield table_row("finetuned", "lens_agreement", str(group), layer, shares, seed)


def chosen_tokens(classifier: Classifier, documents: Sequence[Document]) -> pd.DataFrame:
    """Return a table with one row per chosen token of the `documents`.

    The columns are the index of the text (`text`), the `group` (`read` or `others`), the position in the text
    (`place`), whether the token belongs to a word (`word`), and the labels: the token ID (`token`), the text's `class`,
    and the group of positions (`position`). For special tokens, `word` is False and `position` is `NO_LABEL`. In
    encoder-decoders, the labels describe the decoder inputs, which are shifted right by one.
    """
    read_position = _find_read_position(classifier, documents[0]) if documents else None
    has_encoder = len(classifier.family.stacks) > 1
    start = [NO_LABEL] if has_encoder else []  # the decoder's start token
    rows = []
    for text, document in enumerate(documents):
        tokens = len(document)
        # A negative position counts from the end of the text.
        read = [] if read_position is None else [read_position % tokens]
        number = min(OTHER_TOKENS + 1, tokens)
        equally_spaced = np.linspace(0, tokens - 1, number).round()
        others = np.setdiff1d(equally_spaced.astype(int), read)
        ids_T = np.insert(document.ids, 0, start)
        words_T = np.insert(document.words, 0, start)
        is_word_T = words_T >= 0
        positions_T = np.where(is_word_T, position_groups(len(words_T)), NO_LABEL)
        for group, places in (("read", read), ("others", others.tolist())):
            for place in places:
                row = (text, group, place, ids_T[place], is_word_T[place], document.label, positions_T[place])
                rows.append(row)
    columns = ["text", "group", "place", "token", "word", "class", "position"]
    table = pd.DataFrame(rows, columns=columns)
    return table.astype({"word": bool, "text": int, "token": int})


def token_vectors(
    classifier: Classifier, base: Any, documents: Sequence[Document], tokens: pd.DataFrame
) -> dict[int, torch.Tensor]:
    """Return the vectors `[N, D]` of `tokens` after each layer of the last stack (encoder or decoder), by layer.

    `tokens` is the result of `chosen_tokens` for `documents`.
    """
    rows: list[Any] = []  # rows of `tokens`, in the order of the batches
    vectors: dict[int, list[torch.Tensor]] = defaultdict(list)
    all_places = tokens["place"].to_numpy()
    for batch, inputs in padded_batches(classifier, documents):
        with torch.inference_mode(), recording(base, ("layer_output", DECODER_INPUT)) as features:
            base(**inputs)
        # In encoder-decoders, the site of the decoder input has the layer index of the encoder's last layer.
        decoder_inputs = [site.layer for site in features if site.point == DECODER_INPUT]
        last_encoder_layer = max(decoder_inputs, default=0)
        sites = [site for site in features if site.layer > last_encoder_layer]
        for number, text in enumerate(batch):
            rows_of_text = np.flatnonzero(tokens["text"] == text)
            rows.append(rows_of_text)
            places = all_places[rows_of_text]
            for site in sites:
                vectors_of_text = features[site][number, places]
                vectors[site.layer].append(vectors_of_text.cpu())
    # Sort the vectors by the rows of `tokens`.
    order: Any = []
    if rows:
        order = np.argsort(np.concatenate(rows))
    in_order = {}
    for layer, vectors_of_texts in vectors.items():
        vectors_ND = torch.cat(vectors_of_texts)
        in_order[layer] = vectors_ND[order]
    return in_order


def _compute_shares(tokens: pd.DataFrame) -> torch.Tensor:
    """Return each text's share of correctly predicted tokens (column `right`), `[texts]`."""
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
