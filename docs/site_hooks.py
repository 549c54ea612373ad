"""Hooks of the documentation site that add pages from outside docs/ (README, notebooks) and render formulas."""

from __future__ import annotations

import json
import os
import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

from griffe import Extension
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGE = "reports/index.html"
GENERATED = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]*)(#[^)\s]*)?(?=\))")
LINKED_CODE = re.compile(r"\[([^\]]*)\]\(\s*unpublished:[^)]*\)")
BADGES = re.compile(r"^\[!\[CI\].*\n\n", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
DOCTEST = re.compile(r"(?:^>>> .*\n?)(?:^(?!\s*$).*\n?)*", re.MULTILINE)


class Doctests(Extension):
    """Griffe extension that fences docstring examples as code; Markdown would parse `>>>` as a quotation."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Fence the examples in an object's docstring."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)


def on_files(files: Files, config: Any) -> Files:
    """Add pages with sources outside docs/, and the page of the default run if it exists."""
    for source, page in GENERATED.items():
        text = LINK.sub(partial(_moved, source, page), _without_badges(ROOT / source))
        if page == "index.md" and (ROOT / PAGE).is_file():
            text = text.replace("\n\n", "\n\n**[The interactive page of the default run](run/index.html)**\n\n", 1)
            files.append(File.generated(config, "run/index.html", abs_src_path=str(ROOT / PAGE)))
        files.append(File.generated(config, page, content=text))
    yaml = (ROOT / "params.yaml").read_text(encoding="utf-8")
    head = "Every key of `params.yaml`, with its default; `dvc exp run -S section.key=value` changes one."
    files.append(File.generated(config, "parameters.md", content=f"# Parameters\n\n{head}\n\n```yaml\n{yaml}```\n"))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = f"notebooks/{notebook.stem}.md"
        text = LINK.sub(partial(_moved, f"notebooks/{notebook.name}", page), _notebook(notebook))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to files without a page to the repository; remove the links if its address is not configured."""
    folder = posixpath.dirname(page.file.src_uri)

    def point(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        inside = posixpath.relpath(target, "docs")
        if not link[1] or files.get_file_from_path(inside) or not (ROOT / target).exists():
            return link[0]
        if target in GENERATED:
            return posixpath.relpath(GENERATED[target], folder or ".") + (link[2] or "")
        if not config.extra["repository"]:
            return f"unpublished:{target}"
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{config.extra['repository'].rstrip('/')}/{kind}/main/{target}"

    return LINKED_CODE.sub(r"\1", LINK.sub(point, markdown))


def _without_badges(path: Path) -> str:
    """Return a document without its badges, which are images on external servers."""
    return BADGES.sub("", path.read_text(encoding="utf-8"))


def on_page_content(html: str, **_: Any) -> str:
    """Convert the formulas of a page to MathML."""
    return FORMULA.sub(
        lambda found: convert(_plain(found[2]), display="block" if found[1] == "div" else "inline"), html
    )


def _plain(latex: str) -> str:
    return latex.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">").strip()


def _notebook(path: Path) -> str:
    """Return a notebook with its stored outputs as Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                parts.append(f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _moved(source: str, page: str, link: re.Match[str]) -> str:
    """Return a link in the file `source`, rewritten for the file `page` in docs/."""
    if not link[1]:
        return link[0]
    target = os.path.relpath(ROOT / source / ".." / link[1], ROOT / "docs" / page / "..")
    return Path(target).as_posix() + (link[2] or "")
