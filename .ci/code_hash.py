"""Print a hash of files, excluding comments and docstrings of Python code: `python .ci/code_hash.py PATH ...`.

A folder stands for all of its files that are tracked by git.
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
from pathlib import Path


def main() -> None:
    names = subprocess.run(["git", "ls-files", *sys.argv[1:]], stdout=subprocess.PIPE, text=True, check=True).stdout
    sha256 = hashlib.sha256()
    for name in names.splitlines():
        path = Path(name)
        content = code_of(path.read_text(encoding="utf-8")).encode() if path.suffix == ".py" else path.read_bytes()
        sha256.update(f"{name} {len(content)}\n".encode() + content)
    print(sha256.hexdigest())


def code_of(source: str) -> str:
    """Return the syntax tree of `source` as text, without docstrings and other string statements."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not is_string(statement)]
    return ast.dump(tree)


def is_string(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


if __name__ == "__main__":
    main()
