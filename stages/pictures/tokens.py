"""Captured tokens as a person reads them, whatever the tokenizer: their text, and whether they begin a word.

Tokenizers mark words in three ways. WordPiece marks the pieces that go on with a word (`##ing`). SentencePiece writes
the space before a word as `▁`. Byte-level BPE writes it as `Ġ`, and every byte that is no printable character of
Latin-1 as another character: `cafÃ©` is café.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple
from unicodedata import category

import pandas as pd

from stages.outputs.mixing import read_captured_ratios
from stages.sites import DECODER_INPUT, Site
from stages.vocabulary import SPECIAL_LOOKS

CONTINUES = "##"
METASPACE = "▁"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # of SentencePiece, where its vocabulary lacks a character
SPACE = "␣"  # in a label: a token without one goes on right where the one before it ended
NEWLINE = "⏎"
UNKNOWN = ("[UNK]", "<unk>")
DECODER_TOKEN = "decoder_token"
START_CLASS = "cls"
SENTENCE_ENDS = frozenset(".!?…。！？｡؟۔।॥")  # noqa: RUF001  # full stops of other scripts
CLOSING = ("Pe", "Pf")  # Unicode's categories of signs that still belong to the sentence before them


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE's character for each byte, the other way round: printable ones of Latin-1 stand for themselves."""
    themselves = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_OF = _byte_characters()


class Piece(NamedTuple):
    """One token of a text."""

    label: str
    """How it is called by itself."""
    raw: bytes
    """Its part of the text, in UTF-8; several tokens may share a character."""
    begins: bool
    """Whether it begins a word, or stands alone."""
    token_class: str

    @property
    def special(self) -> bool:
        """Whether the tokenizer added it to the text."""
        return self.token_class in SPECIAL_LOOKS

    @property
    def text(self) -> str:
        """Its part of the text without spaces around it; the label where nothing is left."""
        return spelt(self.raw).strip(" ").replace("\n", NEWLINE) or self.label


class Captured(NamedTuple):
    """The captured texts, read."""

    tokens: pd.DataFrame
    readings: list[list[Piece]]
    """Every row of `tokens`; beside an encoder's decoder a second time, as the decoder sees it."""
    encoder: int | None
    """How many layers are the encoder's, beside a decoder."""

    def reading(self, site: Site) -> int:
        """Which of the readings a site's vectors are of."""
        after = site.point == DECODER_INPUT or (self.encoder is not None and site.layer > self.encoder)
        return int(after and len(self.readings) > 1)

    def called(self, token_class: str) -> str:
        """The tokens of a class, such as `<s>`."""
        of_class = (piece.label for reading in self.readings for piece in reading if piece.token_class == token_class)
        return " ".join(dict.fromkeys(of_class))


def with_classes(tokens: pd.DataFrame) -> pd.DataFrame:
    """The captured tokens, and of each the `token_class` that `measure` found."""
    keys = ["document", "position"]
    documents = tokens["document"].unique().tolist()
    classes = read_captured_ratios(documents, [*keys, "token_class"], [("layer", "==", 1)]).drop_duplicates(keys)
    return tokens.merge(classes, on=keys, how="left")


def read_captured(tokens: pd.DataFrame, steps: pd.DataFrame) -> Captured:
    """From `document, position, token, token_class`, and `decoder_token` beside an encoder; `steps` are the layers'."""
    read = [_pieces(tokens["document"], tokens["token"], tokens["token_class"])]
    if DECODER_TOKEN in tokens:
        special = tokens[tokens["token_class"].isin(SPECIAL_LOOKS)].set_index("token")["token_class"].to_dict()
        start = [special.get(token, START_CLASS) for token in tokens[DECODER_TOKEN]]
        before = tokens.groupby("document")["token_class"].shift()  # the token that it sees
        classes = before.where(before.notna(), pd.Series(start, tokens.index))
        read.append(_pieces(tokens["document"], tokens[DECODER_TOKEN], classes))
    crossing = steps.loc[steps["step"] == "cross_attention", "layer"]
    return Captured(tokens, read, int(crossing.min()) - 1 if len(read) > 1 and len(crossing) else None)


def _pieces(documents: pd.Series, tokens: pd.Series, classes: pd.Series) -> list[Piece]:
    pieces: list[Piece] = []
    rows = pd.DataFrame({"document": documents, "token": tokens, "token_class": classes})
    for _, of_document in rows.groupby("document", sort=False):
        pieces += _of_document(of_document["token"].tolist(), of_document["token_class"].tolist())
    return pieces


def _of_document(tokens: Sequence[str], classes: Sequence[str]) -> list[Piece]:
    own = [token for token, name in zip(tokens, classes, strict=True) if name not in SPECIAL_LOOKS]
    of_text = _of_bytes(own) or _of_metaspace(own)
    pieces: list[Piece] = []
    texts = iter(of_text or ())
    for token, name in zip(tokens, classes, strict=True):
        after = pieces[-1] if pieces else None
        apart = after is None or after.special
        if name in SPECIAL_LOOKS:
            piece = Piece(token, token.encode(), True, name)
        elif of_text is None:
            goes_on = token.startswith(CONTINUES) and token != CONTINUES
            text = token.removeprefix(CONTINUES) if goes_on else token
            piece = Piece(token, text.encode(), apart or not goes_on, name)
        else:
            raw = next(texts)
            spaced = spelt(raw)[:1].isspace() or (after is not None and spelt(after.raw)[-1:].isspace())
            piece = Piece(_label(raw), raw, apart or spaced, name)
        pieces.append(piece)
    return pieces


def _label(raw: bytes) -> str:
    return spelt(raw).replace(" ", SPACE).replace("\n", NEWLINE)


def _of_bytes(tokens: Sequence[str]) -> list[bytes] | None:
    """What byte-level BPE's tokens stand for; None for other tokenizers' tokens.

    Those hold other characters, or are no UTF-8 when they are taken for bytes, or hold ASCII alone, where it is the
    same. A text may have been cut within a character; spaces in a vocabulary's own entries stand for themselves.
    """
    if all(map(str.isascii, tokens)):
        return None
    try:
        texts = [token.encode() if token.isspace() else bytes(BYTE_OF[each] for each in token) for token in tokens]
        codecs.getincrementaldecoder("utf-8")().decode(b"".join(texts))
    except (KeyError, UnicodeDecodeError):
        return None
    return texts


def _of_metaspace(tokens: Sequence[str]) -> list[bytes] | None:
    """What SentencePiece's tokens stand for; None where no word begins with its mark."""
    if not any(token.startswith(METASPACE) for token in tokens):
        return None
    bytes_of = [BYTE.fullmatch(token) for token in tokens]
    return [
        bytes.fromhex(byte[1]) if byte else token.replace(METASPACE, " ").encode()
        for token, byte in zip(tokens, bytes_of, strict=True)
    ]


def spelt(raw: bytes) -> str:
    r"""UTF-8 as text; what is no whole character becomes `\xe2`."""
    return raw.decode("utf-8", "backslashreplace")


def words(pieces: Sequence[Piece]) -> list[str]:
    """For each token the whole word that it begins, in lower case; what stands for unknown ones is left as it is.

    Empty within a word, and for punctuation and special tokens.
    """
    begun: list[bytes] = []
    last = None  # the place of the word that goes on
    for place, piece in enumerate(pieces):
        begun.append(b"")
        if piece.special or not _in_word(piece.raw):
            last = None
        elif last is None or piece.begins:
            last, begun[place] = place, piece.raw.strip()
        else:
            begun[last] += piece.raw
    found = [word if word in UNKNOWN else word.lower() for word in map(spelt, begun)]
    return [word if any(map(str.isalnum, word)) else "" for word in found]


def _in_word(raw: bytes) -> bool:
    """Whether a letter or digit is in it, or part of a character that may be one."""
    return any(char.isalnum() or "\udc80" <= char <= "\udcff" for char in raw.decode("utf-8", "surrogateescape"))


def sentences(pieces: Sequence[Piece]) -> list[range]:
    """Where a text's whole sentences stand among its tokens; signs that follow an end belong to it."""
    found, start, ended = [], 0, False
    for place, piece in enumerate(pieces):
        signs = all(char in SENTENCE_ENDS or category(char) in CLOSING for char in piece.text)
        if piece.special or (ended and not signs):
            found += [range(start, place)] * ended
            start = place + piece.special
        ended = not piece.special and signs and (ended or bool(set(piece.text) & SENTENCE_ENDS))
    return [*found, range(start, len(pieces))] if ended else found


def short_part(pieces: Sequence[Piece], most: int) -> range:
    """The whole text, where it has at most so many tokens, else its longest sentence that has, else its beginning."""
    if len(pieces) <= most:
        return range(len(pieces))
    fitting = [each for each in sentences(pieces) if len(each) <= most]
    return max(fitting, key=len, default=range(most))


def frequent_words(begun: Sequence[str], number: int) -> list[str]:
    """The `number` most frequent of `words` that occur more than once; among equals, the one that comes first."""
    counts = Counter(filter(None, begun))
    return [word for word, count in counts.most_common(number) if count > 1]
