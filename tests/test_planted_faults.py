"""`tools.planted_faults` distinguishes faults that tests detect, undetected faults, and outdated faults."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY

from tools import planted_faults

FILES = {
    "attnmix/__init__.py": "def double(number: int) -> int:\n    return 2 * number\n",
    "stages/__init__.py": "",
    "test_double.py": "import attnmix\n\n\ndef test_double() -> None:\n    assert attnmix.double(3) == 6\n",
}
CHANGES = {
    "wrong_factor": ("2 * number", "3 * number", "test_double.py::test_double"),
    "same_product": ("2 * number", "number * 2", "LOST"),
    "missing_text": ("2 * value", "3 * value", "TEXT OCCURS 0 TIMES"),
    "ambiguous_text": ("number", "value", "TEXT OCCURS 2 TIMES"),
}
"""Text before and after each change, and the expected outcome: the test that detects it, or a message."""


def test_detected_lost_and_outdated_faults_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "repository"
    for name, text in FILES.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text, encoding="utf-8")
    author = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
    for command in (("init",), ("add", "--all"), (*author, "commit", "--message", "A library")):
        subprocess.run(["git", *command], cwd=repository, check=True, capture_output=True)
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the inner tests need no plugins
    table = tmp_path / "faults.yaml"
    entry = {"fault": "Numbers are not doubled.", "file": "attnmix/__init__.py", "tests": ["test_double.py"]}
    changes = []
    for name, (before, after, _) in CHANGES.items():
        changes.append({"name": name, "before": before, "after": after} | entry)
    table.write_text(yaml.safe_dump(changes), encoding="utf-8")

    assert planted_faults.main(["--only", "wrong_factor"], table) == 0
    assert "1 of 1 faults are detected" in capsys.readouterr().out
    assert planted_faults.main([], table) == 1
    printed = capsys.readouterr().out
    for name, (_, _, outcome) in CHANGES.items():
        assert re.search(rf"^{name} +attnmix/__init__.py  {outcome}$", printed, re.MULTILINE)
    assert (repository / "attnmix/__init__.py").read_text("utf-8") == FILES["attnmix/__init__.py"]

    (repository / "test_double.py").write_text("def test_double():\n    assert False\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="test_double fails although no fault is applied"):
        planted_faults.main([], table)


def test_planted_faults_match_current_code_and_tests() -> None:
    faults = planted_faults.read_faults(planted_faults.TABLE)
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        assert (REPOSITORY / fault.file).read_text("utf-8").count(fault.before) == 1, fault.name
        assert fault.before != fault.after, fault.name
        for test in fault.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (REPOSITORY / file).read_text("utf-8"), test
