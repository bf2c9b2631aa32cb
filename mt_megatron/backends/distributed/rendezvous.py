"""A rendezvous store that listens on 127.0.0.1 alone."""

from __future__ import annotations

import socket
from typing import Any

from mt_megatron.backends.torch_version import torch_is_before


def loopback_store() -> tuple[Any, int]:
    """A ``TCPStore`` for processes of this machine, and its port.

    A store that torch binds itself listens on every address, even for 127.0.0.1. Keep the store for
    as long as anybody may meet there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    # detach(): the store owns the descriptor from here and closes it when it is deleted.
    given: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "master_listen_fd": listener.detach(),
    }
    if torch_is_before(2, 8):
        # There only the older of torch's two servers takes a socket that is bound already.
        given["use_libuv"] = False
    return TCPStore("127.0.0.1", port, **given), port
