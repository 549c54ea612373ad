"""A fake hub, which serves listings and files on the loopback interface, and can fail in several ways.

Large files are redirected to a second origin, as on the real hub. That origin supports range
requests and rejects requests with access tokens.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from flask import Flask, Response, abort, g, jsonify, request
from werkzeug.serving import make_server

GOOD, STRANGER = "hf_good", "hf_stranger"
"""A token with access to all repositories, and a token of a user who has not accepted the terms of gated ones."""
LARGE = (".bin", ".parquet", ".safetensors")
PAGE = 4  # entries per page of a listing
CUT = 1000  # bytes of a file before the connection breaks
BODY_TROUBLES = ("corrupt", "drip", "endless", "further", "short")  # these require a response with a body
PORTAL = b"<!DOCTYPE html><html><title>Log in to the network</title></html>"


class Trouble(NamedTuple):
    """A failure of the first `times` requests to `place`, or of all requests if `times` is None.

    `place`: `info` (of a revision), `tree` (the listing), `file` (at the hub) or `storage` (at the second origin).
    At byte `CUT`, `cut` ends the body, `stall` pauses it, and `reset` resets the connection. `further` resets the
    connection `CUT` bytes after the start of the requested range. `drip` repeats a space without end, and `endless`
    the content.
    """

    place: str
    kind: str
    times: int | None = 1


@dataclass
class Repository:
    """A repository of the fake hub."""

    commits: dict[str, Path]
    """Folders by commit (40 hexadecimal digits); the last commit is `main`."""
    refs: dict[str, str] = field(default_factory=dict)
    """Branches and tags."""
    access: str = "open"
    """`open`, `private`, `gated` or `forbidden`."""
    trouble: Trouble | None = None
    ranges: bool = True
    """False if the storage ignores range requests and sends whole files."""
    troubled: int = 0
    asked: list[str] = field(default_factory=list)
    """The `place` (see `Trouble`) of each request."""
    starts: list[int] = field(default_factory=list)
    """The first byte requested by each request to the storage."""

    def commit(self, revision: str) -> str | None:
        """Return the commit to which a branch, a tag or a hash refers, or None for an unknown revision."""
        if revision == "main":
            return list(self.commits)[-1]
        return self.refs.get(revision, revision if revision in self.commits else None)

    def trouble_at(self, place: str, has_body: bool) -> str | None:
        """Record a request, and return the kind of its failure, or None if it succeeds."""
        self.asked.append(place)
        if self.trouble is None or self.trouble.place != place or self.troubled == self.trouble.times:
            return None
        if self.trouble.kind in BODY_TROUBLES and not has_body:
            return None
        self.troubled += 1
        return self.trouble.kind


def _blob(content: bytes) -> str:
    """Return the hash of a file in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    """Return the entry of a file or folder in a listing."""
    kind, content = ("directory", b"") if path.is_dir() else ("file", path.read_bytes())
    entry = {"type": kind, "path": path.relative_to(folder).as_posix(), "size": len(content), "oid": _blob(content)}
    if path.suffix in LARGE:
        digest = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n".encode()
        lfs = {"oid": digest, "size": len(content), "pointerSize": len(pointer)}
        # The client must ignore the hash of the xet protocol, which bypasses this server and the project's limits.
        entry |= {"oid": _blob(pointer), "lfs": lfs, "xetHash": digest}
    return entry


def _refuse(status: int, code: str = "", message: str = "", commit: str = "") -> NoReturn:
    """Answer the current request with an error of the hub's API."""
    headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}
    abort(Response('{"error": "refused"}', status, {name: value for name, value in headers.items() if value}))


def _break_off(kind: str, piece: bytes, connection: socket.socket, closing: threading.Event) -> Iterator[bytes]:
    """Yield the first part of a body, and then end, stall or reset the connection."""
    yield piece
    if kind == "stall":
        closing.wait()
    elif kind in ("further", "reset"):
        # With a linger time of 0, closing the connection resets it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(connection.detach())
        raise ConnectionResetError


def _repeat(piece: bytes, closing: threading.Event) -> Iterator[bytes]:
    """Yield a piece of a body repeatedly until `closing` is set."""
    while not closing.is_set():
        yield piece


@contextmanager
def hub(repositories: dict[str, Repository]) -> Iterator[str]:
    """Serve `repositories`, named `datasets/owner/name` or `models/owner/name`, and yield the address."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # suppresses one log line per request
    site, storage = Flask("hub", static_folder=None), Flask("storage", static_folder=None)
    servers = [make_server("127.0.0.1", 0, app, threaded=True) for app in (site, storage)]
    address, storage_address = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    closing = threading.Event()
    stored: dict[str, tuple[Repository, bytes]] = {}  # repository and content of files in the storage, by path

    def find(name: str, revision: str, place: str) -> tuple[str, Path]:
        """Return the commit and folder of an authorised request; refuse any other request."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        repository = repositories.get(name)
        commit = repository.commit(revision) if repository else None
        if token not in ("", GOOD, STRANGER):
            _refuse(401, message="Invalid credentials in Authorization header")
        if repository is None or (repository.access == "private" and token != GOOD):
            _refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        if commit is None:
            _refuse(404, "RevisionNotFound")
        if repository.access == "gated" and place == "file" and token != GOOD:
            _refuse(403 if token else 401, "GatedRepo")
        if repository.access == "forbidden" and token != GOOD:
            _refuse(403)
        g.repository, g.place = repository, place
        return commit, repository.commits[commit]

    @site.get("/api/<kind>/<owner>/<name>", defaults={"revision": "main"})
    @site.get("/api/<kind>/<owner>/<name>/revision/<path:revision>")
    def info(kind: str, owner: str, name: str, revision: str) -> Response:
        commit, folder = find(f"{kind}/{owner}/{name}", revision, "info")
        siblings = [{"rfilename": str(path.relative_to(folder))} for path in folder.rglob("*") if path.is_file()]
        return jsonify({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings})

    @site.get("/api/<kind>/<owner>/<name>/tree/<path:revision>")
    def tree(kind: str, owner: str, name: str, revision: str) -> Response:
        _, folder = find(f"{kind}/{owner}/{name}", revision, "tree")
        entries = [_entry(path, folder) for path in sorted(folder.rglob("*"))]
        start = request.args.get("cursor", 0, type=int)
        response = jsonify(entries[start : start + PAGE])
        if start + PAGE < len(entries):
            response.headers["Link"] = f'<{request.base_url}?recursive=True&cursor={start + PAGE}>; rel="next"'
        return response

    @site.get("/<owner>/<name>/resolve/<revision>/<path:file>", defaults={"kind": "models"})
    @site.get("/<any(datasets):kind>/<owner>/<name>/resolve/<revision>/<path:file>")
    def resolve(kind: str, owner: str, name: str, revision: str, file: str) -> Response:
        commit, folder = find(f"{kind}/{owner}/{name}", revision, "file")
        path = folder / file
        if not path.is_file():
            _refuse(404, "EntryNotFound", commit=commit)
        content, headers = path.read_bytes(), {"X-Repo-Commit": commit}
        if path.suffix not in LARGE:
            return Response(content, headers=headers | {"ETag": f'"{_blob(content)}"'})
        digest = hashlib.sha256(content).hexdigest()
        stored_path = f"{kind}/{owner}/{name}/{commit}/{path.name}"
        stored[stored_path] = (g.repository, content)
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        return Response(b"", 302, headers | {"Location": f"{storage_address}/{stored_path}?signature=secret"})

    @storage.get("/<path:stored_path>")
    def serve_range(stored_path: str) -> Response:
        """Return the requested range of a file; the hub has redirected the client to this address."""
        if "Authorization" in request.headers:  # object stores refuse a token with a signed address
            _refuse(400, message="two ways to authenticate")
        g.repository, content = stored[stored_path]
        g.place = "storage"
        g.start = 0
        if request.range:
            [(g.start, _)] = request.range.ranges  # the first byte of the only range
        g.repository.starts.append(g.start)
        if not g.repository.ranges:
            g.start = 0
            return Response(content)
        return Response(content).make_conditional(request, accept_ranges=True, complete_length=len(content))

    def spoil(response: Response) -> Response:
        """Return the response, modified by the repository's failure if there is one."""
        if "place" not in g or response.status_code >= 400:
            return response
        kind = g.repository.trouble_at(g.place, has_body=request.method != "HEAD")
        if kind is None:
            return response
        content = response.get_data()
        if kind.isdigit():
            status = f"{kind} {HTTPStatus(int(kind)).phrase}"
            return Response(b"", status, {"Retry-After": "3600", "RateLimit": '"api";r=0;t=3600'})
        if kind == "portal":
            return Response(PORTAL, mimetype="text/html")
        if kind == "hang":
            closing.wait()
        elif kind == "short":
            response.set_data(content[:-1])
        elif kind == "corrupt":
            response.set_data(content[::-1])
        elif kind in ("drip", "endless"):
            del response.headers["Content-Length"]
            piece = b" " if kind == "drip" else content
            response.response = _repeat(piece, closing)
        else:  # cut, stall, reset and further
            start = g.get("start", CUT)  # responses of the hub itself break off without content
            end = CUT if kind == "further" else max(0, CUT - start)
            response.content_length = len(content)
            response.response = _break_off(kind, content[:end], request.environ["werkzeug.socket"], closing)
            if request.method == "HEAD":
                list(response.response)
        return response

    for server, app in zip(servers, (site, storage), strict=True):
        app.after_request(spoil)
        app.config["PROPAGATE_EXCEPTIONS"] = True  # otherwise flask would handle the `ConnectionResetError`
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield address
    closing.set()
    for server in servers:
        server.shutdown()
        server.server_close()
