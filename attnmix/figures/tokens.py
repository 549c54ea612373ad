"""Captured tokens for display: labels, words, sentences, and texts."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple
from unicodedata import category

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import DECODER_INPUT, NEWLINE, SAME_CHARACTER, SPACE, WORDPIECE_PREFIX, Site
from attnmix.core.store.texts import DECODER_TOKEN
from attnmix.figures.labels import SPECIAL_MARKERS

UNKNOWN = ("[UNK]", "<unk>")
START_CLASS = "cls"
SENTENCE_ENDS = frozenset(".!?…。！？｡؟۔।॥")  # noqa: RUF001  # full stops of other scripts
CLOSING = ("Pe", "Pf")  # Unicode categories of closing characters, part of the preceding sentence
MAX_LABEL = 16  # characters; vocabularies can contain very long tokens, such as a hundred dashes


class DisplayToken(NamedTuple):
    """One token of a text, with its label."""

    label: str
    begins: bool
    """True if the token is not directly attached to a preceding token."""
    token_class: str
    word: int = -1
    """The index of its word; -1 for special tokens."""

    @property
    def special(self) -> bool:
        """True for special tokens added by the tokenizer."""
        return self.token_class in SPECIAL_MARKERS

    @property
    def text(self) -> str:
        """The token's part of the text without surrounding spaces; the label if this is empty."""
        text = self.label.strip(SPACE)
        if not self.begins:
            text = text.removeprefix(WORDPIECE_PREFIX)
        return text or self.label

    @property
    def short_label(self) -> str:
        """The printable label, truncated to `MAX_LABEL` characters."""
        label = _replace_unprintable(self.label)
        if len(label) <= MAX_LABEL:
            return label
        return f"{label[: MAX_LABEL - 1]}…"


class TextLayers(NamedTuple):
    """A range of a model's layers with their input tokens for one text; decoder inputs are shifted right by one."""

    name: str
    layers: range
    encoder: int | None
    tokens: list[DisplayToken]

    @property
    def labels(self) -> list[str]:
        """Labels of the tokens, short enough for an axis."""
        return [token.short_label for token in self.tokens]

    @property
    def suffix(self) -> str:
        """` of the decoder` for the layers of a decoder; otherwise empty."""
        if not self.name:
            return ""
        return f" of the {self.name}"


class CapturedTexts(NamedTuple):
    """The tokens of the captured texts, as inputs of the encoder and decoder."""

    tokens: pd.DataFrame
    readings: list[list[DisplayToken]]
    """The input tokens of each stack, one for every row of `tokens`: encoder inputs and, if any, decoder inputs."""
    encoder: int | None
    """The number of encoder layers in an encoder-decoder model; otherwise None."""

    def reading(self, site: Site) -> int:
        """Return the index in `readings` of the input tokens at a site."""
        is_decoder_layer = self.encoder is not None and site.layer > self.encoder
        is_in_decoder = is_decoder_layer or site.point == DECODER_INPUT
        if is_in_decoder and len(self.readings) > 1:
            return 1
        return 0

    def class_label(self, token_class: str) -> str:
        """Return the distinct labels of a token class, such as `<s>`, joined by spaces."""
        labels: list[str] = []
        for reading in self.readings:
            for token in reading:
                if token.token_class == token_class and token.label not in labels:
                    labels.append(token.label)
        return " ".join(labels)

    def rows(self, document: str) -> npt.NDArray[np.int64]:
        """Return the rows `[T]` of one text."""
        is_in_document = self.tokens["document"] == document
        return np.flatnonzero(is_in_document)

    def text_layers(self, document: str, layers: int) -> list[TextLayers]:
        """Return the tokens of one text with all layers of a model, with a separate entry for each stack."""
        rows = self.rows(document)
        last_layer = layers if self.encoder is None else self.encoder
        stacks = [
            TextLayers(
                name="",
                layers=range(1, last_layer + 1),
                encoder=self.encoder,
                tokens=[self.readings[0][row] for row in rows],
            )
        ]
        if self.encoder is not None:
            decoder = TextLayers(
                name="decoder",
                layers=range(self.encoder + 1, layers + 1),
                encoder=self.encoder,
                tokens=[self.readings[1][row] for row in rows],
            )
            stacks.append(decoder)
        return stacks

    def word_labels(self, document: str, positions: npt.NDArray[Any]) -> list[dict[int, str]]:
        """Return labels of special tokens and single-token words for each of `readings`.

        If there are none, return the labels of all tokens. The keys are indices into `positions`.
        """
        rows = self.rows(document)
        all_positions = self.tokens["position"].to_numpy()
        places = np.searchsorted(all_positions[rows], positions)
        labels = []
        for reading in self.readings:
            reading_words = words(reading)
            all_labels = {}
            word_labels = {}
            for index, row in enumerate(rows[places]):
                token = reading[row]
                word = reading_words[row]
                all_labels[index] = token.short_label
                is_whole_word = len(word) > 1 and word == token.text.strip().lower()
                if token.special or is_whole_word:
                    word_labels[index] = token.short_label
            labels.append(word_labels or all_labels)
        return labels

    def special_tokens(self, tokens: pd.DataFrame) -> dict[str, list[npt.NDArray[np.bool_]]]:
        """Return masks of `tokens` for each of `readings`, by class of the special tokens that occur."""
        keys = ["document", "position"]
        captured = pd.MultiIndex.from_frame(self.tokens[keys])
        rows = captured.get_indexer(pd.MultiIndex.from_frame(tokens[keys]))
        classes_by_reading = []
        for reading in self.readings:
            classes = np.array([token.token_class for token in reading])
            classes_by_reading.append(classes[rows])
        masks = {}
        for token_class in SPECIAL_MARKERS:
            masks_by_reading = [classes == token_class for classes in classes_by_reading]
            if np.any(masks_by_reading):
                masks[token_class] = masks_by_reading
        return masks


def read_captured(tokens: pd.DataFrame, steps: pd.DataFrame) -> CapturedTexts:
    """Return the texts for rows of `features/tokenize/tokens.parquet`.

    `steps` are the steps of `geometry.csv`. The decoder starts in the first layer with cross-attention.
    """
    texts = [_create_tokens(rows) for _, rows in tokens.groupby("document", sort=False)]
    encoder_inputs: list[DisplayToken] = []
    for text in texts:
        encoder_inputs.extend(text)
    readings = [encoder_inputs]
    if DECODER_TOKEN in tokens:
        start_label = tokens[DECODER_TOKEN].iloc[0]
        readings.append(_shift_right(texts, start_label))
    cross_attention_layers = steps.loc[steps["step"] == "cross_attention", "layer"]
    encoder = None
    if len(readings) > 1 and len(cross_attention_layers):
        encoder = int(cross_attention_layers.min()) - 1
    return CapturedTexts(tokens, readings, encoder)


def _create_tokens(rows: pd.DataFrame) -> list[DisplayToken]:
    """Return the tokens of one text, for its rows of `tokens.parquet`."""
    labels = rows["label"]
    previous_labels = labels.shift(fill_value="")
    previous_ends = rows["end"].shift(fill_value=-1)
    begins = labels.str.startswith((SPACE, NEWLINE))
    begins |= previous_labels.str.endswith((SPACE, NEWLINE))
    begins |= rows["start"] > previous_ends
    begins |= previous_ends < 0
    begins |= rows["word"] < 0
    return list(map(DisplayToken, labels, begins, rows["token_class"], rows["word"]))


def _shift_right(texts: Sequence[Sequence[DisplayToken]], start_label: str) -> list[DisplayToken]:
    """Return the decoder inputs of all texts, which are shifted right by one after the start token."""
    start_class = START_CLASS
    for token in chain.from_iterable(texts):
        if token.label == start_label:
            start_class = token.token_class
            break
    start = DisplayToken(start_label, begins=True, token_class=start_class)
    decoder_inputs = []
    for text in texts:
        decoder_inputs.append(start)
        decoder_inputs.extend(text[:-1])
    return decoder_inputs


def words(tokens: Sequence[DisplayToken]) -> list[str]:
    """Return the lower-case word that starts at each token; names of unknown tokens are not changed.

    Entries are empty for continuations of words, punctuation and special tokens.
    """
    texts: list[str] = []
    start = 0  # index of the first token of the current word
    for place, token in enumerate(tokens):
        text = ""
        if not token.special and token.text != SAME_CHARACTER:
            text = token.text.strip(SPACE + NEWLINE)
        is_same_word = place > 0 and token.word >= 0 and token.word == tokens[place - 1].word
        if is_same_word and texts[start] and text not in UNKNOWN and texts[start] not in UNKNOWN:
            texts[start] += text
            text = ""
        else:
            start = place
        texts.append(text)
    return [_normalise_word(text) for text in texts]


def _normalise_word(text: str) -> str:
    """Return the text in lower case, or an empty string for punctuation; names of unknown tokens are not changed."""
    if text not in UNKNOWN:
        text = text.lower()
    has_letters = any(char.isalnum() for char in text)
    return text if has_letters else ""


def sentences(tokens: Sequence[DisplayToken]) -> list[range]:
    """Return the index ranges of a text's complete sentences, including closing characters after their ends."""
    complete = []
    start = 0
    has_ended = False
    for place, token in enumerate(tokens):
        is_closing = all(char in SENTENCE_ENDS or category(char) in CLOSING for char in token.text)
        begins_sentence = has_ended and not is_closing
        if has_ended and (token.special or begins_sentence):
            complete.append(range(start, place))
        if token.special:
            start = place + 1
            has_ended = False
            continue
        if begins_sentence:
            start = place
        has_end = not SENTENCE_ENDS.isdisjoint(token.text)
        has_ended = is_closing and (has_ended or has_end)
    if has_ended:
        complete.append(range(start, len(tokens)))
    return complete


def short_part(tokens: Sequence[DisplayToken], limit: int) -> range:
    """Return the index range of a part of a text with at most `limit` tokens.

    It is the whole text, else its longest sentence within the limit, else its first `limit` tokens.
    """
    if len(tokens) <= limit:
        return range(len(tokens))
    short_sentences = [sentence for sentence in sentences(tokens) if len(sentence) <= limit]
    return max(short_sentences, key=len, default=range(limit))


def _replace_unprintable(text: str) -> str:
    """Return the result of `style.printable`, which is imported lazily because pages do not need matplotlib."""
    from attnmix.figures.style import printable

    return printable(text)
