"""A stand-in for the hub on loopback: what its clients ask to list and fetch a repository, and how a hub can fail.

Large files are redirected to a second origin, as the hub does, which serves ranges and must never see a token.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

GOOD, STRANGER = "hf_good", "hf_stranger"
"""A token that may read everything, and one that has accepted no terms."""
LARGE = (".bin", ".parquet", ".safetensors")
PAGE = 4  # entries of a listing in one answer
CUT = 1000  # bytes of a file that arrive before it is cut
PORTAL = b"<!DOCTYPE html><html><title>Log in to the network</title></html>"


class Trouble(NamedTuple):
    """What goes wrong `times` times (`None`: always) with each request of a kind.

    `place`: `info` (of a revision), `tree` (the listing), `file` (at the hub) or `storage` (at the second origin).
    """

    place: str
    kind: str
    times: int | None = 1


@dataclass
class Repository:
    """Commits (by their hash, 40 digits) and the folders that they hold; `main` is the last one."""

    commits: dict[str, Path]
    refs: dict[str, str] = field(default_factory=dict)
    """Branches and tags."""
    access: str = "open"
    """Or `private`, `gated`, `forbidden`."""
    trouble: Trouble | None = None
    troubled: int = 0
    asked: list[str] = field(default_factory=list)
    """The place of each request."""

    def commit(self, revision: str) -> str | None:
        if revision == "main":
            return list(self.commits)[-1]
        return self.refs.get(revision, revision if revision in self.commits else None)

    def trouble_at(self, place: str) -> str | None:
        self.asked.append(place)
        if self.trouble is None or self.trouble.place != place or self.troubled == self.trouble.times:
            return None
        self.troubled += 1
        return self.trouble.kind


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    content = path.read_bytes()
    entry = {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(content), "oid": _blob(content)}
    if path.suffix in LARGE:
        digest = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n".encode()
        lfs = {"oid": digest, "size": len(content), "pointerSize": len(pointer)}
        entry |= {"oid": _blob(pointer), "lfs": lfs}
    return entry


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    repository: Repository

    def log_message(self, *_: Any) -> None:
        """Nothing on the tests' output."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        api = re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if api:
            kind, name, verb, revision = api.groups()
            place = "tree" if verb == "tree" else "info"
        elif file:
            dataset, name, revision, wanted = file.groups()
            kind, place = "datasets" if dataset else "models", "file"
        else:
            self._refuse(404, "EntryNotFound")
            return
        if (answer := self._find(f"{kind}/{name}", unquote(revision or "main"), place)) is None:
            return
        commit, folder = answer
        entries = [_entry(each, folder) for each in sorted(folder.rglob("*")) if each.is_file()]
        if place == "info":
            siblings = [{"rfilename": entry["path"]} for entry in entries]
            facts = {"id": name, "sha": commit, "private": False, "gated": False, "disabled": False, "tags": []}
            self._json(facts | {"siblings": siblings, "downloads": 0, "likes": 0}, place)
        elif place == "tree":
            self._tree(entries)
        else:
            self._file(f"{kind}/{name}", commit, folder / unquote(wanted))

    do_HEAD = do_GET

    def _find(self, name: str, revision: str, place: str) -> tuple[str, Path] | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        repository = self.server.repositories.get(name)
        commit = repository.commit(revision) if repository else None
        if token not in ("", GOOD, STRANGER):
            self._refuse(401, message="Invalid credentials in Authorization header")
        elif repository is None or (repository.access == "private" and token != GOOD):
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif commit is None:
            self._refuse(404, "RevisionNotFound")
        elif repository.access == "gated" and place == "file" and token != GOOD:
            self._refuse(403 if token else 401, "GatedRepo")
        elif repository.access == "forbidden" and token != GOOD:
            self._refuse(403)
        else:
            self.repository = repository
            return commit, repository.commits[commit]
        return None

    def _tree(self, entries: list[dict[str, Any]]) -> None:
        folders = {str(parent) for entry in entries for parent in PurePosixPath(entry["path"]).parents} - {"."}
        entries += [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in folders]
        entries.sort(key=lambda entry: entry["path"])
        start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        following = f"{self.server.address}{urlsplit(self.path).path}?recursive=True&cursor={start + PAGE}"
        link = {"Link": f'<{following}>; rel="next"'} if start + PAGE < len(entries) else {}
        self._json(entries[start : start + PAGE], "tree", link)

    def _file(self, name: str, commit: str, path: Path) -> None:
        if not path.is_file():
            self._refuse(404, "EntryNotFound", commit=commit)
            return
        content = path.read_bytes()
        headers = {"X-Repo-Commit": commit}
        if path.suffix in LARGE:
            digest = hashlib.sha256(content).hexdigest()
            location = f"{self.server.storage.address}/{name}/{commit}/{path.name}?signature=secret"
            self.server.storage.files[urlsplit(location).path] = (self.repository, content)
            headers |= {"Location": location, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
            self._send(302, b"", headers, "file")
        else:
            self._send(200, content, headers | {"ETag": f'"{_blob(content)}"'}, "file")

    def _json(self, value: Any, place: str, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}), place)

    def _refuse(self, status: int, code: str = "", message: str = "", commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}
        self._write(status, b'{"error": "refused"}', {key: value for key, value in headers.items() if value})

    def _send(self, status: int, content: bytes, headers: dict[str, str], place: str, start: int = 0) -> None:
        """Send an answer, or what becomes of it; `start` is the number of the content's first byte."""
        kind, middle = self.repository.trouble_at(place), len(content) // 2
        spoilt = content[:middle] + bytes(byte ^ 1 for byte in content[middle : middle + 1]) + content[middle + 1 :]
        answers: dict[str | None, tuple[int, bytes, dict[str, str]]] = {
            None: (status, content, headers),
            "429": (429, b"", {"Retry-After": "1"}),
            "429 by its limits": (429, b"", {"RateLimit": '"api";r=0;t=3600'}),
            "portal": (200, PORTAL, {"Content-Type": "text/html"}),
            "corrupt": (status, spoilt, headers),
            "short": (status, content[:-1], headers),
        }
        if kind in answers:
            self._write(*answers[kind])
        elif kind.isdigit():
            self._write(int(kind), b"", {})
        elif kind == "hang":
            self.server.closing.wait()
        else:
            self._write(status, content, headers, sent=max(0, CUT - start) if place == "storage" else 0)
            if kind == "stall":
                self.server.closing.wait()
            elif kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())

    def _write(self, status: int, content: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])


class _StorageHandler(_Handler):
    """The second origin."""

    def do_GET(self) -> None:
        self.repository, content = self.server.files[urlsplit(self.path).path]
        if "Authorization" in self.headers:  # as object stores do that have signed the address
            self._write(400, b"two ways to authenticate", {})
            return
        headers = {"Accept-Ranges": "bytes"}
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["", "0"])[1])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if start else 200, content[start:], headers, "storage", start)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # a client that finds the queue full (5 by default) waits for seconds before it asks again

    def __init__(self, handler: type[_Handler], repositories: dict[str, Repository]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repositories = repositories  # by `datasets/owner/name` or `models/owner/name`
        self.files: dict[str, tuple[Repository, bytes]] = {}
        self.closing = threading.Event()
        self.storage = self

    def handle_error(self, *_: Any) -> None:
        """A client that has gone."""


@contextmanager
def hub(repositories: dict[str, Repository]) -> Iterator[str]:
    """Serve `repositories`, and yield the address."""
    server = _Server(_Handler, repositories)
    server.storage = _Server(_StorageHandler, repositories)
    for each in (server, server.storage):
        threading.Thread(target=each.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server.address
    for each in (server, server.storage):
        each.closing.set()
        each.shutdown()
        each.server_close()
