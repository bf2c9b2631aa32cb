"""HTTP connections with deadlines: neither a request nor an answer can be drawn out.

uvicorn closes a connection that idles *between* requests and no other. A client that connects and says
nothing, or a header at a time (slow loris), or that stops reading in the middle of an answer, would keep one
of the server's connections, and the answer's bytes, for as long as it likes.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mt_megatron.host.peers import REQUEST_S

ANSWER_S = 30.0
"""In which a client must take something of an answer that waits for it."""

_UNFINISHED = (h11.IDLE, h11.SEND_BODY)


class Connection(H11Protocol):
    """One connection; what is late is cut off without an answer."""

    _request: asyncio.TimerHandle | None = None
    _answer: asyncio.TimerHandle | None = None
    _left = 0
    """Bytes of the answer that the client had not taken when it was looked at last."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_request()
        self._end_answer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._end_request()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        self._end_request()  # uvicorn's own deadline of idle connections begins
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answer is None:
            self._left = self.transport.get_write_buffer_size()
            self._answer = self.loop.call_later(ANSWER_S, self._look_at_answer)

    def resume_writing(self) -> None:
        self._end_answer()
        super().resume_writing()

    def _look(self) -> None:
        """The deadline runs exactly while a request is unfinished; further bytes do not put it off."""
        is_http = self in self.connections  # a websocket has a protocol, and deadlines, of its own
        if not is_http or self.conn.their_state not in _UNFINISHED:
            self._end_request()
        elif self._request is None:
            self._request = self.loop.call_later(REQUEST_S, self.transport.close)

    def _look_at_answer(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left >= self._left:
            self.transport.abort()
            return
        self._left = left
        self._answer = self.loop.call_later(ANSWER_S, self._look_at_answer)

    def _end_request(self) -> None:
        if self._request is not None:
            self._request.cancel()
            self._request = None

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None
