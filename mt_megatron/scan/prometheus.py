"""What the watcher knows as Prometheus text, on the loopback address only."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mt_megatron.errors import ConfigError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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


class Endpoint:
    """Serves ``metrics`` at ``http://127.0.0.1:port/metrics`` until closed."""

    def __init__(self, metrics: Metrics, port: int) -> None:
        """``port`` 0 takes any free one. Raises ``ConfigError`` when the port is taken."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
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
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"no Prometheus endpoint on 127.0.0.1:{port}: {error}. Choose a free --scan-prometheus-port."
            ) from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="mt-megatron-prometheus", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


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
