"""Published model shapes and their defaults, one YAML file each; see ``names()``."""

from __future__ import annotations

import re
from pathlib import Path

from mt_megatron.errors import ConfigError
from mt_megatron.near_names import near

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
    # Another number is another model, not a slip.
    alike = [each for each in (*known, *_ALIASES) if _digits(each) == _digits(name)]
    close = near(name, alike)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"there is no model preset {name!r}.{hint} mt-megatron pretrain --list-models names all of them. For "
        "a downloaded model: mt-megatron convert --from-hf FOLDER --to-config model.yaml, then --config "
        "model.yaml."
    )


def listing() -> str:
    """Every preset with what its file says first, a line each."""
    known = names()
    width = max(map(len, known))
    return "\n".join(f"{name:<{width}}  {_about(path(name))}" for name in known)


def _about(file: Path) -> str:
    comment = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    # The first sentence, without what is in brackets.
    text = re.sub(r" \([^)]*\)", "", " ".join(comment))
    return re.split(r"\.\s|; ", text, maxsplit=1)[0].rstrip(".")


def _digits(name: str) -> str:
    return "".join(each for each in name if each.isdigit())
