"""Paths that the operating system rejects raise a short `InputError`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import attnmix
from attnmix.core.errors import InputError
from attnmix.core.paths import read_path


@pytest.mark.parametrize("read", [attnmix.load_result, attnmix.open_run])
@pytest.mark.parametrize("path", ["x" * 300, "x" * 5000, "a\0b"])
def test_invalid_path_is_an_error(read: Callable[[str], object], path: str) -> None:
    with pytest.raises(InputError, match=r"^(path|folder): '.* is not a path \(.*\); pass .*\(") as raised:
        read(path)
    assert len(str(raised.value)) < 300


def test_new_path_is_accepted(tmp_path: Path) -> None:
    assert read_path("path", str(tmp_path / "new/file.zip"), "save(path)") == tmp_path / "new/file.zip"
    with pytest.raises(InputError, match=r"^path: int is not a path; .* as in save\(path\)"):
        read_path("path", 3, "save(path)")
