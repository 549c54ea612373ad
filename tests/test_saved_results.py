"""Saved results are loaded with the same numbers, names and types; computations that need the model raise an error."""

from __future__ import annotations

import copy
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from families import write_family

import attnmix
from attnmix.core.errors import InputError
from attnmix.results import result as result_module
from attnmix.results.archive import FACTS_FILE, shareable_source
from attnmix.results.measured_model import SavedModel

TEXTS = ["time flies like an arrow", "the film was good .", "not good", "a film", "good good film", "it was bad ."]
PAIRS = [("the film was good", "it was not bad"), ("a film", "an arrow")]
CONTROLS = ["shuffled_words", "text_mean_value", "swap", "class_share"]


@pytest.fixture(scope="module")
def model(tiny_bert: Path) -> attnmix.Model:
    return attnmix.load(str(tiny_bert))


@pytest.fixture(scope="module")
def result(model: attnmix.Model) -> attnmix.Measures:
    """Return a result with some values computed on demand: matrices of two texts, and the own share."""
    result = attnmix.measure(model, TEXTS, controls=CONTROLS, labels=["x", "y"] * 3)
    result.matrix("alti")
    result.matrix("norm")
    result.matrix("value_zeroing", text=3)
    result.own_share()
    return result


def saved_and_loaded(result: attnmix.Measures, folder: Path) -> attnmix.Measures:
    """Save a result to a file in `folder`, and return the result loaded from this file."""
    return attnmix.load_result(result.save(folder / "result.zip"))


def assert_same(result: attnmix.Measures, loaded: attnmix.Measures) -> None:
    assert isinstance(loaded.model, SavedModel)
    assert repr(loaded) == repr(result)
    assert loaded.texts == result.texts
    for name in ("ratios", "tokens"):
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(result, name), check_exact=True)
    pd.testing.assert_frame_equal(loaded.by_layer(), result.by_layer(), check_exact=True)
    for expected, found in zip(result.ratios_by_text, loaded.ratios_by_text, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_values_survive_round_trip_without_model(result: attnmix.Measures, tmp_path: Path) -> None:
    loaded = saved_and_loaded(result, tmp_path)
    assert_same(result, loaded)
    for method in result.methods:
        pd.testing.assert_frame_equal(loaded.controls(method), result.controls(method), check_exact=True)
    pd.testing.assert_frame_equal(loaded.own_share(), result.own_share(), check_exact=True)
    for name, text in (("alti", 0), ("alti_rollout", 0), ("norm", 0), ("value_zeroing", 3)):
        assert loaded.matrix(name, text=text).identical(result.matrix(name, text=text))
    comparison = attnmix.compare(loaded, result)
    assert comparison.all_rows()["difference"].abs().max() == 0
    assert loaded.save(tmp_path / "again.zip").read_bytes() == (tmp_path / "result.zip").read_bytes()


def test_pairs_and_token_ids_survive_round_trip(model: attnmix.Model, tmp_path: Path) -> None:
    for texts in (PAIRS, [[2, 7, 9, 3]]):
        result = attnmix.measure(model, texts)
        assert_same(result, saved_and_loaded(result, tmp_path))


def test_decoder_tokens_survive_round_trip(tmp_path: Path) -> None:
    write_family("t5", tmp_path / "t5")
    result = attnmix.measure(attnmix.load(tmp_path / "t5"), TEXTS[:2])
    last_layer = result.ratios_by_text[0].shape[1]
    of_encoder = result.matrix("norm", layer=1, text=1)
    of_decoder = result.matrix("norm", layer=last_layer, text=1)
    loaded = saved_and_loaded(result, tmp_path)
    assert_same(result, loaded)
    assert loaded.matrix("norm", layer=1, text=1).identical(of_encoder)
    assert loaded.matrix("norm", layer=last_layer, text=1).identical(of_decoder)
    assert of_encoder["token"].values.tolist() != of_decoder["token"].values.tolist()


@pytest.mark.parametrize(
    "call",
    [
        lambda loaded, _: loaded.parts(),
        lambda loaded, _: loaded.sinks(),
        lambda loaded, _: loaded.matrix("alti", text=1),
        lambda loaded, _: loaded.matrix("value_zeroing", text=2),
        lambda loaded, folder: loaded.to_html(folder / "page.html"),
        lambda loaded, _: loaded.show(),
    ],
)
def test_computation_without_model_is_one_error(result: attnmix.Measures, tmp_path: Path, call: Any) -> None:
    loaded = saved_and_loaded(result, tmp_path)
    with pytest.raises(
        InputError, match=r"^model: .* was not saved with the result; call load_result\(path, model=load\("
    ):
        call(loaded, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["result.zip"]


def test_comparison_omits_unknown_own_share(model: attnmix.Model, tmp_path: Path) -> None:
    result = attnmix.measure(model, TEXTS)
    loaded = saved_and_loaded(result, tmp_path)
    comparison = attnmix.compare(loaded, loaded)
    assert "own_share" not in set(comparison.rows["measure"])
    with pytest.raises(InputError, match=r"^model: .* was not saved with the result"):
        loaded.own_share()


def test_loaded_result_computes_with_its_model(
    model: attnmix.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = attnmix.measure(model, TEXTS[:2])
    file = result.save(tmp_path / "local.zip")
    monkeypatch.setattr(result_module, "shareable_source", lambda source: source)  # saves the path like a hub name
    by_source = attnmix.load_result(result.save(tmp_path / "source.zip"))
    for loaded in (attnmix.load_result(file, model=model), by_source):
        assert loaded.matrix("alti").identical(result.matrix("alti"))
        page = loaded.to_html(tmp_path / "loaded.html").read_bytes()
        assert page == result.to_html(tmp_path / "page.html").read_bytes()
    network = copy.deepcopy(model.network)
    with torch.no_grad():
        network.base_model.encoder.layer[0].attention.output.dense.weight.mul_(2)
    other = attnmix.load(network, model.tokenizer)
    with pytest.raises(InputError, match=r"^model: the weights of .* differ from those measured"):
        attnmix.load_result(file, model=other)
    with pytest.raises(InputError, match=r"^checkpoint: a saved result has only one model"):
        attnmix.load_result(file, checkpoint="finetuned")


def test_saved_file_contains_no_local_path(result: attnmix.Measures, tmp_path: Path) -> None:
    with zipfile.ZipFile(result.save(tmp_path / "result.zip")) as archive:
        facts = json.loads(archive.read(FACTS_FILE))
    assert facts["source"] == ""
    assert facts["model"] == result.model.name
    assert Path(result.model.source).is_absolute()
    assert shareable_source("owner/model") == "owner/model"


def broken_file(kind: str, result: attnmix.Measures, path: Path) -> None:
    """Write an invalid result file of this kind."""
    if kind == "no zip":
        path.write_text("<html>", encoding="utf-8")
    elif kind == "another zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other.txt", "text")
    elif kind == "other format":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(FACTS_FILE, json.dumps({"format": 1}))
    else:
        content = result.save(path).read_bytes()
        half = content[: len(content) // 2]
        damaged = {"truncated": half, "flipped bit": content.replace(b"PK\x03\x04", b"PK\x03\x05")}
        path.write_bytes(damaged[kind])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no zip", "File is not a zip file"),
        ("another zip", "facts.json"),
        ("other format", "its format is 1, but this version of attnmix needs 4"),
        ("truncated", "File is not a zip file"),
        ("flipped bit", "Bad magic number"),
    ],
)
def test_invalid_result_file_is_one_error(result: attnmix.Measures, tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "result.zip"
    broken_file(kind, result, path)
    with pytest.raises(
        InputError, match=rf"^path: {path} is damaged or not a result \(.*{message}.*\); pass a file written"
    ):
        attnmix.load_result(path)


def test_missing_path_is_one_error(result: attnmix.Measures, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^path: there is no file .*none.zip; pass a file written by result.save"):
        attnmix.load_result(tmp_path / "none.zip")
    with pytest.raises(InputError, match=r"^path: int is not a path; .* as in load_result\(path\)"):
        attnmix.load_result(3)  # type: ignore[arg-type]  # deliberately wrong
    with pytest.raises(InputError, match=r"^path: the folder .* does not exist"):
        result.save(tmp_path / "none" / "result.zip")
    with pytest.raises(InputError, match=r"^path: .*\.html is the name of a page; .*, or call result\.to_html\(path\)"):
        result.save(tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_model_with_other_output_is_an_error(model: attnmix.Model, tmp_path: Path) -> None:
    result = attnmix.measure(model, TEXTS)
    path = result.save(tmp_path / "result.zip")
    expected = result.own_share()
    pd.testing.assert_frame_equal(attnmix.load_result(path, model=model).own_share(), expected)
    changed = copy.deepcopy(model.network)
    for module in changed.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1.0
    with pytest.raises(InputError, match=r"^model: the output of .* differs from that of the measured model"):
        attnmix.load_result(path, model=attnmix.load(changed, model.tokenizer))


def test_unnamed_model_in_memory_is_not_searched_for(model: attnmix.Model, tmp_path: Path) -> None:
    unnamed = copy.deepcopy(model.network)
    for module in unnamed.modules():
        if hasattr(module, "config"):
            module.config.name_or_path = ""
    result = attnmix.measure(attnmix.load(unnamed, model.tokenizer), TEXTS)
    loaded = saved_and_loaded(result, tmp_path)
    with pytest.raises(InputError, match=r"^model: .* was not saved with the result; call load_result"):
        loaded.matrix("alti")


def test_changes_of_returned_values_do_not_change_the_result(model: attnmix.Model) -> None:
    result = attnmix.measure(model, TEXTS)
    for read in (
        lambda: result.matrix("attention", layer=1).values,
        lambda: result.parts()["own_share"].values,
        lambda: result.ratios_by_text[0],
        lambda: result.tokens["token_id"].to_numpy(),
        lambda: result.tokens["text"].to_numpy(),
    ):
        expected = read().copy()
        values = read()
        values.flags.writeable = True
        values[:] = 0
        np.testing.assert_array_equal(read(), expected)
    assert result == result
    assert result != attnmix.measure(model, TEXTS)


def test_special_files_are_kept_and_links_followed(result: attnmix.Measures, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for write in (result.save, result.to_html, attnmix.compare(result, result).to_html):
        with pytest.raises(InputError, match=r"^path: .*pipe is not a regular file; pass the path of a file$"):
            write(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link.zip").symlink_to("target.zip")
    assert result.save(tmp_path / "link.zip") == tmp_path / "link.zip"
    assert (tmp_path / "link.zip").is_symlink()
    assert attnmix.load_result(tmp_path / "target.zip").texts == result.texts
