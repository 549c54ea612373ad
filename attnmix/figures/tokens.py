"""Captured tokens as a person reads them, whatever the tokenizer: their text, and whether they begin a word.

Tokenizers mark words in three ways. WordPiece marks the pieces that continue a word (`##ing`). SentencePiece writes the
space before a word as `▁`. Byte-level BPE writes it as `Ġ`, and every byte that is no printable character of Latin-1 as
another character: `cafÃ©` is café.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple
from unicodedata import category

import pandas as pd

from attnmix.core.points import DECODER_INPUT, Site
from attnmix.figures.labels import SPECIAL_LOOKS
from attnmix.store.runs import Run

WORDPIECE_PREFIX = "##"
METASPACE = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's, for characters that its vocabulary lacks
SPACE = "␣"  # in a label; a token without one continues right where the token before it ended
NEWLINE = "⏎"
UNKNOWN = ("[UNK]", "<unk>")
DECODER_TOKEN = "decoder_token"
START_CLASS = "cls"
SENTENCE_ENDS = frozenset(".!?…。！？｡؟۔।॥")  # noqa: RUF001  # full stops of other scripts
CLOSING = ("Pe", "Pf")  # Unicode categories of characters that still belong to the sentence before them
# Byte-level BPE's character for each byte, inverted: the printable bytes of Latin-1 stand for themselves.
PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHER_BYTES = [byte for byte in range(256) if byte not in PRINTABLE_BYTES]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE_BYTES} | {chr(256 + i): byte for i, byte in enumerate(OTHER_BYTES)}


class DisplayToken(NamedTuple):
    """One token of a text, with its label."""

    label: str
    raw: bytes
    """The token's part of the text, in UTF-8; several tokens may share a character."""
    begins: bool
    """Whether it begins a word, or stands alone."""
    token_class: str

    @property
    def special(self) -> bool:
        """True where the tokenizer added it to the text."""
        return self.token_class in SPECIAL_LOOKS

    @property
    def text(self) -> str:
        """The token's part of the text without surrounding spaces; the label where nothing is left."""
        return decode_bytes(self.raw).strip(" ").replace("\n", NEWLINE) or self.label


class CapturedTexts(NamedTuple):
    """The tokens of the captured texts, as the model reads them."""

    tokens: pd.DataFrame
    readings: list[list[DisplayToken]]
    """Every row of `tokens`; a second time as the decoder reads it, where there is one beside an encoder."""
    encoder: int | None
    """The number of the encoder's layers, beside a decoder."""

    def reading(self, site: Site) -> int:
        """Return the index of the reading that a site's vectors belong to."""
        in_decoder = site.point == DECODER_INPUT or (self.encoder is not None and site.layer > self.encoder)
        return int(in_decoder and len(self.readings) > 1)

    def class_label(self, token_class: str) -> str:
        """Return the different tokens of a class, such as `<s>`."""
        labels = (token.label for reading in self.readings for token in reading if token.token_class == token_class)
        return " ".join(dict.fromkeys(labels))


def with_classes(tokens: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Return the captured tokens with their `token_class`, which `measure` determined."""
    keys = ["document", "position"]
    documents = tokens["document"].unique().tolist()
    classes = run.captured_ratios(documents, [*keys, "token_class"], [("layer", "==", 1)]).drop_duplicates(keys)
    return tokens.merge(classes, on=keys, how="left")


def read_captured(tokens: pd.DataFrame, steps: pd.DataFrame) -> CapturedTexts:
    """Return the texts of a table `document, position, token, token_class`, and `decoder_token` beside an encoder.

    `steps` are those of `geometry.csv`, whose cross-attention tells where a decoder begins.
    """
    readings = [_display_tokens(tokens["document"], tokens["token"], tokens["token_class"])]
    if DECODER_TOKEN in tokens:
        special = tokens[tokens["token_class"].isin(SPECIAL_LOOKS)].set_index("token")["token_class"].to_dict()
        start = [special.get(token, START_CLASS) for token in tokens[DECODER_TOKEN]]
        previous = tokens.groupby("document")["token_class"].shift()  # a decoder reads the token before
        classes = previous.where(previous.notna(), pd.Series(start, tokens.index))
        readings.append(_display_tokens(tokens["document"], tokens[DECODER_TOKEN], classes))
    crossing = steps.loc[steps["step"] == "cross_attention", "layer"]
    return CapturedTexts(tokens, readings, int(crossing.min()) - 1 if len(readings) > 1 and len(crossing) else None)


def _display_tokens(documents: pd.Series, tokens: pd.Series, classes: pd.Series) -> list[DisplayToken]:
    table = pd.DataFrame({"document": documents, "token": tokens, "token_class": classes})
    return [
        token
        for _, rows in table.groupby("document", sort=False)
        for token in _document_tokens(rows["token"].tolist(), rows["token_class"].tolist())
    ]


def _document_tokens(names: Sequence[str], classes: Sequence[str]) -> list[DisplayToken]:
    plain = [name for name, token_class in zip(names, classes, strict=True) if token_class not in SPECIAL_LOOKS]
    raws = _byte_level_bytes(plain) or _sentencepiece_bytes(plain)
    remaining = iter(raws or ())
    tokens: list[DisplayToken] = []
    for name, token_class in zip(names, classes, strict=True):
        before = tokens[-1] if tokens else None
        begins = before is None or before.special
        if token_class in SPECIAL_LOOKS:
            token = DisplayToken(name, name.encode(), True, token_class)
        elif raws is None:
            continues = name.startswith(WORDPIECE_PREFIX) and name != WORDPIECE_PREFIX
            text = name.removeprefix(WORDPIECE_PREFIX) if continues else name
            token = DisplayToken(name, text.encode(), begins or not continues, token_class)
        else:
            raw = next(remaining)
            text = decode_bytes(raw)
            spaced = text[:1].isspace() or (before is not None and decode_bytes(before.raw)[-1:].isspace())
            label = text.replace(" ", SPACE).replace("\n", NEWLINE)
            token = DisplayToken(label, raw, begins or spaced, token_class)
        tokens.append(token)
    return tokens


def _byte_level_bytes(names: Sequence[str]) -> list[bytes] | None:
    """Return the bytes of byte-level BPE's tokens; None for tokens of other tokenizers.

    Those contain other characters, are no UTF-8 when read as bytes, or are ASCII alone, where it makes no difference.
    A text may have been cut within a character; spaces in a vocabulary's own entries stand for themselves.
    """
    if all(map(str.isascii, names)):
        return None
    try:
        raws = [name.encode() if name.isspace() else bytes(BYTE_OF[char] for char in name) for name in names]
        codecs.getincrementaldecoder("utf-8")().decode(b"".join(raws))
    except (KeyError, UnicodeDecodeError):
        return None
    return raws


def _sentencepiece_bytes(names: Sequence[str]) -> list[bytes] | None:
    """Return the bytes of SentencePiece's tokens; None where no token begins with its mark of a space."""
    if not any(name.startswith(METASPACE) for name in names):
        return None
    byte_tokens = [BYTE_TOKEN.fullmatch(name) for name in names]
    return [
        bytes.fromhex(byte[1]) if byte else name.replace(METASPACE, " ").encode()
        for name, byte in zip(names, byte_tokens, strict=True)
    ]


def decode_bytes(raw: bytes) -> str:
    r"""Return UTF-8 as text; bytes that are no whole character become `\xe2`."""
    return raw.decode("utf-8", "backslashreplace")


def words(tokens: Sequence[DisplayToken]) -> list[str]:
    """Return for each token the word that it begins, in lower case; names of unknown tokens stay as they are.

    Tokens within a word, punctuation and special tokens begin none: their entry is empty.
    """
    raws: list[bytes] = []
    start = None  # of the current word
    for place, token in enumerate(tokens):
        raws.append(b"")
        if token.special or not _may_belong_to_word(token.raw):
            start = None
        elif start is None or token.begins:
            start, raws[place] = place, token.raw.strip()
        else:
            raws[start] += token.raw
    texts = [text if text in UNKNOWN else text.lower() for text in map(decode_bytes, raws)]
    return [text if any(map(str.isalnum, text)) else "" for text in texts]


def _may_belong_to_word(raw: bytes) -> bool:
    """Return whether it has a letter or digit, or part of a character that may be one."""
    return any(char.isalnum() or "\udc80" <= char <= "\udcff" for char in raw.decode("utf-8", "surrogateescape"))


def sentences(tokens: Sequence[DisplayToken]) -> list[range]:
    """Return the places of a text's whole sentences, with the closing characters that follow their ends."""
    complete, start, ended = [], 0, False
    for place, token in enumerate(tokens):
        closing = all(char in SENTENCE_ENDS or category(char) in CLOSING for char in token.text)
        if token.special or (ended and not closing):
            complete += [range(start, place)] * ended
            start = place + token.special
        ended = not token.special and closing and (ended or bool(set(token.text) & SENTENCE_ENDS))
    return [*complete, range(start, len(tokens))] if ended else complete


def short_part(tokens: Sequence[DisplayToken], limit: int) -> range:
    """Return the places of the whole text if it has at most `limit` tokens, else of its longest sentence that has.

    Where no sentence is that short, it is the beginning of the text.
    """
    if len(tokens) <= limit:
        return range(len(tokens))
    return max((each for each in sentences(tokens) if len(each) <= limit), key=len, default=range(limit))


def frequent_words(words: Sequence[str], number: int) -> list[str]:
    """Return the `number` most frequent words that occur more than once; among equals, the earliest."""
    return [word for word, count in Counter(filter(None, words)).most_common(number) if count > 1]
