"""``mt-megatron scope open``: the page on a recording, without training."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import http.client
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mt_megatron.checkpoint.files import run_root
from mt_megatron.errors import ConfigError

if TYPE_CHECKING:
    from mt_megatron.scope.web.access import TokenFile

MOST_RUNS = 8
"""Runs that one chart compares."""

"""Longest silence of a server that is asked for its proof."""

_EXAMPLE = """examples:
  mt-megatron scope open RUN
  mt-megatron scope open RUN OTHER_RUN          (both losses in one chart)
  mt-megatron scope open RUN --port 8700
  mt-megatron scope open RUN --here
  mt-megatron scope open RUN --control

exit codes: 0 a link was printed, or ended with Ctrl-C, 1 the page cannot be served, 2 wrong use or no such
recording"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the action."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "open",
        help="print a link that opens the page of a run; serve it where no training does",
        description="Print a link that opens the page once, within two minutes. Where the run trains, its\n"
        "own page is meant; else the page is served on the recording, on loopback only, until Ctrl-C.\n"
        "Needs: pip install 'mt_megatron[scope]'",
        epilog=_EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run's outputs")
    parser.add_argument(
        "others",
        metavar="RUN",
        type=Path,
        nargs="*",
        help="up to seven more, to compare their curves",
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="on 127.0.0.1 (a free one)")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="write the address with its token here, too"
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="the link may command the training, too; also print the token that an open page asks for",
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="serve the recording on this machine, also where the run's page is said to be served",
    )
    parser.set_defaults(func=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print a link to a page that is served, or serve it until Ctrl-C; returns the exit code."""
    from mt_megatron.scope.recording.files import existing_recording, scope_files
    from mt_megatron.scope.recording.reader import open_recording
    from mt_megatron.scope.sidecar.hub import ServeOptions, recording_hub
    from mt_megatron.scope.sidecar.sidecar import served
    from mt_megatron.scope.web.access import read_token_file

    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port is {args.port}; expected 0 (a free one) to 65535")
    if len(args.others) >= MOST_RUNS:
        raise ConfigError(f"found {1 + len(args.others)} runs; expected at most {MOST_RUNS} to compare")
    others = [existing_recording(other).root.parent for other in args.others]
    # A training's own page knows nothing of runs that are named here.
    is_here = args.here or bool(others)
    page = scope_files(run_root(args.run)).root / "page.json"
    tokens, is_strange = None, False
    if page.exists():
        try:
            tokens = read_token_file(page)
        except ConfigError:
            # A copied folder may have the file of a run that was killed, in another mode.
            if not is_here:
                raise
            is_strange = True
    is_elsewhere = tokens is not None and tokens.host != socket.gethostname()
    found = "none" if tokens is None else _server_of(tokens)
    if tokens is not None and not is_here:
        if found == "unproven" or (is_elsewhere and found == "other"):
            whose = f"the page of {tokens.host}" if is_elsewhere else f"the page of process {tokens.pid}"
            raise ConfigError(
                f"found a server on 127.0.0.1:{tokens.port} that does not prove to be {whose}; expected the "
                f"proof by the token in {page}, as a link is a secret. Try again if the machine is busy, end "
                "the other server, or see the recording with --here"
            )
        if found == "own" or is_elsewhere:
            _print_link(tokens, args, is_reached=found == "own")
            return 0
    files = existing_recording(args.run)
    open_recording(args.run).close()  # a damaged file is told before anything listens

    def say(text: str) -> None:
        print(text, flush=True)

    options = ServeOptions(
        run=files.root.parent,
        port=args.port,
        token_file=args.token_file,
        # The other page may be a training's, which writes its tokens once.
        keeps_tokens=not (is_elsewhere or is_strange or found in ("own", "unproven")),
        says_control=args.control,
        compared=tuple(others),
        say=say,
    )

    async def until_ended() -> None:
        task = asyncio.ensure_future(served(recording_hub(files), options))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await task

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(until_ended())
        # It serves until it is cancelled: it has told why it does not.
        print("mt-megatron: the page is not served", file=sys.stderr)
        return 1
    return 0


def _print_link(tokens: TokenFile, args: argparse.Namespace, *, is_reached: bool) -> None:
    from mt_megatron.scope.web.access import link_to, write_secret

    link = link_to(tokens, controls=args.control)
    if not is_reached:
        print(f"the page is served on {tokens.host}; first: ssh -L {tokens.port}:127.0.0.1:{tokens.port} ...")
        print("if that run has ended: mt-megatron scope open RUN --here serves its recording on this machine")
    print(link, flush=True)
    if args.token_file is not None:
        write_secret(args.token_file, link + "\n")
    if args.control:
        print(f"control token: {tokens.control}", flush=True)


def _server_of(tokens: TokenFile) -> Literal["own", "none", "other", "unproven"]:
    """What listens on the port of ``tokens`` on this machine: their ``own`` server, which proves that it has
    the view token before it gets a secret; ``none``; an ``other`` process, as a killed run leaves its file;
    or the process that they name, ``unproven``: it does not answer, or wrongly."""
    from mt_megatron.host.peers import REQUEST_S, uid_of_peer
    from mt_megatron.scope.web.access import proof_of

    challenge = secrets.token_hex(32)
    link = http.client.HTTPConnection("127.0.0.1", tokens.port, timeout=REQUEST_S)
    with contextlib.closing(link), contextlib.suppress(OSError, http.client.HTTPException):
        try:
            link.connect()
        except ConnectionRefusedError:
            return "none"
        link.request("GET", f"/api/proof?challenge={challenge}")
        proof = proof_of(tokens.view, challenge).encode()
        end = link.sock
        if hmac.compare_digest(link.getresponse().read(len(proof)), proof) and (
            tokens.host == socket.gethostname()
            # The end of a tunnel is this user's: another user's server could pass the question on.
            or uid_of_peer(end.getpeername(), end.getsockname()) in (os.geteuid(), 0)
        ):
            return "own"
    return "unproven" if _listens(tokens) else "other"


def _listens(tokens: TokenFile) -> bool:
    """True where the process of ``tokens`` runs here and listens on their port."""
    import psutil

    try:
        process = psutil.Process(tokens.pid)
        ask = process.net_connections if hasattr(process, "net_connections") else process.connections
        found = ask(kind="tcp")
    except (psutil.Error, ValueError, TypeError):
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == tokens.port for each in found)
