"""Names of models on the Hugging Face Hub where a folder is expected."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def download_hint(given: str | Path) -> str:
    """What to do about ``given``, which is no folder, when it reads like a model of the Hub; else empty."""
    name = str(given)
    if not _NAME.fullmatch(name) or Path(name).parent.exists():
        return ""
    local = f"models/{name.split('/')[1]}"
    return (
        f"{name} looks like a name on the Hugging Face Hub, from which nothing is downloaded here: run "
        f"`hf download {name} --local-dir {local}` and give {local}."
    )
