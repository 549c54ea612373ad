"""Examples, snippets, notebooks and the wheel run as documented and print their documented output."""

from __future__ import annotations

import ast
import doctest
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from conftest import REPOSITORY, Workspace, prepared_for_capture
from stage_process import run_to_its_end

import attnmix

SCRIPTS = sorted((REPOSITORY / "examples").glob("*.py"))
NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[str]]:
    """Return a function that runs a script and returns the printed lines."""

    def run(script: Path) -> list[str]:
        monkeypatch.setattr(sys, "argv", [str(script)])
        runpy.run_path(str(script), run_name="__main__")
        return [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [each for each in SCRIPTS if each.stem != "what_the_class_needs"], ids=lambda path: path.stem
)
def test_example_prints_its_docstring_output(
    script: Path, printed: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").rpartition(":\n\n")[2]
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    output = printed(script)[: len(lines)]
    assert lines
    assert [NUMBER.sub("#", line).split() for line in output] == [NUMBER.sub("#", line).split() for line in lines]
    numbers = [float(number) for number in NUMBER.findall(" ".join(output))]
    assert numbers == pytest.approx([float(number) for number in NUMBER.findall(" ".join(lines))], abs=0.0101)


@pytest.mark.long
def test_example_of_edits_prints_all_rows(
    workspace: Workspace, printed: Callable[[Path], list[str]], tiny_bert: Path
) -> None:
    prepared_for_capture(workspace(capture={"documents": [0], "max_length": 40}), tiny_bert)
    rows = printed(REPOSITORY / "examples/what_the_class_needs.py")[-4:]
    assert rows[0].split()[0] == "none"
    assert float(rows[0].split()[-1]) == 1


@pytest.mark.long
def test_python_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/python.md").read_text("utf-8"), re.DOTALL):
        exec(block, names)
    assert names["comparison"].rows["difference"].abs().max() < 1e-6  # a model compared with itself
    assert {path.name for path in tmp_path.iterdir()} >= {"own_share.pdf", "result.zip", "both.html", "run"}


def test_python_guide_exports_files(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas as pd
    from datasets import load_from_disk
    from safetensors.numpy import load_file

    guide = (REPOSITORY / "docs/python.md").read_text(encoding="utf-8")
    (snippet,) = (each for each in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "safetensors" in each)
    monkeypatch.chdir(tmp_path)
    model = attnmix.load(str(tiny_bert))
    texts = ["time flies like an arrow", "the film was good .", "the plot was so lovely !", "it was not so dull ."]
    run = attnmix.capture(model, texts, "run", points=["layer_output"])
    exec(snippet.replace("6", str(model.layers)), {"attnmix": attnmix})
    vectors = run.features("layer_output", layers=[model.layers]).numpy()[0]
    assert (load_file("layer_3.safetensors")["layer_3"] == vectors).all()
    assert (load_from_disk("tokens").with_format("numpy")["vector"][:] == vectors).all()
    assert pd.read_parquet("map.parquet").columns[-2:].tolist() == ["x", "y"]


@pytest.mark.long
def test_coding_agent_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "llms.txt").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(snippet, names)
    assert {"model", "result", "run"} <= names.keys()
    assert "flies" in Path("page.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_measure_guide_examples_print_their_output() -> None:
    page = (REPOSITORY / "docs/measures/which.md").read_text(encoding="utf-8")
    runner, names = doctest.DocTestRunner(), dict[str, Any]()
    examples = re.findall(r"```pycon\n(.*?)```", page, re.DOTALL)
    for call in ("own_share(", ".parts()", '"swap"', ".controls()", "attnmix.compare(", "model.intervene("):
        assert any(call in example for example in examples), f"no example of {call}"
    for block in examples:
        example = doctest.DocTestParser().get_doctest(block, names, "which.md", "docs/measures/which.md", 0)
        example.globs = names  # each example continues the previous one
        runner.run(example, clear_globs=False)
    assert runner.summarize().failed == 0


NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def words(output: Mapping[str, Any]) -> list[str]:
    """Return the words of a cell's output. Numbers are excluded because their last digits depend on the machine."""
    text = output.get("text") or output["data"].get("text/plain", "")
    return re.findall(r"[^\W\d]+", "".join(text))


def is_progress(output: Mapping[str, Any]) -> bool:
    """Return True for estimated times of long loops, which are printed on slow machines only."""
    text = "".join(output.get("text", ""))
    return output.get("name") == "stderr" and re.fullmatch(r"([\w ]+: about \d+ s\n)+", text) is not None


@pytest.mark.notebooks
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_reproduces_its_outputs(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # warning of tqdm without ipywidgets
    stored, run = nbformat.read(notebook, 4), nbformat.read(notebook, 4)
    nbclient.NotebookClient(run, timeout=600, resources={"metadata": {"path": str(notebook.parent)}}).execute()
    for before, after in zip(stored.cells, run.cells, strict=True):
        outputs = [each for each in after.get("outputs", []) if not is_progress(each)]
        assert [each for each in outputs if each.get("name") == "stderr"] == []
        # Cells have a tag if their outputs are too large to store or depend on a run of the pipeline.
        if not before.metadata.get("tags"):
            assert [words(each) for each in outputs] == [words(each) for each in before.get("outputs", [])]


BUILD = "import sys; from setuptools.build_meta import *; to = sys.argv[1]; build_sdist(to); build_wheel(to)"
NEEDED = {
    *("README.md", "LICENSE", "params.yaml", "dvc.yaml", "dvc.lock", "Makefile", "requirements.lock", ".dvc/config"),
    *("data/sample/train.jsonl", "data/sample/test.jsonl", "attnmix/models/families.yaml", "stages/download.py"),
    *("attnmix/page/bundle.js", "attnmix/page/template.html.j2", "attnmix/page/page.css"),
    "attnmix/page/licences.txt",
}


@pytest.mark.long
def test_wheel_and_source_archive_are_complete(tmp_path: Path) -> None:
    clone, made, installed = tmp_path / "clone", tmp_path / "made", tmp_path / "installed"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    subprocess.run(["git", "tag", "v7.8.9"], cwd=clone, check=True)
    subprocess.run([sys.executable, "-c", BUILD, str(made)], cwd=clone, check=True, capture_output=True)
    name = "attnmix-7.8.9"
    with tarfile.open(made / f"{name}.tar.gz") as archive:
        assert {f"{name}/{each}" for each in NEEDED} - set(archive.getnames()) == set()
    with zipfile.ZipFile(made / f"{name}-py3-none-any.whl") as wheel:
        files = wheel.namelist()
        assert {Path(file).parts[0] for file in files} == {"attnmix", f"{name}.dist-info"}
        assert {"attnmix/py.typed", f"{name}.dist-info/licenses/attnmix/page/licences.txt"} <= set(files)
        assert [file for file in files if file.endswith((".ts", ".tsx"))] == []
        wheel.extractall(installed)
    version = run_to_its_end((sys.executable, "-m", "attnmix", "--version"), tmp_path, {"PYTHONPATH": str(installed)})
    assert version.stdout.strip() == "attnmix 7.8.9"
    command = (sys.executable, "-m", "attnmix", "show", "time flies like an arrow", "--to", "page.html")
    run = run_to_its_end(command, tmp_path, {"PYTHONPATH": str(installed)})
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "flies" in page
    assert (REPOSITORY / "attnmix/page/licences.txt").read_text(encoding="utf-8") in page
