"""The site builds without warnings, its links and search work, and its pages request nothing from other hosts."""

from __future__ import annotations

import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

import pytest
from browser import console_errors
from conftest import REPOSITORY

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Yield the address of the site on a local server."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_internal_links_have_targets(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    pages.pop("404.html")
    anchors = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in pages.items()}
    broken = []
    for name, text in pages.items():
        if name.startswith("run/"):
            continue
        for link in re.findall(r'(?:href|src)="([^"]*)"', text):
            target, anchor = urldefrag(urljoin(f"http://site/{name}", link))
            if target.startswith("http://site/"):
                path = target.removeprefix("http://site/") or "index.html"
                if not (site / path).is_file() or (anchor and path in anchors and anchor not in anchors[path]):
                    broken.append((name, link))
    assert len(pages) > 20
    assert broken == []


def test_pages_request_no_other_host_and_search_works(address: str, chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 1300, "height": 900})
    requests = list[str]()
    errors = console_errors(page)
    page.on("request", lambda request: requests.append(request.url))
    for name in ("api.html", "measures/ratios.html", "notebooks/1_attention_of_a_sentence.html", "index.html"):
        page.goto(address + name)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.goto(f"{address}measures.html")
    assert page.locator("math[display=block]").count() == 2
    page.locator("input.md-search__input").click()
    page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for()  # the index is loaded
    page.keyboard.type("value zeroing")  # the search reads the field after each key
    page.locator(".md-search-result__link").first.wait_for()
    found = page.locator(".md-search-result__link").evaluate_all("links => links.map(link => link.href)")
    assert any("measures/matrices.html" in link for link in found)
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []
    assert errors == []
    page.close()
