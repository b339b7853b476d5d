"""Serves the page of a running job: the run's files, seen in a browser, and its metrics. Changes need a token.

The server only reads files, in threads of its own; training never waits for it.
"""

from __future__ import annotations

import hmac
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from runflat.cluster.refusals import RefusalLog
from runflat.errors import ConfigError, RunflatError
from runflat.report.device_map import device_map, map_json
from runflat.report.metrics import prometheus
from runflat.report.page import live_parts, render_live
from runflat.report.run_files import RunData, RunFiles
from runflat.report.views import View, run_view

POLL_S = 0.5
MOST_READERS = 32
PATIENCE_S = 10.0
"""What a reader has to ask, and to take each part of the answer."""
LAST_WORD_S = 5.0
"""How long the end waits for pages to be told of it."""
REST = 10.0
MOST_BODY_BYTES = 4096
FINISHED = "finished"
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Ask = Callable[[Literal["drain", "return"], str], tuple[bool, str]]
"""(action, device) -> (done, the controller's answer)."""


class Snapshots:
    """What the run's folder says, read at most every `POLL_S` however many look; drawn once for all of them.

    State and map are of the newest version. The figures of a long run take long to draw, in the controller's own
    process: they are drawn again when `REST` times as long as that has passed, and at the end.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.monotonic):
        """Nothing is read yet; `clock` gives seconds."""
        self._files = RunFiles(run)
        self._lock = threading.Lock()
        self._clock = clock
        self._now = ""
        self._now_version = -1
        self._figures = "{}"
        self._figures_version = -1
        self._rests_until_s = -math.inf
        self.data = RunData(folder=run)
        self.version = 0

    def refresh(self) -> int:
        """Read what is new; returns the number of the newest state."""
        with self._lock:
            found = self._files.poll()
            if found is not None:
                self.data = found
                self.version += 1
            return self.version

    def view(self) -> View:
        """The newest state as a page shows it."""
        return run_view(self.data, "v1")

    def message(self, figures_sent: int = -1) -> tuple[str, int]:
        """(the newest state as the page's script takes it, version of its figures); without those if sent before."""
        with self._lock:
            if self._now_version != self.version:
                found = device_map(self.data)
                frames = map_json(found) if found else "{}"
                self._now = f'"state": {json.dumps(_state(self.data))}, "map": {frames}'
                self._now_version = self.version
            if self._figures_are_due():
                began_s = self._clock()
                self._figures = json.dumps(live_parts(run_view(self.data, "v1", has_map=False)))
                self._figures_version = self.version
                self._rests_until_s = self._clock() + REST * (self._clock() - began_s)
            html = "{}" if self._figures_version == figures_sent else self._figures
            return f'{{{self._now}, "html": {html}}}', self._figures_version

    def owes_figures(self, figures_sent: int) -> bool:
        """Whether a message would have figures newer than those of version `figures_sent`."""
        with self._lock:
            return self._figures_version != figures_sent or self._figures_are_due()

    def _figures_are_due(self) -> bool:
        return self._figures_version != self.version and (
            self._clock() >= self._rests_until_s or _state(self.data) == FINISHED
        )


def _state(data: RunData) -> str:
    if data.devices.get("finished") or data.summary:
        return FINISHED
    waiting = data.devices.get("waiting")
    return str(waiting) if waiting else f"running, step {data.devices.get('step', 0)}"


class _Server(ThreadingHTTPServer):
    """A thread for each reader, of whom there are at most `MOST_READERS`: all of this lives in the controller."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, host: str, port: int, handler: type[BaseHTTPRequestHandler], refused: Callable[[str, str], None]
    ):
        """Listen; `refused` takes (address, reason) of who was turned away."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(MOST_READERS)
        self._refused = refused
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to serve who has called, or hang up where too many are served."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        self._refused(str(client_address[0]), "too many read the page")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one reader."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has gone is no error; all else is told."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class LivePage:
    """A server on `host`:`port` (0: a free one) until `close`. Without a token it changes nothing."""

    def __init__(
        self,
        run: Path,
        host: str,
        port: int,
        token: str | None,
        ask: Ask,
        log: Callable[[str], object] = lambda _: None,
    ):
        """Start to serve; `log` takes lines for people, of those who were refused.

        Raises:
            ConfigError: the address cannot be had.
        """
        self.snapshots = Snapshots(run)
        self.token = token
        self.ask = ask
        self.ended = threading.Event()
        self._refusals = RefusalLog("page", log)
        self._num_streams = 0
        self._told = threading.Condition()
        page = self

        class Handler(_Handler):
            live = page

        try:
            self._server = _Server(host, port, Handler, self.refused)
        except OSError as error:
            raise ConfigError(f"the page cannot be served at {host}:{port}: {error}. Give another --page.") from error
        self.host, self.port = host, self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"

    def refused(self, address: str, reason: str) -> None:
        """Somebody was turned away: say so, in lines whose number strangers do not decide."""
        self._refusals.add(address, reason)
        self._refusals.note()

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """While somebody is sent each new state: `close` lets them have the last one."""
        with self._told:
            self._num_streams += 1
        try:
            yield
        finally:
            with self._told:
                self._num_streams -= 1
                self._told.notify_all()

    def close(self) -> None:
        """Stop serving, once the pages that follow have the last state; waits at most `LAST_WORD_S` for that."""
        self.ended.set()
        with self._told:
            self._told.wait_for(lambda: not self._num_streams, LAST_WORD_S)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._refusals.note(all_of_them=True)


class _Handler(BaseHTTPRequestHandler):
    live: LivePage
    protocol_version = "HTTP/1.0"
    timeout = PATIENCE_S

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the screen is the run's."""

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        """Pages, metrics, and the stream of changes."""
        if not self._host_is_ours():
            self._answer(403, "text/plain", "this name is not that of the page\n")
        elif self.path == "/":
            self.live.snapshots.refresh()
            page = render_live(self.live.snapshots.view(), may_act=self.live.token is not None)
            self._answer(200, "text/html; charset=utf-8", page)
        elif self.path == "/metrics":
            self.live.snapshots.refresh()
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", prometheus(self.live.snapshots.data))
        elif self.path == "/events":
            with self.live.streaming():
                self._stream()
        else:
            self._answer(404, "text/plain", "there is no such page\n")

    def _stream(self) -> None:
        """Send each new state until the reader goes away or the run ends."""
        self._head(200, "text/event-stream")
        sent = figures_sent = -1
        try:
            while True:
                ended = self.live.ended.is_set()
                version = self.live.snapshots.refresh()
                text = ": \n\n"
                if version != sent or self.live.snapshots.owes_figures(figures_sent):
                    message, figures_sent = self.live.snapshots.message(figures_sent)
                    text = f"data: {message}\n\n"
                sent = version
                self.wfile.write(text.encode())
                self.wfile.flush()
                if ended:
                    return
                self.live.ended.wait(POLL_S)
        except OSError:
            return  # the reader has gone

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        """Ask a device to drain or to return: only with the token, from this page, and confirmed."""
        size = self.headers.get("Content-Length", "")
        body = self.rfile.read(int(size)) if size.isdigit() and int(size) <= MOST_BODY_BYTES else b""
        refusal = self._refusal()
        if refusal is not None:
            self.live.refused(self.client_address[0], refusal)
            self._reply(403, False, refusal)
            return
        try:
            wish: Any = json.loads(body)
            action, device, confirm = wish["action"], wish["device"], wish["confirm"]
        except (ValueError, LookupError, TypeError):
            self._reply(400, False, "say action, device and confirm as JSON")
            return
        if action not in ("drain", "return") or not isinstance(device, str) or confirm != device:
            self._reply(400, False, "the action is drain or return, and confirm repeats the device")
            return
        try:
            ok, text = self.live.ask(action, device)
        except RunflatError as error:
            ok, text = False, str(error)
        self._reply(200 if ok else 409, ok, text)

    def _refusal(self) -> str | None:
        """Why this request may change nothing, or None."""
        if self.path != "/device":
            return "there is nothing to change here"
        if self.live.token is None:
            return "the page was started without a token: it changes nothing"
        if not self._host_is_ours() or self.headers.get("Origin") != f"http://{self.headers.get('Host')}":
            return "the request does not come from this page"
        if self.headers.get("Content-Type", "").partition(";")[0] != "application/json":
            return "the request is not JSON"
        given = self.headers.get("X-Runflat-Token", "")
        return None if hmac.compare_digest(given.encode(), self.live.token.encode()) else "the token is wrong"

    def _host_is_ours(self) -> bool:
        """Whether the browser called us by a name of ours: a foreign name that leads here is somebody's trick."""
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        return name in LOOPBACK or self.live.host not in LOOPBACK

    def _reply(self, status: int, ok: bool, text: str) -> None:
        self._answer(status, "application/json", json.dumps({"ok": ok, "text": text}))

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()

    def _answer(self, status: int, kind: str, text: str) -> None:
        try:
            self._head(status, kind)
            self.wfile.write(text.encode())
        except OSError:
            return  # the reader has gone
