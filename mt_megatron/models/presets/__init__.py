"""Published model shapes and their defaults, one YAML file each; see ``names()``."""

from __future__ import annotations

import difflib
from pathlib import Path

from mt_megatron.errors import ConfigError

_ALIASES = {"llama3_405b": "llama3.1_405b"}


def names() -> list[str]:
    """Every preset's name, sorted; aliases are left out."""
    return sorted(each.stem for each in Path(__file__).parent.glob("*.yaml"))


def path(name: str) -> Path:
    """The YAML file of the preset ``name``. Raises ``ConfigError`` for an unknown one."""
    known = names()
    actual = _ALIASES.get(name, name)
    if actual in known:
        return Path(__file__).parent / f"{actual}.yaml"
    close = difflib.get_close_matches(name, [*known, *_ALIASES], n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(f"there is no model preset {name!r}; expected one of {', '.join(known)}.{hint}")
