"""A stand-in for the hub on loopback: the few requests that its clients make to list and fetch a repository."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Repository:
    """Commits (by their hash, 40 digits) and the folders that they hold; the last one is `main`."""

    commits: dict[str, Path]

    def commit(self, revision: str) -> str | None:
        if revision == "main":
            return list(self.commits)[-1]
        return revision if revision in self.commits else None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    content = path.read_bytes()
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(content), "oid": oid}


class _Handler(BaseHTTPRequestHandler):
    repositories: dict[str, Repository]  # by `datasets/owner/name` or `models/owner/name`

    def log_message(self, *_: Any) -> None:
        """Nothing on the tests' output."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(json.loads(self._body() or b"{}"))

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, asked: dict[str, Any] | None = None) -> None:
        path = unquote(urlsplit(self.path).path)
        api = re.fullmatch(
            r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.+))?)?/?", path
        )
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if api:
            kind, name, verb, revision, under = api.groups()
            found = self._find(f"{kind}/{name}", revision or "main")
            if found:
                self._list(name, verb, under or "", asked, *found)
        elif file:
            dataset, name, revision, wanted = file.groups()
            found = self._find(f"{'datasets' if dataset else 'models'}/{name}", revision)
            if found:
                self._file(found[0], found[1] / wanted)
        else:
            self._refuse("EntryNotFound")

    def _find(self, name: str, revision: str) -> tuple[str, Path] | None:
        repository = self.repositories.get(name)
        commit = repository.commit(revision) if repository else None
        if repository is None or commit is None:
            self._refuse("RevisionNotFound" if repository else "RepoNotFound")
            return None
        return commit, repository.commits[commit]

    def _list(self, name: str, verb: str | None, under: str, asked: Any, commit: str, folder: Path) -> None:
        entries = [_entry(path, folder) for path in _files(folder)]
        if verb == "tree":
            self._tree(entries, under)
        elif verb == "paths-info":
            self._json([entry for entry in entries if entry["path"] in asked["paths"]])
        else:
            siblings = [{"rfilename": entry["path"]} for entry in entries]
            facts = {"id": name, "sha": commit, "private": False, "gated": False, "disabled": False, "tags": []}
            self._json(facts | {"siblings": siblings, "downloads": 0, "likes": 0})

    def _tree(self, entries: list[dict[str, Any]], under: str) -> None:
        inside = [entry for entry in entries if not under or entry["path"].startswith(f"{under}/")]
        if not inside:
            self._refuse("EntryNotFound")
            return
        folders = {str(parent) for entry in inside for parent in PurePosixPath(entry["path"]).parents}
        inside += [
            {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in folders - {".", under}
        ]
        if "recursive=true" not in urlsplit(self.path).query.lower():
            inside = [entry for entry in inside if str(PurePosixPath(entry["path"]).parent) == (under or ".")]
        self._json(sorted(inside, key=lambda entry: entry["path"]))

    def _file(self, commit: str, path: Path) -> None:
        if not path.is_file():
            self._refuse("EntryNotFound", commit)
            return
        content = path.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: str, commit: str | None = None) -> None:
        headers = {"X-Error-Code": code} | ({"X-Repo-Commit": commit} if commit else {})
        self._send(404, b'{"error": "not found"}', headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # a client that finds the queue full (5 by default) waits for seconds before it asks again


@contextmanager
def hub(repositories: dict[str, Repository]) -> Iterator[str]:
    """Serve `repositories`; the address."""
    handler = type("Handler", (_Handler,), {"repositories": repositories})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
