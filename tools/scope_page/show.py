"""Serve the page on the synthetic recording: ``python -m tools.scope_page.show [--live] [--port N]``."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mt_megatron.scope.web.access import Access
from mt_megatron.scope.web.app import Site
from mt_megatron.scope.web.assets import assets
from mt_megatron.scope.web.audit import Audit
from mt_megatron.scope.web.server import Page
from mt_megatron.scope.web.views.context import Context

from .synthetic import SyntheticLive, SyntheticSource


def main() -> None:
    """Run until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", action="store_true", help="grow by a step every half second")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--long", type=int, default=8_192, help="tokens of the longest attention")
    parser.add_argument("--run", type=Path, help="folder whose trace the timeline shows")
    parser.add_argument("--audit", type=Path)
    parser.add_argument("--view", help="view token, for tests")
    parser.add_argument("--control", help="control token, for tests")
    chosen = parser.parse_args()
    source = SyntheticSource(long=chosen.long, live=chosen.live)
    live = SyntheticLive(source) if chosen.live else None
    other = SyntheticSource(name="llama3_tiny_b", seed=8, last=900)
    site = Site(
        context=Context(source=source, folder=chosen.run),
        access=Access(view=chosen.view, control=chosen.control),
        audit=Audit(chosen.audit),
        files=assets(),
        live=live,
        neighbours=lambda: {other.name: lambda: Context(source=other)},
    )
    page = Page(site, port=chosen.port)
    print(page.line("RUN"))
    print("control token:", site.access.control)
    print(page.url(), flush=True)
    asyncio.run(_run(page, live))


async def _run(page: Page, live: SyntheticLive | None) -> None:
    growing = asyncio.create_task(_grow(live)) if live is not None else None
    try:
        await page.run()
    finally:
        if growing is not None:
            growing.cancel()


async def _grow(live: SyntheticLive) -> None:
    while True:
        await asyncio.sleep(0.5)
        if not live.paused:
            live.source.advance()
            event: Mapping[str, Any] = {"k": "step", "i": live.source.last}
            live.publish(event)


if __name__ == "__main__":
    main()
