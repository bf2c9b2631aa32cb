"""The watcher's figures as Prometheus text over HTTP, on loopback unless another address is asked for.

One answer a connection. ``host.peers.Listener`` bounds connections, those of other users by a part of their
own; each ends ``REQUEST_S`` after it began.

Every request's ``Host`` header is checked: a browser that a hostile page has led here by DNS rebinding sends
that page's name. Refused requests get no figures.
"""

from __future__ import annotations

import io
import ipaddress
import itertools
import math
import socket
import socketserver
import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mt_megatron.errors import ConfigError
from mt_megatron.host.peers import BACKLOG, Listener, is_loopback

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LINE_BYTES, MOST_LINES = 1024, 32
"""Of a request that are read; a longer line counts as several."""

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Named figures with labels; set by one thread, read by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._about: dict[str, tuple[str, str]] = {}
        self._values: dict[str, dict[Labels, float]] = {}

    def declare(self, name: str, kind: str, about: str) -> None:
        """``kind``: ``gauge`` or ``counter``; ``about``: one line for the reader."""
        self._about[name] = (kind, about)
        self._values.setdefault(name, {})

    def set(self, name: str, value: float, **labels: object) -> None:
        """Replace one figure."""
        with self._lock:
            self._values[name][_labels(labels)] = value

    def add(self, name: str, value: float = 1.0, **labels: object) -> None:
        """Count one figure up."""
        with self._lock:
            key = _labels(labels)
            self._values[name][key] = self._values[name].get(key, 0.0) + value

    def replace(self, name: str, figures: Iterable[tuple[Mapping[str, object], float]]) -> None:
        """All figures of this name at once: what is no longer true is no longer shown."""
        with self._lock:
            self._values[name] = {_labels(labels): value for labels, value in figures}

    def text(self) -> str:
        """The text format, version 0.0.4."""
        lines: list[str] = []
        with self._lock:
            for name, (kind, about) in self._about.items():
                lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
                lines += [
                    f"{name}{_shown(key)} {_number(value)}" for key, value in self._values[name].items()
                ]
        return "\n".join(lines) + "\n"


LOOPBACK = "127.0.0.1"


class Endpoint:
    """Serves ``metrics`` at ``http://address:port/metrics`` until closed."""

    def __init__(
        self, metrics: Metrics, port: int, *, address: str = LOOPBACK, hosts: Collection[str] = ()
    ) -> None:
        """``port`` 0 takes any free one. ``address``: of this machine, or ``0.0.0.0`` or ``::`` for all of
        them. ``hosts``: names besides this machine's own by which it may be asked.

        Raises ``ConfigError`` when the port is taken or the address is not this machine's.
        """
        names = allowed_names(address, hosts)

        class Handler(BaseHTTPRequestHandler):
            def setup(self) -> None:
                super().setup()
                with self.rfile as file:  # http.server alone would take 100 headers of 64 KiB
                    # Up to an empty line, which may lack its carriage return, or the end.
                    read = iter(lambda: file.readline(LINE_BYTES), b"")
                    lines = itertools.islice(itertools.takewhile(bytes.strip, read), MOST_LINES)
                    self.rfile = io.BytesIO(b"".join(lines))

            def do_GET(self) -> None:
                # The address at which this connection came in is no name that anybody could rebind.
                arrived_at = _plain(self.connection.getsockname()[0])
                asked_for = [_host_of(each) for each in self.headers.get_all("Host", [])]
                if len(asked_for) != 1 or asked_for[0] not in {*names, arrived_at}:
                    self.send_error(
                        HTTPStatus.FORBIDDEN,
                        "Host is not allowed",
                        "The Host header names another machine. Allow it with --scan-prometheus-hosts.",
                    )
                    return
                if self.path.split("?")[0] != "/metrics":
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                body = metrics.text().encode()
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """A scrape every few seconds is no news."""

        try:
            self._server = (_ServerIPv6 if ":" in address else _Server)((address, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"no Prometheus endpoint on {_shown_address(address)}:{port}: {error}. Choose a free "
                "--scan-prometheus-port, and for --scan-prometheus-address one of this machine's."
            ) from None
        self.port: int = self._server.server_address[1]
        self.url = f"http://{_shown_address(address)}:{self.port}/metrics"
        self.is_public = not is_loopback(address)
        """Whether other machines can reach it."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="mt-megatron-prometheus", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def allowed_names(address: str, hosts: Collection[str] = ()) -> frozenset[str]:
    """Hosts that a request may ask for, lower case and without ports: loopback's, the bound address, this
    machine's names, and ``hosts``."""
    own = socket.gethostname()
    names = ["localhost", LOOPBACK, "::1", address, own, own.split(".")[0], *hosts]
    return frozenset(_plain(name) for name in names if name) - {"0.0.0.0", "::"}


def _host_of(header: str) -> str:
    """The host in a ``Host`` header (RFC 9110, 7.2): without port, brackets and the root's dot."""
    text = header.strip()
    if text.startswith("["):
        host, closed, port = text[1:].partition("]")
        if not closed or (port and not (port[0] == ":" and port[1:].isdigit())):
            return ""
        return _plain(host)
    host, _, port = text.partition(":")
    return _plain(host) if not port or port.isdigit() else ""


def _plain(name: str) -> str:
    """In one form: lower case, no root's dot, IPv4 not as mapped into IPv6, no zone."""
    text = name.strip().lower().removesuffix(".").partition("%")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = BACKLOG
    socket: Listener

    def server_bind(self) -> None:
        self.socket.close()
        self.socket = Listener(self.address_family)
        # Not HTTPServer's: it asks DNS for a name that nothing here needs, for seconds where none answers.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def service_actions(self) -> None:
        self.socket.cut_off()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone, or was cut off, is no news."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _ServerIPv6(_Server):
    address_family = socket.AF_INET6


def _shown_address(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _labels(labels: Mapping[str, object]) -> Labels:
    return tuple((name, str(value)) for name, value in labels.items())


def _shown(labels: Iterable[tuple[str, str]]) -> str:
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{shown}}}" if shown else ""


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
