"""Lines of an audit log, for tests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_audit(path: Path) -> list[Mapping[str, Any]]:
    """Lines of the file ``path`` and of the one put aside before it, oldest first; what is no JSON object is
    left out."""
    found: list[Mapping[str, Any]] = []
    for each in (path.with_name(path.name + ".1"), path):
        try:
            lines = each.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                found += [record] if isinstance(record, dict) else []
    return found
