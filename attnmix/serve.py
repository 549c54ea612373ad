"""A local server for pages of typed texts: `attnmix serve`.

The outer page contains an input for a text, an input for a second text to compare, some example pairs, and a frame. The
frame contains the page of the typed texts, which is identical to the page that `attnmix show` writes. Models are loaded
only once. The server is accessible only from this machine or through a tunnel. The socket listens on the loopback
address, and requests with a foreign Host or Origin are rejected, such as those of scripts on other web sites. The
option `--allow-host` permits a tunnel or proxy with another host name. Texts are sent in the body of a request. The
server keeps only the last `KEPT_PAGES` pages, in memory; texts never appear in an address, file or log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError:
    from attnmix.core.extras import require_extra

    require_extra("page", "attnmix serve")
    raise

from attnmix.core.errors import InputError, text_problem
from attnmix.core.terminal import printable
from attnmix.model import quiet
from attnmix.models.checkpoint import longest_text
from attnmix.page.assembly import page_text, short_name
from attnmix.page.sentences import Subject
from attnmix.results.page import models_subject
from attnmix.runs.text_results import TextMeasurer, compile_maps, load_measurer
from attnmix.runs.tokens import TokenizedTexts, tokenize_given

MAX_TOKENS = 64  # limits the waiting time: the cost of matrices is quadratic in the text length
MAX_BODY_BYTES = 200_000
MAX_WAITING = 4  # queued requests, in addition to the current one
MAX_PER_MINUTE = 60  # requests
KEPT_PAGES = 20
EXAMPLES = {
    "position of “not”": ("the film was not good , it was great", "the film was good , it was not great"),
    "time and fruit": ("time flies like an arrow", "fruit flies like a banana"),
    "too big or too small": (
        "the trophy did not fit into the suitcase because it was too big",
        "the trophy did not fit into the suitcase because it was too small",
    ),
    "telescope or beard": ("I saw the man with the telescope", "I saw the man with the beard"),
}
"""Pairs of similar texts by name."""
OPENING_TEXTS = next(iter(EXAMPLES.values()))
SUBJECTS = ("the text", "the text to compare with")  # subjects of error messages
SHELL = Path(__file__).with_name("serve.html")
SCRIPT = SHELL.with_suffix(".js")
SHELL_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; frame-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",  # keeps pages and their texts out of the browser's disk cache
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LOCAL_NAMES = ("127.0.0.1", "localhost")


class LocalOnly:
    """Middleware that rejects requests with a foreign Host, or with an Origin that is not one of the server's pages.

    Local names are allowed with any port, because a tunnel may have a different local port. `allowed` contains
    additional hosts.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self.app = app
        self.allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse a request, and add `HEADERS` to the response."""

        async def send_with_headers(message: Message) -> None:
            """Send a message of the response; the first message contains the headers."""
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refuse(scope["method"], headers.get("host", ""), headers.get("origin"))
        app = self.app if refusal is None else refusal  # a response is called like an application
        await app(scope, receive, send_with_headers)

    def _refuse(self, method: str, host: str, origin: str | None) -> Response | None:
        """Return the error response for a request from outside the server's own pages; otherwise None.

        `host` and `origin` are headers of the request. Browsers may omit the origin in GET and HEAD requests.
        """
        if not (_is_local(host) or host in self.allowed):
            shown = printable(host[:100], kept="")
            reason = f"This server only accepts requests to {' and '.join(LOCAL_NAMES)}, on any port, not to"
            remedy = f"If this is your own tunnel or proxy, start the server with --allow-host {shown}"
            return PlainTextResponse(f"{reason} {shown or 'no host'}. {remedy}", 421)
        if origin is None and method in ("GET", "HEAD"):
            return None
        own_origins = [f"http://{host}"]
        for name in self.allowed:
            own_origins.extend([f"http://{name}", f"https://{name}"])
        if origin in own_origins:
            return None
        return PlainTextResponse("This server only accepts requests from its own page.", 403)


def _is_local(host: str) -> bool:
    """Return True if `host` is a name of this machine, with or without a port."""
    name, colon, port = host.partition(":")
    return name in LOCAL_NAMES and (port.isdecimal() or not colon)


class OneLineErrors:
    """Middleware that answers failed requests with one sentence, and logs only the type of the exception.

    The message and the traceback of an exception may contain the user's text.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; if this fails, send an error response unless the client has disconnected."""
        try:
            await self.app(scope, receive, send)
        except ClientDisconnect:
            pass  # no client is waiting for a response
        except Exception as error:  # libraries raise various exceptions for unusual texts
            logging.error("a request could not be answered: %s", type(error).__name__)
            sentence = f"This request could not be answered ({type(error).__name__})."
            await PlainTextResponse(sentence, 500)(scope, receive, send)


def max_tokens(measurer: TextMeasurer) -> int:
    """Return the maximum number of tokens of a typed text: `MAX_TOKENS`, or the limit of the model if it is smaller."""
    model_limit = longest_text(measurer.base.config) or MAX_TOKENS
    return min(MAX_TOKENS, model_limit)


def tokenized(texts: Sequence[str], measurer: TextMeasurer) -> TokenizedTexts:
    """Return the tokens of typed texts; raise `InputError` for texts that are empty or too long."""
    base: Any = measurer.base
    limit = max_tokens(measurer)
    for subject, text in zip(SUBJECTS, texts, strict=False):
        problem = text_problem(text)
        if problem:
            raise InputError(f"{problem.replace('the text', subject)}; allowed: 1 to {limit} tokens")
    vocabulary_size = base.get_input_embeddings().num_embeddings
    result = tokenize_given(list(texts), measurer.tokenizer, base.config, vocabulary_size, limit)
    tokens_before_truncation = result.texts["whole_tokens"]
    for subject, tokens in zip(SUBJECTS, tokens_before_truncation, strict=False):
        if tokens > limit:
            allowed = f"allowed: at most {limit}. Use `attnmix show` for longer texts."
            raise InputError(f"{subject} has {tokens:,} tokens; {allowed}")
    return result


class Pages:
    """The most recent pages of measured texts, with a queue and a rate limit for requests."""

    def __init__(self, measurer: TextMeasurer, subject: Subject, names: Sequence[str] = ()) -> None:
        """Prepare an empty collection; `names` are the names of two compared models."""
        self.measurer = measurer
        self.subject = subject
        self.names = tuple(names) or None
        """The names of the two models in a comparison; otherwise None."""
        self.kept: OrderedDict[str, str] = OrderedDict()
        """The last pages by name, the oldest page first."""
        self.opening: dict[str, str] = {}
        """The opening page by its name; it is kept as long as the server runs."""
        self.turn = asyncio.Lock()
        """The lock that is held by the request being measured."""
        self.waiting = 0
        """The number of requests that wait for `turn` or hold it."""
        self.times: deque[float] = deque(maxlen=MAX_PER_MINUTE)
        """The arrival times of the last accepted requests, in seconds."""

    def write(self, texts: Sequence[str]) -> str:
        """Measure one or two texts, and return their page."""
        tokens = tokenized(texts, self.measurer)
        results = self.measurer.results(tokens)
        results.model_names = self.names
        return page_text(results, self.subject)

    def write_opening(self) -> None:
        """Measure the first example for the opening page. This also compiles the functions that later pages need."""
        name = secrets.token_urlsafe(16)
        self.opening = {name: self.write(OPENING_TEXTS)}

    def find(self, name: str) -> str | None:
        """Return the page with the given name, or None if it is no longer kept."""
        return self.opening.get(name) or self.kept.get(name)

    async def add(self, texts: Sequence[str]) -> str:
        """Queue and measure one or two texts, keep their page, and return its random, unguessable name.

        Raise `HTTPException` if too many requests are waiting, or if too many have arrived within the last minute.
        """
        now = time.monotonic()
        is_queue_full = self.waiting > MAX_WAITING
        is_limit_reached = len(self.times) == MAX_PER_MINUTE and now - self.times[0] < 60
        if is_queue_full or is_limit_reached:
            raise HTTPException(429, "Too many requests; wait and send the text again later.")
        self.times.append(now)
        self.waiting += 1
        try:
            async with self.turn:
                page = await run_in_threadpool(self.write, texts)
        finally:
            self.waiting -= 1
        name = secrets.token_urlsafe(16)
        self.kept[name] = page
        while len(self.kept) > KEPT_PAGES:
            self.kept.popitem(last=False)
        return name


async def _read_texts(request: Request) -> list[str]:
    """Return the texts in the JSON body of a request: one text, or two texts to compare.

    Raise `HTTPException` for any other body. At most `MAX_BODY_BYTES` + 1 bytes of the body are stored.
    """
    body = b""
    async for part in request.stream():  # read to the end: browsers read the response only after sending everything
        body += part[: MAX_BODY_BYTES + 1 - len(body)]
    if len(body) > MAX_BODY_BYTES:
        raise HTTPException(413, f"The text is too long; allowed: at most {MAX_BODY_BYTES // 1000} kB.")
    try:
        texts = json.loads(body)["texts"]
    except (ValueError, KeyError, TypeError, RecursionError):
        texts = None
    are_texts = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not are_texts or len(texts) not in (1, 2):
        raise HTTPException(
            400, 'The request contains no texts; send JSON of the form {"texts": ["..."]} with one or two texts.'
        )
    return list(texts)


def application(pages: Pages, allowed: Collection[str]) -> Starlette:
    """Return the web application, which accepts requests to this machine and to the `allowed` hosts.

    The nested functions answer the requests for each address; see `routes`.
    """

    async def send_shell(_request: Request) -> Response:
        """Return the outer page, with the inputs for texts and a frame for the page of the typed texts."""
        text = SHELL.read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": SHELL_POLICY})

    async def send_script(_request: Request) -> Response:
        """Return the script of the outer page."""
        return Response(SCRIPT.read_text(encoding="utf-8"), media_type="text/javascript")

    async def describe(_request: Request) -> Response:
        """Return the model's name, the examples, and the name and texts of the opening page, as JSON."""
        model = short_name(pages.subject.model)
        # The two models of a run have no names of their own, unlike two compared models.
        is_run = len(pages.measurer.engines) > 1 and pages.names is None
        if is_run:
            model = f"{model}, before and after fine-tuning"
        opening = {"page": next(iter(pages.opening)), "texts": OPENING_TEXTS}
        return JSONResponse({"model": model, "examples": EXAMPLES, "opening": opening})

    async def measure(request: Request) -> Response:
        """Measure the texts in a request; return the name of their page and the elapsed time in seconds, as JSON."""
        started = time.monotonic()
        name = await pages.add(await _read_texts(request))
        seconds = time.monotonic() - started
        return JSONResponse({"page": name, "seconds": round(seconds, 2)})

    async def send_page(request: Request) -> Response:
        """Return the page with the name in the address; raise `HTTPException` if it is no longer stored."""
        text = pages.find(request.path_params["name"])
        if text is None:
            raise HTTPException(404, "This text is no longer stored; enter it again.")
        return HTMLResponse(text, headers={"Content-Security-Policy": "frame-ancestors 'self'"})

    async def refuse(_request: Request, error: Exception) -> Response:
        """Return the message of an `InputError` as the response to a request."""
        return PlainTextResponse(str(error), 400)

    routes = [
        Route("/", send_shell),
        Route("/serve.js", send_script),
        Route("/about", describe),
        Route("/measure", measure, methods=["POST"]),
        Route("/page/{name}", send_page),
    ]
    app = Starlette(routes=routes, exception_handlers={InputError: refuse})
    app.add_middleware(OneLineErrors)
    app.add_middleware(LocalOnly, allowed=allowed)
    return app


def _stop_on_terminal_close() -> None:
    """Treat SIGHUP (the terminal was closed) like SIGTERM, so that uvicorn closes its connections."""
    hangup = getattr(signal, "SIGHUP", None)  # not defined on Windows
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:  # nohup ignores SIGHUP
        signal.signal(hangup, lambda *_: signal.raise_signal(signal.SIGTERM))


def serve(
    checkpoints: Mapping[str, Path], names: Sequence[str], listener: socket.socket, allowed: Collection[str] = ()
) -> None:
    """Serve pages of typed texts for the models in the folders `checkpoints` until Ctrl-C.

    Args:
        checkpoints: The folder of each model by the name of its checkpoint.
        names: The name of a single model or of a run with two checkpoints, or the names of two compared models.
        listener: The socket on which the server receives requests.
        allowed: Additional host names, such as those of a tunnel.
    """
    print("loading the model ...", flush=True)
    compared_names: Sequence[str] = names if len(names) > 1 else ()  # empty unless two models are compared
    with quiet():
        measurer = load_measurer(checkpoints, compared_names or None)
        pages = Pages(measurer, models_subject(names), compared_names)
        pages.write_opening()
        compile_maps()
        address, port = listener.getsockname()
        config = uvicorn.Config(
            application(pages, allowed), access_log=False, log_level="warning", lifespan="off", ws="none"
        )
        _stop_on_terminal_close()
        server = uvicorn.Server(config)
        with server.capture_signals():  # Ctrl-C as an exception during start-up would leave an incomplete event loop
            print(f"open http://{address}:{port} (Ctrl-C stops the server)", flush=True)
            server.run(sockets=[listener])
