"""Captured tokens for display: labels, words, sentences, and texts."""

from collections.abc import Sequence
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
        return (text if self.begins else text.removeprefix(WORDPIECE_PREFIX)) or self.label

    @property
    def short_label(self) -> str:
        """The printable label, truncated to `MAX_LABEL` characters."""
        label = _printable(self.label)
        return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"


class TextLayers(NamedTuple):
    """A range of a model's layers with their input tokens for one text; decoder inputs are shifted by one token."""

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
        """` of the decoder` in an encoder-decoder model; otherwise empty."""
        return self.name and f" of the {self.name}"


class CapturedTexts(NamedTuple):
    """The tokens of the captured texts, as inputs of the encoder and decoder."""

    tokens: pd.DataFrame
    readings: list[list[DisplayToken]]
    """A token for every row of `tokens`; in encoder-decoder models, also a list of decoder inputs."""
    encoder: int | None
    """The number of encoder layers in an encoder-decoder model; otherwise None."""

    def reading(self, site: Site) -> int:
        """Return the index in `readings` of the input tokens at a site."""
        in_decoder = site.point == DECODER_INPUT or (self.encoder is not None and site.layer > self.encoder)
        return int(in_decoder and len(self.readings) > 1)

    def class_label(self, token_class: str) -> str:
        """Return the distinct labels of a token class, such as `<s>`."""
        labels = (token.label for reading in self.readings for token in reading if token.token_class == token_class)
        return " ".join(dict.fromkeys(labels))

    def rows(self, document: str) -> npt.NDArray[np.int64]:
        """Return the rows of one text."""
        return np.flatnonzero(self.tokens["document"] == document)

    def text_layers(self, document: str, layers: int) -> list[TextLayers]:
        """Return one text with all layers of a model; in encoder-decoder models, separate entries for both stacks."""
        tokens = [[reading[row] for row in self.rows(document)] for reading in self.readings]
        if self.encoder is None:
            return [TextLayers("", range(1, layers + 1), None, tokens[0])]
        decoder = TextLayers("decoder", range(self.encoder + 1, layers + 1), self.encoder, tokens[1])
        return [TextLayers("", range(1, self.encoder + 1), self.encoder, tokens[0]), decoder]

    def word_labels(self, document: str, positions: npt.NDArray[Any]) -> list[dict[int, str]]:
        """Return labels of special tokens and single-token words, or else of all tokens, for each of `readings`.

        The keys are indices into `positions`.
        """
        rows = self.rows(document)
        rows = rows[np.searchsorted(self.tokens["position"].to_numpy()[rows], positions)]
        labels = []
        for reading in self.readings:
            starts = words(reading)
            whole = {
                index: reading[row].short_label
                for index, row in enumerate(rows)
                if reading[row].special or (len(starts[row]) > 1 and starts[row] == reading[row].text.strip().lower())
            }
            labels.append(whole or {index: reading[row].short_label for index, row in enumerate(rows)})
        return labels

    def special_tokens(self, tokens: pd.DataFrame) -> dict[str, list[npt.NDArray[np.bool_]]]:
        """Return masks of `tokens` for each of `readings`, by class of the special tokens that occur."""
        keys = ["document", "position"]
        rows = pd.MultiIndex.from_frame(self.tokens[keys]).get_indexer(pd.MultiIndex.from_frame(tokens[keys]))
        classes = [np.array([token.token_class for token in reading])[rows] for reading in self.readings]
        masks = {name: [each == name for each in classes] for name in SPECIAL_MARKERS}
        return {name: each for name, each in masks.items() if np.any(each)}


def read_captured(tokens: pd.DataFrame, steps: pd.DataFrame) -> CapturedTexts:
    """Return the texts for rows of `features/tokenize/tokens.parquet`.

    `steps` are the steps of `geometry.csv`; the first cross-attention marks the start of the decoder.
    """
    texts = [_display_tokens(rows) for _, rows in tokens.groupby("document", sort=False)]
    readings = [[token for text in texts for token in text]]
    if DECODER_TOKEN in tokens:  # decoder inputs are shifted right by one, after the start token
        start = tokens[DECODER_TOKEN].iloc[0]
        start_class = next((token.token_class for token in readings[0] if token.label == start), START_CLASS)
        first = DisplayToken(start, True, start_class)
        readings.append([token for text in texts for token in (first, *text[:-1])])
    crossing = steps.loc[steps["step"] == "cross_attention", "layer"]
    return CapturedTexts(tokens, readings, int(crossing.min()) - 1 if len(readings) > 1 and len(crossing) else None)


def _display_tokens(rows: pd.DataFrame) -> list[DisplayToken]:
    labels, end_before = rows["label"], rows["end"].shift(fill_value=-1)
    spaced = labels.str.startswith((SPACE, NEWLINE)) | labels.shift(fill_value="").str.endswith((SPACE, NEWLINE))
    begins = spaced | (rows["start"] > end_before) | (end_before < 0) | (rows["word"] < 0)
    return list(map(DisplayToken, labels, begins, rows["token_class"], rows["word"]))


def words(tokens: Sequence[DisplayToken]) -> list[str]:
    """Return the lower-case word for the first token of each word; names of unknown tokens are not changed.

    Entries are empty for continuations of words, punctuation and special tokens.
    """
    texts: list[str] = []
    start = 0  # index of the first token of the current word
    for place, token in enumerate(tokens):
        text = "" if token.special or token.text == SAME_CHARACTER else token.text.strip(SPACE + NEWLINE)
        same_word = place > 0 and token.word >= 0 and token.word == tokens[place - 1].word
        if same_word and texts[start] and text not in UNKNOWN and texts[start] not in UNKNOWN:
            texts[start] += text
            text = ""
        else:
            start = place
        texts.append(text)
    texts = [text if text in UNKNOWN else text.lower() for text in texts]
    return [text if any(map(str.isalnum, text)) else "" for text in texts]


def sentences(tokens: Sequence[DisplayToken]) -> list[range]:
    """Return the index ranges of a text's complete sentences, including closing characters after their ends."""
    complete, start, ended = [], 0, False
    for place, token in enumerate(tokens):
        closing = all(char in SENTENCE_ENDS or category(char) in CLOSING for char in token.text)
        if token.special or (ended and not closing):
            complete += [range(start, place)] * ended
            start = place + token.special
        ended = not token.special and closing and (ended or bool(set(token.text) & SENTENCE_ENDS))
    return [*complete, range(start, len(tokens))] if ended else complete


def short_part(tokens: Sequence[DisplayToken], limit: int) -> range:
    """Return the index range of the whole text if it has at most `limit` tokens, else of its longest such sentence.

    If all sentences are longer, return the range of the first `limit` tokens.
    """
    if len(tokens) <= limit:
        return range(len(tokens))
    return max((each for each in sentences(tokens) if len(each) <= limit), key=len, default=range(limit))


def _printable(text: str) -> str:
    """Return the result of `style.printable`, imported lazily: pages do not need matplotlib."""
    from attnmix.figures.style import printable

    return printable(text)
