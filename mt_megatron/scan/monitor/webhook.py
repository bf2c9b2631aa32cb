"""Posts JSON to an address from a thread of its own: retried, bounded, and never in anybody's way."""

from __future__ import annotations

import json
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from mt_megatron.errors import ConfigError

_WAITING = 64
_WAITING_BYTES = 4 << 20


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would arrive elsewhere, as a GET without its body."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Webhook:
    """Delivers objects to ``url`` one after the other.

    An answer of 2xx counts as delivered. No answer, 429 and 5xx are tried again, ``attempts`` times in
    all with pauses of 1, 4, 16 ... ``pause`` seconds; anything else is given up at once. What cannot be
    delivered is said to ``say`` once each. The address may carry a secret and is shown as its host only.
    """

    def __init__(
        self,
        url: str,
        *,
        say: Callable[[str], None],
        timeout: float = 5.0,
        attempts: int = 3,
        pause: float = 1.0,
    ) -> None:
        """``timeout`` and ``pause`` in seconds. Raises ``ConfigError`` for what is no http(s) address."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"the webhook is a {parts.scheme or 'relative'!r} address. "
                "Expected http://HOST/... or https://HOST/..."
            )
        self.host = parts.hostname
        self.delivered = self.lost = 0
        self._url, self._say = url, say
        self._timeout, self._attempts, self._pause = timeout, attempts, pause
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._queue: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._waiting_bytes = 0
        self._counting = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mt-megatron-webhook", daemon=True)
        self._thread.start()

    def post(self, body: Mapping[str, Any]) -> None:
        """Queue ``body``; returns at once. 64 wait at most, and 4 MiB."""
        data = json.dumps(body).encode()
        with self._counting:
            fits = self._waiting_bytes + len(data) <= _WAITING_BYTES
            self._waiting_bytes += len(data) * fits
        if not fits:
            self._lose(f"{len(data)} bytes, and more than {_WAITING_BYTES} would wait")
            return
        try:
            self._queue.put_nowait(data)
        except queue.Full:
            with self._counting:
                self._waiting_bytes -= len(data)
            self._lose(f"{_WAITING} alerts wait already")

    def close(self, timeout: float = 5.0) -> None:
        """Give what is queued ``timeout`` seconds, without further retries, and end."""
        self._closing.set()
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (body := self._queue.get()) is not None:
            delivered = self._deliver(body)
            # Room before word of it: whoever sees that one is delivered may post the next.
            with self._counting:
                self._waiting_bytes -= len(body)
            self.delivered += delivered

    def _deliver(self, body: bytes) -> bool:
        problem = ""
        for attempt in range(self._attempts):
            if attempt and self._closing.wait(self._pause * 4 ** (attempt - 1)):
                break
            request = urllib.request.Request(
                self._url, data=body, headers={"Content-Type": "application/json"}, method="POST"
            )
            try:
                with self._open(request, timeout=self._timeout):
                    return True
            except urllib.error.HTTPError as error:
                problem = f"it answered {error.code}"
                error.close()
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, ValueError) as error:
                # A reason, never the address: urllib's own message may repeat it.
                problem = type(getattr(error, "reason", error)).__name__
        self._lose(problem)
        return False

    def _lose(self, problem: str) -> None:
        self.lost += 1
        self._say(
            f"scan: an alert did not reach the webhook at {self.host}: {problem} ({self.lost} lost so far)"
            if self.lost > 1
            else f"scan: an alert did not reach the webhook at {self.host}: {problem}"
        )
