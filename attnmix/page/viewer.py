"""Functions that display a page below a notebook cell or in a web browser, and that write a page to a file."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from attnmix.core.store.files import atomic_path


def write_text(path: Path, page: str) -> Path:
    """Write a page atomically, and return its path."""
    with atomic_path(path) as part:
        part.write_text(page, encoding="utf-8", newline="\n")
    return path


def is_in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


def show(page: str) -> Any:
    """Return an object that displays the page in a notebook; elsewhere, open a web browser and return None."""
    if is_in_notebook():
        return _create_frame(page)
    file = Path(tempfile.mkdtemp(prefix="attnmix-"), "page.html")
    webbrowser.open(write_text(file, page).as_uri())
    return None


def _create_frame(page: str) -> Any:
    """Return the page in an iframe for a notebook."""
    from IPython.display import HTML

    # Links within the page would otherwise be resolved against the notebook's address.
    text = page.replace("<head>", '<head><base href="about:srcdoc">', 1)
    # Single quotes need less escaping, because they are rare in a page.
    source = text.replace("&", "&amp;").replace("'", "&#39;")
    # The div avoids IPython's warning about a bare iframe.
    frame = f"<iframe srcdoc='{source}' style='width: 100%; height: 900px; border: 0'></iframe>"
    return HTML(f"<div>{frame}</div>")  # type: ignore[no-untyped-call]  # IPython has no types
