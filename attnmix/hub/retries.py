"""The hub's client with patience: it asks again after what may pass, and never waits for ever."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from huggingface_hub import constants, get_session, set_client_factory
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]  # its stub forgets it

from attnmix.core.errors import InputError, first_line

PASSING = (408, 429, 500, 502, 503, 504)
"""What a server says when it may give the answer later."""
HOPELESS = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)
"""Why a server that has not been reached yet will not be reached a moment later."""
SLOWEST = 10_000  # bytes in a second; less is taken for no progress
LONGEST_WAIT = 30.0  # seconds


class UnavailableError(InputError):
    """The hub has not given what it was asked for, and why."""


def be_patient(time_limit: float) -> None:
    """All that `huggingface_hub` asks from now on is given up after `time_limit` seconds without any progress."""
    hooks = get_session().event_hooks  # they keep HF_HUB_OFFLINE
    set_client_factory(lambda: PatientClient(time_limit, hooks))


class _Clock:
    """Seconds that one request has left; what it receives wins time back, up to the whole limit."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._ends = time.monotonic() + limit
        self._wait = 0.5

    def left(self) -> float:
        return self._ends - time.monotonic()

    def received(self, size: int) -> None:
        if self.left() <= 0:
            raise self.over("the hub sends less than 10 kB in a second")
        self._ends = min(time.monotonic() + self._limit, self._ends + size / SLOWEST)
        self._wait = 0.5

    def wait(self, cause: str, asked: float = 0) -> None:
        """Before the next try: longer each time, and as long as the server has `asked` for."""
        if self.left() <= asked:
            raise self.over(f"{cause}, and asks to wait {asked:.0f} s" if asked else cause)
        wait = min(max(self._wait, asked), self.left())
        logging.info("the hub: %s; asked again in %.1f s", cause, wait)
        time.sleep(wait)
        self._wait = min(2 * self._wait, LONGEST_WAIT)

    def over(self, cause: str) -> UnavailableError:
        return UnavailableError(
            f"{cause}, longer than hub.time_limit ({self._limit:g} s) allows; try again later, or allow more"
        )


class PatientClient(httpx2.Client):
    """Overloads, breaks, cuts and stalls are asked again, with growing waits; a cut file goes on where it ended."""

    def __init__(self, time_limit: float, hooks: Mapping[str, list[Callable[..., Any]]]) -> None:
        super().__init__(event_hooks=hooks, follow_redirects=True)
        self._time_limit = time_limit
        self._reached = False

    def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """As the client's own; `UnavailableError` after the time limit."""
        clock = _Clock(self._time_limit)

        def answer() -> httpx2.Response:
            return self._answer(request, clock, whole=not stream, options=options)

        def rest(start: int) -> httpx2.Response:
            request.headers["Range"] = f"bytes={start}-"
            return answer()

        if not stream:
            return answer()
        request.headers["Accept-Encoding"] = "identity"  # so that a number of bytes says where a cut file ended
        response = answer()
        response.stream = _Body(response, clock, rest)
        return response

    def _answer(self, request: httpx2.Request, clock: _Clock, whole: bool, options: dict[str, Any]) -> httpx2.Response:
        given = dict(request.extensions.get("timeout", {}))
        while True:
            asked = 0.0
            request.extensions["timeout"] = {
                what: max(0.01, min(given.get(what) or constants.HF_HUB_DOWNLOAD_TIMEOUT, clock.left()))
                for what in ("connect", "read", "write", "pool")
            }
            try:
                response = super().send(request, stream=True, **options)
                self._reached = True
                if response.status_code not in PASSING:
                    if whole:
                        response.stream = _Body(response, clock)
                        response.read()
                    return response
                cause, asked = f"it answers {response.status_code} {response.reason_phrase}", _asked_for(response)
                response.close()
            except httpx2.TransportError as error:
                root = list(chain(error))[-1]
                if not self._reached and (isinstance(root, HOPELESS) or isinstance(error, httpx2.ProxyError)):
                    raise UnavailableError(f"{constants.ENDPOINT} cannot be reached: {first_line(root)}") from error
                cause = _what_broke(error)
            clock.wait(cause, asked)


class _Body(httpx2.SyncByteStream):
    """A response's bytes under the clock; with `rest`, which gives those from a number on, a cut is no end."""

    def __init__(
        self, response: httpx2.Response, clock: _Clock, rest: Callable[[int], httpx2.Response] | None = None
    ) -> None:
        self._stream, self._clock, self._rest = _bytes_of(response), clock, rest

    def __iter__(self) -> Iterator[bytes]:
        position = known = 0  # bytes given, and bytes to come that were given before
        while True:
            try:
                for chunk in self._stream:
                    new, known = chunk[known:], max(0, known - len(chunk))
                    self._clock.received(len(new))
                    position += len(new)
                    yield new
                return
            except httpx2.TransportError as error:
                if self._rest is None:
                    raise
                self.close()
                self._clock.wait(_what_broke(error))
            response = self._rest(position)
            if not response.is_success:
                raise UnavailableError(f"it answers {response.status_code} {response.reason_phrase}; run it again")
            self._stream, known = _bytes_of(response), 0 if response.status_code == 206 else position

    def close(self) -> None:
        self._stream.close()


def _bytes_of(response: httpx2.Response) -> httpx2.SyncByteStream:
    assert isinstance(response.stream, httpx2.SyncByteStream)  # as of each client that is not async
    return response.stream


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it comes from; the transport hides some of them as a mere context."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _asked_for(response: httpx2.Response) -> float:
    """Seconds that the server asks to wait, in any of its ways; 0 where it asks for none."""
    limits = parse_ratelimit_headers(response.headers)
    if response.status_code == 429 and limits is not None and limits.remaining == 0:
        return limits.reset_in_seconds
    value = response.headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


def _what_broke(error: httpx2.TransportError) -> str:
    if isinstance(error, httpx2.TimeoutException):
        return "it does not answer" if isinstance(error, httpx2.ConnectTimeout) else "it sends nothing"
    return f"the connection breaks ({first_line(list(chain(error))[-1])})"
