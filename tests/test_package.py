"""Wheel and source archive hold what library and pipeline read, and have the version of the git tag."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import REPOSITORY
from stage_process import run_to_its_end

BUILD = "import sys; from setuptools.build_meta import *; to = sys.argv[1]; build_sdist(to); build_wheel(to)"
NEEDED = {
    *("README.md", "LICENSE", "params.yaml", "dvc.yaml", "dvc.lock", "Makefile", "requirements.lock", ".dvc/config"),
    *("data/sample/train.jsonl", "data/sample/test.jsonl", "attnmix/models/families.yaml", "stages/download.py"),
    *("attnmix/page/bundle.js", "attnmix/page/template.html.j2", "attnmix/page/page.css"),
}


@pytest.mark.long
def test_wheel_of_a_tag_shows_a_text_and_source_archive_holds_the_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("setuptools_scm", reason="the locks have no setuptools-scm yet")
    clone, made, installed = tmp_path / "clone", tmp_path / "made", tmp_path / "installed"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    subprocess.run(["git", "tag", "v7.8.9"], cwd=clone, check=True)
    subprocess.run([sys.executable, "-c", BUILD, str(made)], cwd=clone, check=True, capture_output=True)
    name = "self_attention_mixing-7.8.9"
    with tarfile.open(made / f"{name}.tar.gz") as archive:
        assert {f"{name}/{each}" for each in NEEDED} - set(archive.getnames()) == set()
    with zipfile.ZipFile(made / f"{name}-py3-none-any.whl") as wheel:
        wheel.extractall(installed)
    command = (sys.executable, "-m", "attnmix", "show", "time flies like an arrow", "--to", "page.html")
    run = run_to_its_end(command, tmp_path, {"PYTHONPATH": str(installed)})
    assert run.returncode == 0, run.stderr
    assert "flies" in (tmp_path / "page.html").read_text(encoding="utf-8")
