"""Write ``mt_megatron/convert/hf/class_fields.json`` from the installed transformers.

python tools/class_fields.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

from mt_megatron.convert.hf.class_fields import TABLE, scan
from mt_megatron.convert.hf.config import ARCHITECTURES


def table() -> str:
    """The file's text."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise SystemExit("transformers is not installed; expected it: pip install transformers")
    fields = {name: scan(Path(spec.origin).parent, name) for name in ARCHITECTURES}
    version = importlib.metadata.version("transformers")
    return json.dumps({"transformers": version, "fields": fields}, indent=1) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
