"""The live page's server: loopback only, behind one-time links, Host and Origin checks.

Needs the extra ``scope`` (starlette, uvicorn, websockets); nothing else of the package imports it eagerly.

serving   what sidecar and command line call: a hub, a recording, the page on them
server    the listening socket, the token file, the line that says how to open it
connection  HTTP connections with deadlines
app       routes: files, data by name, commands, notices
guard     checks before any route, headers of every answer
access    tokens, one-time links, sessions
messages  kinds and bounds of everything that a browser may say
live      the websocket: notices from a bounded queue
assets    files of the page, in memory
views     data of the page's views
tiles     level of detail of recorded matrices
pack      binary bodies: a header and raw arrays
source    what the page needs of a recording and a run, as Protocols
recorded  the recording behind these Protocols
words     text of single tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mt_megatron.scope.recording.reader import Recording
    from mt_megatron.scope.sidecar.hub import Hub, ServeOptions


async def serve(hub: Hub, open_recording: Callable[[], Recording], options: ServeOptions) -> None:
    """``serving.serve``; raises ``ImportError`` where the extra is not installed. Tokens and files of the
    build can be read without it."""
    from .serving import serve as run

    await run(hub, open_recording, options)
