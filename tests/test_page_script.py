"""The logic of the page's script passes its Node tests in tests/page/."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from conftest import REPOSITORY

from attnmix.core.names import INPUT_PARTS
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import RATIOS


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
@pytest.mark.skipif(not (REPOSITORY / "node_modules/.bin/esbuild").exists(), reason="`make check` has not run `npm ci`")
def test_node_tests_pass() -> None:
    ran = subprocess.run(["npm", "run", "--silent", "test"], cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_measures_have_explanations() -> None:
    source = (REPOSITORY / "attnmix/page/src/shares.ts").read_text(encoding="utf-8")
    explained = set(re.findall(r"^  (\w+):", source, flags=re.MULTILINE))
    assert {INPUT_PARTS, *LAYER_MATRICES, *RATIOS} <= explained
