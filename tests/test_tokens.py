"""Tokens as people read them: whatever the tokenizer, their parts make up the text, and its words are found again."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pandas as pd
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from attnmix.core.points import DECODER_INPUT, Site
from attnmix.figures.tokens import (
    BYTE_OF,
    CapturedTexts,
    DisplayToken,
    frequent_words,
    read_captured,
    sentences,
    short_part,
    words,
)

# ruff: noqa: RUF001  # the signs that look like others are what is tested
TEXT = "The café wasn’t ‘dull’, the 42 cafés weren't: naïve film \U0001f600 film 你好 the film\n\nThe end ## of ▁ it."
NO_STEPS = pd.DataFrame({"step": [], "layer": []})


def tokens_table(tokens: Sequence[str], special: Sequence[str] = (), document: str = "test/0") -> pd.DataFrame:
    """A tokens table; the first of `special` is the start token, the second the end token."""
    classes = dict(zip(special, ("cls", "sep"), strict=False))
    table = pd.DataFrame({"document": document, "position": range(len(tokens)), "token": tokens})
    return table.assign(token_id=0, token_class=[classes.get(token, "word") for token in tokens])


def read(tokens: Sequence[str], special: Sequence[str] = ()) -> list[DisplayToken]:
    return read_captured(tokens_table(tokens, special), NO_STEPS).readings[0]


def byte_level(vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """As in Llama's: characters that the vocabulary lacks become bytes."""
    letters = sorted(set(TEXT.replace(" ", "▁")) - {"\U0001f600", "你"})
    kept = {piece: n for n, piece in enumerate(["<unk>", *(f"<0x{n:02X}>" for n in range(256)), *letters, "▁t", "he"])}
    tokenizer = Tokenizer(models.BPE(kept, [("▁", "t"), ("h", "e")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


@pytest.mark.parametrize("tokenizer", [byte_level(256), byte_level(300), metaspace()], ids=["bytes", "bpe", "spaces"])
def test_parts_of_tokens_make_up_the_text_and_words_begin_after_spaces(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(TEXT).tokens
    text = TEXT.replace("▁", " ") if "▁" in tokens else TEXT  # SentencePiece cannot tell them apart
    pieces = read(["<s>", *tokens, "</s>"], ["<s>", "</s>"])
    assert (pieces[0].label, pieces[-1].label) == ("<s>", "</s>")
    own, before = pieces[1:-1], b""
    for piece in own:
        assert piece.begins == (not before or before[-1:].isspace() or piece.raw[:1].isspace())
        before += piece.raw
    assert before.decode() == text
    assert not any("Ġ" in piece.label or "▁" in piece.label or " " in piece.label for piece in own)
    # A tokenizer may part a word at an apostrophe.
    assert re.findall(r"\w+", " ".join(words(pieces))) == re.findall(r"\w+", text.lower())
    assert frequent_words(words(pieces), 2) == ["the", "film"]


def test_bytes_are_those_of_byte_level_tokenizers() -> None:
    decoder = decoders.ByteLevel()
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert all(decoder.decode([char]) == chr(byte) for char, byte in BYTE_OF.items() if byte < 128)
    assert sorted(BYTE_OF.values()) == list(range(256))
    assert [piece.label for piece in read(["It", "âĢĻ", "s", "Ġcaf", "Ã©", "ĠðŁĺ", "Ģ", "ĊĊ"])] == [
        "It", "’", "s", "␣caf", "é", "␣\\xf0\\x9f\\x98", "\\x80", "⏎⏎",
    ]  # fmt: skip


def test_words_are_put_together_from_their_pieces() -> None:
    pieces = read(["[CLS]", "un", "##lov", "##ed", ",", "The", "film", "the", "[SEP]"], ["[CLS]", "[SEP]"])
    assert words(pieces) == ["", "unloved", "", "", "", "the", "film", "the", ""]
    assert [piece.label for piece in pieces[:4]] == ["[CLS]", "un", "##lov", "##ed"]
    assert [piece.text for piece in pieces[:4]] == ["[CLS]", "un", "lov", "ed"]
    assert [piece.begins for piece in pieces[:5]] == [True, True, False, False, True]
    assert frequent_words(words(pieces), 3) == ["the"]
    byte_level = read(["<s>", "A", "Ġfi", "lm", ".", "Ġa", "</s>"], ["<s>", "</s>"])
    assert words(byte_level) == ["", "a", "film", "", "", "a", ""]
    assert [piece.text for piece in byte_level] == ["<s>", "A", "fi", "lm", ".", "a", "</s>"]
    assert words(read(["▁fi", "lm", "<0xC3>", "<0xA9>", "▁a"])) == ["filmé", "", "", "", "a"]


@pytest.mark.parametrize(
    "tokens",
    [
        ["Était", "##é", "caf", "##é"],  # Latin-1 letters, but no UTF-8
        ["Był", "##ła", "ħ", "Ġ"],  # characters that byte-level BPE has for bytes, but no UTF-8
        ["a", "##b", "##", "#"],
        ["\u202e", "\U0001f600", "\x00", "$x$"],
    ],
)
def test_pieces_of_wordpiece_are_not_taken_for_bytes(tokens: list[str]) -> None:
    assert [piece.label for piece in read(tokens)] == tokens
    assert [piece.begins for piece in read(tokens)] == [not (token[:2] == "##" and token[2:]) for token in tokens]


def test_a_text_that_was_cut_within_a_character_is_still_read() -> None:
    assert [piece.label for piece in read(["<s>", "Ġa", "ĠðŁĺ", "</s>"], ["<s>", "</s>"])] == [
        "<s>", "␣a", "␣\\xf0\\x9f\\x98", "</s>",
    ]  # fmt: skip
    assert [piece.label for piece in read(["Ġa", "   ", "b"])] == ["␣a", "␣␣␣", "b"]  # spaces as they are: ModernBERT
    assert [piece.begins for piece in read(["Ġa", "   ", "b"])] == [True, True, True]


def decoded() -> CapturedTexts:
    table = tokens_table(["<s>", "Ġa", "Ġfi", "lm", "</s>"], ["<s>", "</s>"])
    both = pd.concat([table, table.assign(document="test/1")], ignore_index=True)
    both["decoder_token"] = ["</s>", "<s>", "Ġa", "Ġfi", "lm"] * 2
    steps = pd.DataFrame({"step": ["heads"] * 4 + ["cross_attention"] * 2, "layer": [1, 2, 3, 4, 3, 4]})
    return read_captured(both, steps)


def test_a_decoder_reads_each_text_one_token_later() -> None:
    captured = decoded()
    assert [piece.label for piece in captured.readings[1]] == ["</s>", "<s>", "␣a", "␣fi", "lm"] * 2
    assert [piece.token_class for piece in captured.readings[1]] == ["sep", "cls", "word", "word", "word"] * 2
    assert words(captured.readings[1]) == ["", "", "a", "film", ""] * 2
    assert captured.encoder == 2
    sites = [Site(0, "word_embedding"), Site(2, "layer_output"), Site(2, DECODER_INPUT), Site(3, "attention_heads")]
    assert [captured.reading(site) for site in sites] == [0, 0, 1, 1]
    assert captured.class_label("sep") == "</s>"


def test_without_special_tokens_none_is_called_so() -> None:
    captured = read_captured(tokens_table(["The", "Ġfilm"]), NO_STEPS)
    assert captured.class_label("cls") == captured.class_label("sep") == ""
    assert captured.encoder is None
    assert captured.reading(Site(9, "layer_output")) == 0


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("[CLS] It works . Does it ? ( Yes ! ) No [SEP]", ["It works .", "Does it ?", "( Yes ! )"]),
        ("[CLS] Well . . . \u201c so \u201d , then !! [SEP]", ["Well . . .", "\u201c so \u201d , then !!"]),
        ("[CLS] 映画 。 良い [SEP]", ["映画 。"]),
        ("no end", []),
        ("[CLS] [SEP]", []),
        ("", []),
    ],
)
def test_sentences_are_whole_and_hold_no_special_token(tokens: str, expected: list[str]) -> None:
    pieces = read(tokens.split(), ["[CLS]", "[SEP]"])
    assert [" ".join(pieces[place].label for place in each) for each in sentences(pieces)] == expected


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ("[CLS] a film . [SEP]", 5, range(5)),  # the whole text
        ("[CLS] a good film . a film . [SEP]", 5, range(1, 5)),  # the longest that fits
        ("[CLS] a good film . a film . [SEP]", 3, range(5, 8)),
        ("[CLS] a good film . a film . [SEP]", 2, range(2)),  # none fits
        ("[CLS]", 5, range(1)),
    ],
)
def test_short_part_of_a_text_is_a_whole_sentence_where_one_fits(tokens: str, most: int, expected: range) -> None:
    assert short_part(read(tokens.split(), ["[CLS]", "[SEP]"]), most) == expected
