"""Captured tokens for display: their labels, and the words and sentences of the texts."""

from collections.abc import Sequence
from itertools import chain, groupby
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
CLOSING = ("Pe", "Pf")  # Unicode categories of closing brackets and quotes, which belong to the preceding sentence
# The role of a token in a sentence: a special token between sentences, end marks and closing characters, or other text.
SEPARATOR, ENDING, CONTENT = "separator", "ending", "content"
MAX_LABEL = 16  # maximum length in characters; vocabularies can contain long tokens, such as a hundred dashes


class DisplayToken(NamedTuple):
    """One token of a text, with its label."""

    label: str
    begins: bool
    """True if the token is not directly attached to a preceding token."""
    token_class: str
    word: int = -1
    """The index of the word that contains the token; -1 for special tokens."""

    @property
    def special(self) -> bool:
        """True for special tokens added by the tokenizer."""
        return self.token_class in SPECIAL_MARKERS

    @property
    def text(self) -> str:
        """The label without `SPACE` at both ends and, for a token that is attached to a preceding token, without `##`.

        If nothing remains, this is the unchanged label.
        """
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
    """The layers of a stack (encoder or decoder) with their input tokens for one text.

    The input tokens of a decoder are shifted right by one.
    """

    name: str
    """`decoder` for the decoder of an encoder-decoder model; otherwise empty."""
    layers: range
    encoder: int | None
    """The number of encoder layers in an encoder-decoder model; otherwise None."""
    tokens: list[DisplayToken]

    @property
    def labels(self) -> list[str]:
        """The labels of the tokens, truncated for use on an axis."""
        return [token.short_label for token in self.tokens]

    @property
    def suffix(self) -> str:
        """` of the decoder` for the layers of a decoder; otherwise empty."""
        if not self.name:
            return ""
        return f" of the {self.name}"


class CapturedTexts(NamedTuple):
    """The tokens of the captured texts, as inputs of the encoder and, if there is one, of the decoder."""

    tokens: pd.DataFrame
    readings: list[list[DisplayToken]]
    """Lists of the input tokens of the encoder and, if there is one, of the decoder, in the row order of `tokens`."""
    encoder: int | None
    """The number of encoder layers in an encoder-decoder model; otherwise None."""

    def reading(self, site: Site) -> int:
        """Return the index in `readings` of the input tokens at a site: 1 in a decoder with separate inputs, else 0."""
        is_decoder_layer = self.encoder is not None and site.layer > self.encoder
        is_in_decoder = is_decoder_layer or site.point == DECODER_INPUT
        if is_in_decoder and len(self.readings) > 1:
            return 1
        return 0

    def class_label(self, token_class: str) -> str:
        """Return the labels of the tokens in a class, without repetition and joined by spaces.

        For the class `cls`, for example, the result is `[CLS]` in BERT and `<s>` in RoBERTa.
        """
        labels: list[str] = []
        for input_tokens in self.readings:  # the encoder's and, if there is one, the decoder's
            for token in input_tokens:
                if token.token_class == token_class and token.label not in labels:
                    labels.append(token.label)
        return " ".join(labels)

    def rows(self, document: str) -> npt.NDArray[np.int64]:
        """Return the row numbers in `tokens` of the T tokens of one text `[T]`."""
        is_in_document = self.tokens["document"] == document
        return np.flatnonzero(is_in_document)

    def text_layers(self, document: str, layers: int) -> list[TextLayers]:
        """Return, for each stack of a model with `layers` layers, its layers and the input tokens of one text.

        An encoder-decoder model has two stacks; any other model has one.
        """
        rows_of_text = self.rows(document)
        encoder_layers = self.encoder  # the number of encoder layers; None if the model has only one stack
        # Each item of `readings` contains the input tokens of one stack, for the rows of all texts.
        first_inputs = self.readings[0]
        last_layer_of_first = layers if encoder_layers is None else encoder_layers
        first_stack = TextLayers(
            name="",
            layers=range(1, last_layer_of_first + 1),
            encoder=encoder_layers,
            tokens=[first_inputs[row] for row in rows_of_text],
        )
        if encoder_layers is None:
            return [first_stack]
        decoder_inputs = self.readings[1]
        decoder = TextLayers(
            name="decoder",
            layers=range(encoder_layers + 1, layers + 1),
            encoder=encoder_layers,
            tokens=[decoder_inputs[row] for row in rows_of_text],
        )
        return [first_stack, decoder]

    def word_labels(self, document: str, positions: npt.NDArray[Any]) -> list[dict[int, str]]:
        """Return the labels of special tokens and single-token words of a text, for the encoder and the decoder inputs.

        Only the tokens at `positions` are labelled. The result contains a dictionary for the inputs of the encoder (or
        of the only stack) and, in an encoder-decoder model, one for the inputs of the decoder; the keys of each
        dictionary are indices into `positions`. If the tokens include no special tokens and no single-token words, all
        of them are labelled.
        """
        rows_of_text = self.rows(document)  # row numbers in `self.tokens`
        positions_of_text = self.tokens["position"].to_numpy()[rows_of_text]
        rows = rows_of_text[np.searchsorted(positions_of_text, positions)]
        labels_by_stack = []
        for input_tokens in self.readings:  # those of one stack, for all rows of `self.tokens`
            starting_words = words(input_tokens)  # for each input token, the word that starts with it
            all_labels = {}
            word_labels = {}
            for index, row in enumerate(rows):
                token = input_tokens[row]
                all_labels[index] = token.short_label
                if token.special or _is_whole_word(token, starting_words[row]):
                    word_labels[index] = token.short_label
            labels_by_stack.append(word_labels or all_labels)
        return labels_by_stack

    def special_tokens(self, tokens: pd.DataFrame) -> dict[str, list[npt.NDArray[np.bool_]]]:
        """Return masks `[T]` of the special tokens among T captured tokens, by class of special tokens.

        `tokens` contains the `document` and the `position` of these tokens. Each class has a list of one or two masks:
        for the inputs of the encoder (or of the only stack) and, in an encoder-decoder model, for those of the decoder,
        which are shifted right by one. Classes that do not occur are omitted.
        """
        keys = ["document", "position"]
        captured = pd.MultiIndex.from_frame(self.tokens[keys])
        rows = captured.get_indexer(pd.MultiIndex.from_frame(tokens[keys]))  # row numbers in `self.tokens`
        classes_by_stack = []
        for input_tokens in self.readings:  # those of one stack, for all rows of `self.tokens`
            all_classes = np.array([token.token_class for token in input_tokens])
            classes_by_stack.append(all_classes[rows])
        masks_by_class = {}
        for token_class in SPECIAL_MARKERS:
            masks = [class_T == token_class for class_T in classes_by_stack]
            if np.any(masks):
                masks_by_class[token_class] = masks
        return masks_by_class


def _is_whole_word(token: DisplayToken, word: str) -> bool:
    """Return True if a token is a complete word of two or more characters; `word` is the word that starts with it."""
    return len(word) > 1 and word == token.text.strip().lower()


def read_captured(tokens: pd.DataFrame, steps: pd.DataFrame) -> CapturedTexts:
    """Return the captured texts for the rows of `features/tokenize/tokens.parquet`.

    `steps` contains the rows of the table `geometry.csv` that describe the steps within layers. In an encoder-decoder
    model, all layers before the first layer with cross-attention belong to the encoder.
    """
    texts = [_create_tokens(rows) for _, rows in tokens.groupby("document", sort=False)]
    encoder_inputs = list(chain.from_iterable(texts))
    inputs_by_stack = [encoder_inputs]
    # This column exists only for encoder-decoder models. Each text of the column begins with the decoder's start token.
    if DECODER_TOKEN in tokens:
        start_label = tokens[DECODER_TOKEN].iloc[0]
        inputs_by_stack.append(_shift_right(texts, start_label))
    cross_attention_layers = steps.loc[steps["step"] == "cross_attention", "layer"]
    encoder_layers = None
    if len(inputs_by_stack) > 1 and len(cross_attention_layers):
        first_decoder_layer = int(cross_attention_layers.min())
        encoder_layers = first_decoder_layer - 1
    return CapturedTexts(tokens, readings=inputs_by_stack, encoder=encoder_layers)


def _create_tokens(rows: pd.DataFrame) -> list[DisplayToken]:
    """Return the tokens of one text, for its rows of `tokens.parquet`.

    A token is attached to the previous token if there is no space between them and neither is a special token.
    """
    labels = rows["label"]
    previous_labels = labels.shift(fill_value="")
    previous_ends = rows["end"].shift(fill_value=-1)
    starts_with_space = labels.str.startswith((SPACE, NEWLINE))
    follows_space = previous_labels.str.endswith((SPACE, NEWLINE))
    follows_gap = rows["start"] > previous_ends
    follows_no_text = previous_ends < 0  # the first token, or a token after a special token
    is_special = rows["word"] < 0
    begins = starts_with_space | follows_space | follows_gap | follows_no_text | is_special
    return list(map(DisplayToken, labels, begins, rows["token_class"], rows["word"]))


def _shift_right(texts: Sequence[Sequence[DisplayToken]], start_label: str) -> list[DisplayToken]:
    """Return the decoder inputs of all texts: for each text, the start token and then its tokens except the last.

    The start token has the class of the tokens with the same label, if the texts contain such tokens.
    """
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
    """Return for each token the word that starts with it, in lower case; `[UNK]` and `<unk>` are not changed.

    Entries are empty for continuations of words, punctuation and special tokens.
    """
    texts: list[str] = []
    start = 0  # index of the first token of the current word
    for place, token in enumerate(tokens):
        text = _select_word_text(token)
        continues_word = place > 0 and token.word >= 0 and token.word == tokens[place - 1].word
        if continues_word and _can_join(texts[start], text):
            texts[start] += text
            texts.append("")
        else:
            start = place
            texts.append(text)
    return [_normalise_word(text) for text in texts]


def _select_word_text(token: DisplayToken) -> str:
    """Return the text of a token without spaces; it is empty for tokens that cannot be a part of a word."""
    if token.special or token.text == SAME_CHARACTER:
        return ""
    return token.text.strip(SPACE + NEWLINE)


def _can_join(word: str, text: str) -> bool:
    """Return True if the `text` of a token can be appended to a word; unknown tokens have no text to append."""
    has_unknown = word in UNKNOWN or text in UNKNOWN
    return bool(word) and not has_unknown


def _normalise_word(text: str) -> str:
    """Return a word in lower case; `[UNK]` and `<unk>` are not changed, and punctuation becomes an empty string."""
    has_letters = any(character.isalnum() for character in text)
    if not has_letters:
        return ""
    if text in UNKNOWN:
        return text
    return text.lower()


def sentences(tokens: Sequence[DisplayToken]) -> list[range]:
    """Return the index ranges of the complete sentences of a text.

    A sentence ends with an end mark (`SENTENCE_ENDS`) and all directly following end marks and closing characters, such
    as brackets. Special tokens separate sentences and belong to none.
    """
    complete = []
    start = 0  # index of the first token of the current sentence
    stop = 0
    for role, group in groupby(tokens, key=_find_role):
        same_role_tokens = list(group)  # neighbouring tokens with the same role
        stop += len(same_role_tokens)
        if role == SEPARATOR:
            start = stop
        elif role == ENDING and any(_has_end_mark(token) for token in same_role_tokens):
            complete.append(range(start, stop))
            start = stop
    return complete


def _find_role(token: DisplayToken) -> str:
    """Return the role of a token in a sentence: `SEPARATOR`, `ENDING` or `CONTENT`."""
    if token.special:
        return SEPARATOR
    for character in token.text:
        if character not in SENTENCE_ENDS and category(character) not in CLOSING:
            return CONTENT
    return ENDING


def _has_end_mark(token: DisplayToken) -> bool:
    """Return True if the text of a token contains an end mark, such as a full stop."""
    return not SENTENCE_ENDS.isdisjoint(token.text)


def short_part(tokens: Sequence[DisplayToken], limit: int) -> range:
    """Return the index range of a part of a text with at most `limit` tokens.

    The part is the whole text if it is short enough. Otherwise, it is the longest sentence within the limit or, if
    there is none, the first `limit` tokens.
    """
    if len(tokens) <= limit:
        return range(len(tokens))
    short_sentences = [sentence for sentence in sentences(tokens) if len(sentence) <= limit]
    return max(short_sentences, key=len, default=range(limit))


def _replace_unprintable(text: str) -> str:
    """Return the result of `style.printable`, which is imported lazily because pages do not need matplotlib."""
    from attnmix.figures.style import printable

    return printable(text)
