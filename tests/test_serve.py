"""The local server measures and draws typed texts, refuses foreign requests, and stores no text."""

from __future__ import annotations

import asyncio
import difflib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from browser import LIMIT_MILLISECONDS, WHOLE, console_errors, violations
from conftest import REPOSITORY, digest, write_tiny_bert
from playwright.sync_api import expect
from starlette.types import Message, Scope

import attnmix
from attnmix.__main__ import listen
from attnmix.core.errors import InputError
from attnmix.core.names import INPUT_PARTS
from attnmix.runs.text_results import load_measurer
from attnmix.serve import EXAMPLES, OPENING_TEXTS, OneLineErrors, tokenized

TUNNEL = "tunnel.example:8443"
SECRET = "zanzibar"  # in every typed text, but not in files or logs
TEXTS = [
    f"<script>window.hacked=1</script><img src=x onerror='window.hacked=1'> {SECRET} 東京 \U0001f600 caf\u00e9 then",
    f"שלום {SECRET} עולם\nhas two lines",
]


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    body: str


class Server:
    """A running `attnmix serve` in an empty folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.temporary = folder / "work", folder / "tmp"
        self.temporary.mkdir()
        self.folder.mkdir()
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self.temporary)}
        command = [sys.executable, "-m", "attnmix", "serve", "--port", "0", *options]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, cwd=self.folder, env=environment, **pipes)
        assert self.process.stdout is not None
        self.printed = []
        for line in self.process.stdout:
            self.printed.append(line)
            if line.startswith("open http"):
                self.address = line.split()[1]
                self.port = int(self.address.rpartition(":")[2])
                return
        pytest.fail("".join(self.printed))

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request with the headers `Host` and `Origin` of the server's own page, and return the answer.

        `headers` contains further headers, or replaces the values of these two; headers with an empty value are not
        sent.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = {"Host": f"127.0.0.1:{self.port}", "Origin": self.address} | headers
        sent = {name: value for name, value in sent.items() if value}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body)
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        answer = Answer(response.status, response.read().decode())
        connection.close()
        return answer

    def stop(self, by: signal.Signals) -> str:
        """Stop the server and return its complete output."""
        self.process.send_signal(by)
        rest, _ = self.process.communicate(timeout=300)
        return "".join(self.printed) + rest


def stop_and_look(server: Server, by: signal.Signals) -> str:
    """Stop a server of a local model, assert that its copy of the model is deleted, and return the output."""
    assert len(list(server.temporary.rglob("*.safetensors"))) == 1
    printed = server.stop(by)
    assert server.process.returncode == 128 + signal.SIGTERM
    assert list(server.temporary.rglob("model")) == []
    return printed


@pytest.fixture(scope="module")
def model(default_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random model with the tokenizer of the default model."""
    vocabulary = (default_weights / "vocab.txt").read_text(encoding="utf-8").splitlines()
    folder = write_tiny_bert(tmp_path_factory.mktemp("model"), vocab_size=len(vocabulary))
    for path in default_weights.iterdir():
        if "token" in path.name or path.name == "vocab.txt":
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one server for all tests, and assert after the last test that it has stored no text."""
    started = Server(tmp_path_factory.mktemp("serve"), "--model", str(model), "--allow-host", TUNNEL)
    yield started
    assert started.process.poll() is None
    printed = stop_and_look(started, signal.SIGTERM)
    assert "open http://127.0.0.1:" in printed
    assert SECRET[:4] not in printed
    assert "Traceback" not in printed
    files = [path for folder in (started.folder, started.temporary) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


@pytest.fixture(scope="module")
def tab(chromium: Any) -> Iterator[Any]:
    """Yield one tab for all tests, because the first page of a tab takes three times as long as later pages."""
    page = chromium.new_page()
    page.set_default_timeout(LIMIT_MILLISECONDS)
    yield page
    page.close()


@pytest.fixture
def shell(tab: Any, server: Server) -> Any:
    """Return the page of the server in its initial state."""
    tab.goto("about:blank")
    tab.goto(server.address)
    return tab


def shown(page: Any) -> Any:
    """Wait until the frame has loaded the page named in the address, and return the frame."""
    name = page.url.partition("#")[2]
    frame = page.frames[1]
    frame.wait_for_url(f"**/page/{name}*")
    frame.locator(WHOLE).wait_for(state="attached")
    return frame


def test_typed_sentences_are_drawn_and_not_stored(server: Server, tab: Any) -> None:
    before = {folder: digest(folder) for folder in (server.folder, server.temporary)}
    page = tab
    errors = console_errors(page)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server.address)
    for text in TEXTS:
        page.get_by_label("Type a text").fill(text)
        page.get_by_role("button", name="Measure").click()
        page.get_by_role("status").filter(has_text="Measured").wait_for()
        frame = shown(page)
        words = "".join(frame.locator("#words").inner_text().lower().split())
        assert "zan" in words
        assert [each.evaluate("window.hacked") for each in page.frames] == [None, None]
    page.go_back()
    expect(page.get_by_label("Type a text")).to_have_value(TEXTS[-2], timeout=LIMIT_MILLISECONDS)
    assert "then" in shown(page).locator("#words").inner_text()
    assert SECRET not in page.url
    assert errors == []
    assert {folder: digest(folder) for folder in before} == before


def test_server_opens_with_saveable_example(shell: Any, tmp_path: Path) -> None:
    page = shell
    page.get_by_role("status").filter(has_text="example").wait_for()
    frame = page.frames[1]
    frame.locator(WHOLE).wait_for(state="attached")
    assert frame.locator(".levels b").all_inner_texts()[:2] == list(OPENING_TEXTS)
    fields = [page.get_by_label(label) for label in ("Type a text", "Compare it with")]
    assert [each.input_value() for each in fields] == ["", ""]  # a typed text is measured alone
    assert tuple(each.get_attribute("placeholder") for each in fields) == OPENING_TEXTS
    with page.expect_download() as download:
        page.get_by_role("link", name="Save this page").click()
    download.value.save_as(tmp_path / "saved.html")
    saved = (tmp_path / "saved.html").read_text(encoding="utf-8")
    assert saved == page.evaluate("fetch(document.getElementById('save').href).then(answer => answer.text())")
    assert OPENING_TEXTS[0] in saved
    fields[0].fill("a film")
    fields[0].press("Enter")
    page.get_by_role("status").filter(has_text="Measured").wait_for()
    assert shown(page).locator("#grid h2").inner_text().startswith("“a film”")
    page.go_back()
    expect(page.get_by_role("status")).to_have_text("The page shows an example.", timeout=LIMIT_MILLISECONDS)


def test_text_typed_while_the_page_loads_is_measured(tab: Any, server: Server) -> None:
    page, waiting = tab, list[Any]()
    page.route("**/about", lambda route: waiting.append(route))
    page.goto("about:blank")
    with page.expect_request("**/about"):
        page.goto(server.address)
    page.get_by_label("Type a text").fill("an early text")
    expect(page.get_by_role("button", name="Measure")).to_be_disabled()
    waiting.pop().continue_()
    page.get_by_role("button", name="Measure").click()
    page.get_by_role("status").filter(has_text="Measured").wait_for()
    page.unroute("**/about")
    assert shown(page).locator("#grid h2").inner_text().startswith("“an early text”")


def test_long_texts_are_visible_in_their_field(shell: Any) -> None:
    field = shell.get_by_label("Type a text")
    field.fill("the film was good . " * 6)
    assert field.bounding_box()["height"] > 60
    assert field.evaluate("field => field.scrollHeight <= field.clientHeight")


def test_selection_is_kept_for_the_next_text(shell: Any) -> None:
    page = shell

    def measure(text: str) -> Any:
        page.get_by_label("Type a text").fill(text)
        page.get_by_role("button", name="Measure").click()
        page.get_by_role("status").filter(has_text="Measured").wait_for()
        return shown(page)

    frame = measure("the film was good")
    frame.locator("#token-4").click()
    frame.locator("#layer").fill("1")
    frame.get_by_role("button", name="Layer 1, head 1", exact=True).click()
    for text, positions in (
        ("good actors and the film was very good", [1]),  # the occurrence nearest to position 4
        ("a film", []),
    ):
        frame = measure(text)
        chosen = frame.locator("#words .chosen").evaluate_all("all => all.map(each => each.id)")
        assert chosen == [f"token-{position}" for position in positions]
        assert frame.locator("#layer").input_value() == "1"
        assert frame.get_by_role("button", name="Layer 1, head 1", exact=True).get_attribute("aria-pressed") == "true"
        assert all("good" not in each.url for each in page.frames)


def test_two_texts_are_compared_and_restored_by_back(shell: Any) -> None:
    page = shell
    fields = [page.get_by_label(label) for label in ("Type a text", "Compare it with")]
    example = next(iter(EXAMPLES))
    page.get_by_role("button", name=example).click()
    page.get_by_role("status").filter(has_text="Measured").wait_for()
    assert tuple(each.input_value() for each in fields) == EXAMPLES[example]
    unlike = (f"a {SECRET} film", "was the music so very warm ?")

    def check_titles(texts: tuple[str, str]) -> None:
        titles = shown(page).locator(".levels b").all_inner_texts()
        assert titles[:2] == list(texts)
        assert re.fullmatch(f"Difference: “{texts[1][:9]}.*” minus “{texts[0][:9]}.*”", titles[2])

    check_titles(EXAMPLES[example])
    for field, text in zip(fields, unlike, strict=True):
        field.fill(text)
    fields[1].press("Enter")
    page.get_by_role("status").filter(has_text="Measured").wait_for()
    check_titles(unlike)
    fields[1].fill("")
    page.get_by_role("button", name="Measure").click()
    page.get_by_role("status").filter(has_text="Measured").wait_for()
    assert shown(page).locator("#compare").count() == 0
    page.go_back()
    expect(fields[1]).to_have_value("was the music so very warm ?", timeout=LIMIT_MILLISECONDS)
    assert shown(page).locator("#differences").count() == 1


def test_examples_are_minimal_pairs() -> None:
    for first, second in EXAMPLES.values():
        blocks = difflib.SequenceMatcher(None, first.split(), second.split()).get_matching_blocks()
        same = sum(block.size for block in blocks)
        assert len(first.split()) > same > len(first.split()) / 2 - 1


def test_shell_is_accessible(server: Server, chromium: Any) -> None:
    context = chromium.new_context(bypass_csp=True)
    page = context.new_page()
    page.goto(server.address)
    page.get_by_role("button", name=next(iter(EXAMPLES))).wait_for()
    for width in (400, 1280):
        page.set_viewport_size({"width": width, "height": 720})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # Most of the window remains for the page.
        assert page.evaluate("document.querySelector('header').offsetHeight") < 720 / 2.5
        assert violations(page) == []
    context.close()


def test_unmeasurable_texts_are_explained(server: Server) -> None:
    assert server.ask("POST", "/measure", {"texts": ["  "]}) == (400, "the text is empty; allowed: 1 to 64 tokens")
    status, answer = server.ask("POST", "/measure", {"texts": [f"{SECRET} " * 10_000]})
    assert status == 400
    assert answer.endswith("tokens; allowed: at most 64. Use `attnmix show` for longer texts.")
    for second, problem in ((" ", "is empty"), ("word " * 100, "has 102 tokens")):
        status, answer = server.ask("POST", "/measure", {"texts": [SECRET, second]})
        assert status == 400
        assert answer.startswith(f"the text to compare with {problem}; allowed: ")
    assert server.ask("POST", "/measure", {"texts": [SECRET * 100_000]}).status == 413
    for texts in ("x", 3, [], [3], ["a", 3], ["a"] * 3, [["a", "b"]]):
        assert server.ask("POST", "/measure", {"texts": texts}).status == 400
    for body in ({"words": "x"}, [1], "x", b"", b"[" * 100_000, b'{"texts":' * 20_000):
        assert server.ask("POST", "/measure", body).status == 400
    assert server.ask("GET", "/page/unknown") == (404, "This text is no longer stored; enter it again.")


def test_foreign_pages_and_names_are_refused(server: Server) -> None:
    asked = {"texts": [SECRET]}
    assert server.ask("POST", "/measure", asked, Origin="https://example.org").status == 403
    assert server.ask("POST", "/measure", asked, Origin="null").status == 403
    assert server.ask("POST", "/measure", asked, Origin="").status == 403
    assert server.ask("GET", "/", Origin="https://example.org").status == 403
    status, reason = server.ask("GET", "/", Host="example.org", Origin="")
    assert status == 421
    assert reason.startswith("This server only accepts requests to 127.0.0.1 and localhost, on any port, not to")
    assert reason.endswith(
        " example.org. If this is your own tunnel or proxy, start the server with --allow-host example.org"
    )
    for near in (
        "localhost.example.org",
        "localhost:x",
        "localhost:",
        "127.0.0.1.example.org",
        "127.0.0.2",
        TUNNEL + "0",
    ):
        assert server.ask("GET", "/", Host=near, Origin="").status == 421
    rebound = f"attacker.example:{server.port}"
    assert server.ask("POST", "/measure", asked, Host=rebound, Origin=f"http://{rebound}").status == 421
    assert server.ask("GET", "/", Origin="").status == 200


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:9000", "http://localhost:9000"),  # the local end of a tunnel
        ("127.0.0.1", "http://127.0.0.1"),  # browsers omit port 80
        (TUNNEL, f"https://{TUNNEL}"),  # an allowed proxy
        (TUNNEL, f"http://{TUNNEL}"),
        ("localhost:8642", f"https://{TUNNEL}"),  # a proxy that sends the server's own name
    ],
)
def test_tunnels_and_default_port_are_served(server: Server, host: str, origin: str) -> None:
    assert server.ask("GET", "/", Host=host, Origin="").status == 200
    assert server.ask("POST", "/measure", {"texts": [" "]}, Host=host, Origin=origin).status == 400
    for foreign in ("http://localhost:3000", "https://example.org", f"{origin}.example.org"):
        assert server.ask("POST", "/measure", {"texts": [" "]}, Host=host, Origin=foreign).status == 403


def test_interrupted_request_is_no_error(server: Server) -> None:
    head = "POST /measure HTTP/1.1\r\nHost: localhost:1\r\nOrigin: http://localhost:1\r\nContent-Length: 1000\r\n\r\n"
    for sent in ("", '{"texts": ["'):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall((head + sent).encode())
    assert server.ask("GET", "/", Origin="").status == 200  # the fixture `server` checks the output at the end


def test_internal_error_does_not_reveal_text(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError(SECRET)

    async def send(message: Message) -> None:
        sent.append(message)

    sent = list[Message]()
    scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    with ThreadPoolExecutor(1) as thread:  # the main thread already has the browser's event loop
        thread.submit(asyncio.run, OneLineErrors(fail)(scope, send, send)).result()
    assert [message.get("status") for message in sent] == [500, None]
    assert sent[1]["body"] == b"This request could not be answered (RuntimeError)."
    assert caplog.messages == ["a request could not be answered: RuntimeError"]


@pytest.mark.long
def test_closed_terminal_removes_model_copy(tiny_bert: Path, tmp_path: Path) -> None:
    assert "Traceback" not in stop_and_look(Server(tmp_path, "--model", str(tiny_bert)), signal.SIGHUP)


@pytest.mark.long
def test_default_model_is_served_until_ctrl_c(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.ask("POST", "/measure", {"texts": [SECRET]}).status == 200
    assert "Traceback" not in server.stop(signal.SIGINT)


def test_foreign_page_in_browser_has_no_access(server: Server, chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "foreign.html").write_text("<!DOCTYPE html><title>foreign</title>", encoding="utf-8")
    page = chromium.new_page()
    page.goto((tmp_path / "foreign.html").as_uri())
    post = (
        "address => fetch(address + '/measure', {method: 'POST', body: '{\"texts\": [\"x\"]}'}).then(() => 1, () => 0)"
    )
    assert page.evaluate(post, server.address) == 0
    framed = f"<iframe src='{server.address}'></iframe>"
    page.set_content(framed)  # also waits for the frame
    assert all("Type a text" not in each.content() for each in page.frames[1:])
    page.close()


def test_only_loopback_address_listens(server: Server) -> None:
    listening = [each.laddr for each in psutil.Process(server.process.pid).net_connections() if each.status == "LISTEN"]
    assert listening == [("127.0.0.1", server.port)]


def test_concurrent_clients_are_served_or_told_to_wait(server: Server) -> None:
    with ThreadPoolExecutor(12) as pool:
        texts = [{"texts": [f"{SECRET} number {number}"]} for number in range(12)]
        answers = list(pool.map(lambda text: server.ask("POST", "/measure", text).status, texts))
    assert set(answers) == {200, 429}
    assert answers.count(200) >= 2


def test_invalid_port_is_one_error(server: Server) -> None:
    with pytest.raises(InputError, match=rf"^--port: {server.port} is not available \(Address already in use\)"):
        listen(server.port)
    with pytest.raises(InputError, match=r"^--port: 70000; allowed: 0 \(a free port\) to 65535"):
        listen(70_000)


def test_served_numbers_match_library(tiny_bert: Path) -> None:
    text = "the film was great ."
    measurer = load_measurer({"pretrained": tiny_bert})
    run = measurer.results(tokenized([text], measurer))
    result = attnmix.measure(attnmix.load(tiny_bert), text)
    (ratios_MLT,) = result.ratios_by_text
    for number, method in enumerate(result.methods):
        computed = run.captured_ratios(["text/0"])[method].to_numpy().reshape(ratios_MLT[number].shape)
        np.testing.assert_allclose(computed, ratios_MLT[number], rtol=1e-5, atol=1e-6)
    for name in run.matrices("pretrained", "text/0"):
        matrix = run.matrix("pretrained", "text/0", name)
        if name == INPUT_PARTS:
            own_shares_LT = np.diagonal(matrix, axis1=1, axis2=2)
            np.testing.assert_allclose(own_shares_LT, result.parts()["own_share"][1:], rtol=1e-4, atol=1e-5)
            continue
        np.testing.assert_allclose(matrix, result.matrix(name).to_numpy(), rtol=1e-5, atol=1e-6)
