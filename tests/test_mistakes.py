"""Invalid parameters and system limits (disk, memory, locks, permissions) cause a single, short error."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from conftest import REPOSITORY, SHORT, Workspace, run_capture, write_parameters
from safetensors import SafetensorError
from stage_process import PATHS, run_to_its_end

from attnmix.core import caches, disk
from attnmix.core.errors import InputError
from attnmix.core.names import ACTIVATIONS
from attnmix.core.settings import (
    CaptureParameters,
    DatasetParameters,
    FinetuneParameters,
    LoraParameters,
    MeasureParameters,
    UmapParameters,
    checked_section,
)
from attnmix.core.store.runs import Run
from attnmix.core.terminal import printable
from attnmix.data.source import read_source
from attnmix.models.loading import load_base, load_classifier
from stages import capture, download, faithfulness, finetune, inspect, measure, reduce, render
from stages.common.cli import _explain_error, as_command
from stages.common.parameters import Parameters, read_parameters
from stages.common.resume import UNFINISHED, lock_stage
from stages.render import changed_parameters

DEFAULT = REPOSITORY / "params.yaml"
CAPTURE = {"documents": [0, 1, 2], "max_length": 40}
HOLD = "from stages.common.resume import lock_stage\nwith lock_stage('render'): print(flush=True), input()"


def keys(values: dict[str, Any]) -> dict[str, str]:
    """Return the `repr` of each value by `section.key`, because 4 == 4.0 and True == 1 in Python."""
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in values.items()}
    return {f"{name}.{key}": repr(value) for name, section in sections.items() for key, value in section.items()}


def test_defaults_match_shipped_parameters() -> None:
    if subprocess.run(["git", "diff", "--quiet", "HEAD", DEFAULT], cwd=REPOSITORY, check=False).returncode == 1:
        pytest.skip("params.yaml was changed, for example by `dvc exp run`")
    assert keys(Parameters().model_dump()) == keys(yaml.safe_load(DEFAULT.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("umap.metrik", "cosine", ["umap.metrik is unknown; did you mean umap.metric?", "n_neighbors"]),
        ("finetune.epochs", "three", ["finetune.epochs: 'three' is not allowed: input should be a valid integer"]),
        ("finetune.learning_rate", float("nan"), ["finetune.learning_rate", "finite"]),
        ("finetune.precision", "fp8", ["finetune.precision: 'fp8'", "fp32", "bf16", "fp16"]),
        ("dataset.label_column", "text", ["dataset: text_column and label_column need different names"]),
        ("dataset.text_column", ["text"], ["dataset.text_column: ['text'] is not allowed: specify one column name"]),
        ("finetune.lora", {"rank": 0}, ["finetune.lora.rank: 0 is not allowed"]),
        ("finetune.lora", {"ranks": 2}, ["ranks is unknown; did you mean finetune.lora.rank?", "targets"]),
        ("finetune.lora", {"targets": "query"}, ["finetune.lora.targets: 'query'", "all-linear, or a list of names"]),
        ("dataset.test_split", "train", ["dataset: train_split and test_split need different names"]),
        ("capture.documents", [3, 3], ["capture.documents", "more than once"]),
        ("capture.texts", ["a", "\u200b\u0301\x00"], ["capture.texts[1]", "the text is empty"]),
        ("capture.texts", ["a", "b\x00c"], ["capture.texts[1]", "NUL character"]),
        *(
            (
                "capture.texts",
                ["a", each],
                [f"capture.texts[1]: {each!r} is not allowed: specify a text, or a list of two"],
            )
            for each in (None, float("nan"), 3, True, [], ["a", "b", "c"], ["a", None])
        ),
        ("capture.texts", [["a", " "]], ["capture.texts[0]", "the text is empty"]),
        ("capture.texts", [["a"]], ["capture.texts[0]: ['a'] is not allowed: specify a text, or a list of two"]),
        ("capture.points", ["attention_nrom"], ["capture.points[0]: 'attention_nrom'", "allowed: word_embedding"]),
        ("capture.store", "s4://bucket/run", ["capture.store", "fsspec has no file system s4://; allowed: "]),
        ("umap.stability_seeds", [3, 2], ["umap.stability_seeds", "2 is also umap.seed; choose"]),
    ],
)
def test_mistake_names_key_and_allowed_values(tmp_path: Path, key: str, value: Any, expected: list[str]) -> None:
    section, _, name = key.partition(".")
    write_parameters(tmp_path, **{section: {name: value}})
    with pytest.raises(InputError) as raised:
        read_parameters(tmp_path / "params.yaml")
    assert [part for part in expected if part not in str(raised.value)] == []
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        # Values that `-S dataset.test_split=` and `-S dataset.text_column=0` write into params.yaml.
        *(
            (f"dataset.{name}", "", None)
            for name in ("revision", "test_split", "group_column", "train_limit", "test_limit")
        ),
        *((key, "", None) for key in ("model.revision", "model.base", "finetune.lora", "umap.max_points")),
        *(
            (f"dataset.{name}", 0, "0")
            for name in ("name", "train_split", "text_column", "label_column", "group_column")
        ),
        ("dataset.text_column", [0, "b"], ["0", "b"]),
        ("model.revision", 1234567, "1234567"),
    ],
)
def test_empty_overrides_and_digits_are_interpreted(tmp_path: Path, key: str, value: Any, expected: Any) -> None:
    section, _, name = key.partition(".")
    write_parameters(tmp_path, **{section: {name: value}})
    assert getattr(getattr(read_parameters(tmp_path / "params.yaml"), section), name) == expected


def test_numbers_in_dvc_format_are_accepted(tmp_path: Path) -> None:
    write_parameters(tmp_path)
    file = tmp_path / "params.yaml"
    text = file.read_text()
    file.write_text(text.replace("learning_rate: ", "learning_rate: 2e-05 # "))
    assert read_parameters(tmp_path / "params.yaml").finetune.learning_rate == 2e-5


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"seed: 1\nmodel: {}\nseed: 2\n", 'is not valid YAML: .*found duplicate key "seed".*line 3'),
        (b"seed: \xff", "is not valid YAML"),
        (b"", "must contain the sections seed, arithmetic, dataset, model"),
        (None, "is missing; run the pipeline in the repository's root"),
    ],
)
def test_invalid_parameter_file_is_one_error(tmp_path: Path, content: bytes | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "params.yaml").write_bytes(content)
    with pytest.raises(InputError, match=rf"params\.yaml {expected}") as raised:
        read_parameters(tmp_path / "params.yaml")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "key"), [("5: 3", "5"), ("umap: {5: 3}", "umap.5"), ("finetune: {lora: {5: 3}}", "finetune.lora.5")]
)
def test_number_as_key_is_an_unknown_key(tmp_path: Path, content: str, key: str) -> None:
    (tmp_path / "params.yaml").write_text(content)
    with pytest.raises(InputError, match=rf"params\.yaml: {key} is unknown; allowed: "):
        read_parameters(tmp_path / "params.yaml")


def test_parameters_are_checked_before_heavy_imports(tmp_path: Path) -> None:
    write_parameters(tmp_path, render={"formts": ["png"]})
    for heavy in ("torch", "transformers", "pandas", "numba", "matplotlib"):
        (tmp_path / f"{heavy}.py").write_text(f"raise SystemExit('{heavy} was imported')")
    path = {"PYTHONPATH": os.pathsep.join(map(str, [tmp_path, REPOSITORY])), "PATH": ""}
    run = run_to_its_end([sys.executable, "-m", "stages", "capture"], tmp_path, path, inherited={})
    assert run.stderr.startswith("error: params.yaml: render.formts is unknown; did you mean render.formats?")
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert not (tmp_path / "data").exists()


def set_free_disk(patch: pytest.MonkeyPatch, size: float) -> None:
    patch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=size))


def test_insufficient_disk_is_reported_before_writing(
    workspace: Workspace, tiny_bert: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_capture(workspace(capture=CAPTURE), tiny_bert)
    written = sum(path.stat().st_size for path in ACTIVATIONS.rglob("*.zarr/c/**/*") if path.is_file())
    shutil.rmtree(ACTIVATIONS)
    set_free_disk(monkeypatch, written / 2)
    reduce = "capture.points, capture.documents, capture.drawn, capture.max_length or capture.dtype"
    expected = rf"^capture: \d+ tokens at 17 points need \S+ GB of disk space, but .* reduce {reduce}$"
    with pytest.raises(InputError, match=expected):
        run_capture(folder, tiny_bert)
    assert not list(Path().rglob("*.zarr"))
    set_free_disk(monkeypatch, written)
    run_capture(folder, tiny_bert)
    assert ACTIVATIONS.is_dir()


CODES = "\x1b[31m\x9b2J\u202e\r\ud800"
ESCAPED = r"\x1b[31m\x9b2J\u202e\r\ud800"


def test_terminal_codes_are_escaped() -> None:
    kept = "\n\tb é 東京 \U0001f468\u200d\U0001f469"
    assert printable(CODES + kept) == ESCAPED + kept
    assert str(InputError(f"{CODES}\n")) == ESCAPED + r"\n"


def test_class_and_file_names_are_escaped_on_terminal(
    workspace: Workspace,
    tiny_bert: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = "\x1b[31m"
    rows = [f"the film was {word} {number},{code}{word}" for number in range(20) for word in ("good", "bad")]
    folder = workspace(model={"name": str(tiny_bert)}, dataset={"name": "own.csv", "test_split": "test"})
    (folder / "own.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # logs to the terminal
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit) as end, as_command("download"):
        download.main(read_parameters())
    logging.warning("own.csv contains %s", code)
    assert r"contains the class '\x1b[31mbad'" in str(end.value)
    printed = "".join(capfd.readouterr())
    assert r"own.csv contains \x1b[31m" in printed
    assert code not in str(end.value) + printed
    with pytest.raises(InputError, match=r"\\x1b\[31mown.csv is neither an existing file") as error:
        read_source(DatasetParameters(name=f"{code}own.csv"), {"text": "text", "label": "label"})
    assert code not in str(error.value)  # the message that a stage prints


def test_head_changes_print_no_transformers_report(tiny_bert: Path) -> None:
    messages: list[logging.LogRecord] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record)

    handler = Recorder()
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        load_base(tiny_bert)
        load_classifier(tiny_bert, {number: str(number) for number in range(5)})
        assert logger.level == logging.INFO
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert messages == []


def test_unwritable_home_uses_temporary_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("NUMBA_CACHE_DIR", "MPLCONFIGDIR")
    for name in (*variables, "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(caches, "_list_code_folders", lambda: [tmp_path / "file/site-packages"])
    monkeypatch.setattr(caches, "_create_temporary_folder", lambda: tmp_path / "temporary")
    monkeypatch.setattr(sys.modules["numba"].config, "CACHE_DIR", "")
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    caches.use_writable_caches()
    assert [name for name in variables if name in os.environ] == []
    monkeypatch.setenv("HOME", str(tmp_path / "file/home"))
    caches.use_writable_caches()
    folders = [str(tmp_path / "temporary" / name) for name in ("numba", "matplotlib")]
    assert [os.environ[name] for name in variables] == folders
    assert os.environ["NUMBA_CACHE_DIR"] == sys.modules["numba"].config.CACHE_DIR
    for name in variables:
        monkeypatch.delenv(name)


UNWRITABLE_CODE = """
from pathlib import Path
from attnmix.core import caches
caches._list_code_folders = lambda: [Path.home()]
import attnmix.maps.layouts, attnmix.figures.style
"""


@pytest.mark.long  # importing numba is slow
def test_maps_and_figures_import_without_writable_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    locators = "UserProvidedCacheLocator,UserWideCacheLocator"  # no cache next to the code
    own = {"HOME": str(tmp_path / "file/home"), "NUMBA_CACHE_LOCATOR_CLASSES": locators, "TMPDIR": str(tmp_path)}
    hidden = ("NUMBA_CACHE_DIR", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    run = run_to_its_end([sys.executable, "-c", UNWRITABLE_CODE], tmp_path, PATHS | own, inherited)
    assert (run.returncode, run.stderr) == (0, "")
    assert list(tmp_path.glob("attnmix-caches-*")) == []


def raise_as_cuda_does() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@pytest.mark.parametrize("allocate", [lambda: np.empty(2**50), lambda: torch.empty(2**50), raise_as_cuda_does])
def test_out_of_memory_error_names_parameter(allocate: Callable[[], object]) -> None:
    expected = r"^error: capture: out of memory \(.*allocate.*\); reduce capture\.batch_tokens or capture\.max_length$"
    with pytest.raises(SystemExit, match=expected), as_command("capture"):
        allocate()
    with pytest.raises(RuntimeError, match="of another kind"), as_command("capture"):
        raise RuntimeError("of another kind")


def test_second_run_of_stage_is_refused(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = workspace()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=os.environ | PATHS, **pipes) as first:
        assert first.stdout
        assert first.stdout.readline() == b"\n"
        message = f"^another run of render is in progress in {folder}; wait until it finishes, or stop it$"
        with pytest.raises(InputError, match=message), lock_stage("render"):
            pytest.fail("lock_stage raised no error")
        with monkeypatch.context() as patch:  # only the first process of a run locks the stage
            patch.setenv("RANK", "1")
            with lock_stage("render"):
                pass
        first.kill()
        first.wait()
        with lock_stage("render"):
            assert UNFINISHED.is_dir()
        assert not UNFINISHED.exists()


def test_unwritable_folder_is_one_error(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = workspace()
    monkeypatch.setattr(os, "access", lambda *_: False)  # as on a read-only mount
    with pytest.raises(InputError, match=f"^{folder} is not a folder with write permission"), lock_stage("render"):
        pytest.fail("lock_stage raised no error")


@pytest.mark.parametrize("stage", [finetune, capture, inspect, measure, faithfulness, reduce, render])
@pytest.mark.parametrize("with_models", [False, True])
def test_missing_inputs_name_the_stage_that_writes_them(
    workspace: Workspace, tiny_bert: Path, stage: Any, with_models: bool
) -> None:
    folder = workspace(**{section: {"max_length": 40} for section in ("finetune", *SHORT)})
    if with_models:
        for checkpoint in Run(Path()).checkpoints.values():
            shutil.copytree(tiny_bert, folder / checkpoint)
    expected = (
        r"^(models|data|features)/\S+ (is missing|contains no feature store); run the stage \w+(, which writes it)?$"
    )
    with pytest.raises(InputError, match=expected):
        stage.main(read_parameters())


@pytest.mark.parametrize(
    ("section", "key", "name", "place"),
    [
        (MeasureParameters, "methods", "alti", "measure.matrices"),
        (MeasureParameters, "matrices", "attn_n", "measure.methods"),
        (CaptureParameters, "points", "joint", "umap.layouts"),
        (UmapParameters, "layouts", "ffn_output", "capture.points"),
    ],
)
def test_misplaced_name_is_explained(section: Any, key: str, name: str, place: str) -> None:
    with pytest.raises(InputError, match=rf"^{key}\[0\]: '{name}' is not allowed: .*; it belongs to {place}$"):
        checked_section(section, **{key: [name]})


def test_lora_settings_are_one_changed_parameter() -> None:
    lora = LoraParameters(rank=4)
    parameters = Parameters(finetune=FinetuneParameters(lora=lora), seed=5)
    changed = {key: (value, default) for key, value, default in changed_parameters(parameters)}
    assert changed.keys() == {"seed", "finetune.lora"}
    assert changed["seed"] == ("5", "111")
    value, default = changed["finetune.lora"]
    assert yaml.safe_load(value) == lora.model_dump()
    assert default == "empty"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EFBIG, "File too large", "model.safetensors"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 448 vs 336"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_one_error(error: Exception) -> None:
    message = _explain_error(error, "finetune")
    assert message is not None
    assert "File too large" in message or "free some space and run again" in message


def test_failed_publication_keeps_the_old_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "output").mkdir()
    (tmp_path / "output/old").touch()
    with monkeypatch.context() as patch:
        patch.setattr(disk.shutil, "move", Mock(side_effect=OSError("full")))
        with pytest.raises(OSError, match="full"):
            disk.publish_output(tmp_path / "new", tmp_path / "output")
    assert (tmp_path / "output/old").exists()
    (tmp_path / "new/file").touch()
    disk.publish_output(tmp_path / "new", tmp_path / "output")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["output", "output/file"]
