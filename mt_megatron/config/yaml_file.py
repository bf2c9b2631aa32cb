"""One YAML file with sections, and the line of every key, so that an error can point at it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mt_megatron.config.types import SECTIONS, options, shown
from mt_megatron.errors import ConfigError

_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class YamlEntry:
    """One key of one section."""

    section: str
    """The section's name as written."""

    name: str
    """The key as written."""

    value: Any
    """The value as YAML reads it: text, number, true or false, list, None."""

    where: str
    """``file:line``, for errors."""


def read_yaml(path: Path) -> list[YamlEntry]:
    """Every entry of the file, in order. Raises ``ConfigError`` for anything but sections of keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read: not UTF-8 (byte {error.start}). Expected YAML in "
            "UTF-8; give another --config."
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read: {error}. Check its path."
        ) from error
    try:
        # It builds plain values only; its nodes, unlike its dictionaries, keep lines and duplicates.
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            return [] if root is None else _entries(loader, root, path)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # Not YAMLError alone: 2024-13-45 is taken for a date, and a million brackets for a nest.
        raise ConfigError(_invalid(path, text, error)) from error


def _invalid(path: Path, text: str, error: Exception) -> str:
    """Where libyaml stopped, what it says, and the line itself."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        at = error.problem_mark
        # libyaml notices some things at the end of the file only.
        lines = [line.strip() for line in text.splitlines()[: at.line + 1] if line.strip()]
        near = f" Correct the line {lines[-1][:_SHOWN]!r} or the one before it." if lines else ""
        what = f"{error.problem}{f' {error.context}' if error.context else ''}"
        return f"{path}:{at.line + 1} is no valid YAML at column {at.column + 1}: {what}.{near}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"{path} is no valid YAML: character {error.position} is {error.character!r:.20}, no text."
    return f"{path} is no valid YAML: {' '.join(str(error).split())}. Correct the file."


def _entries(loader: yaml.SafeLoader, root: yaml.Node, path: Path) -> list[YamlEntry]:
    entries = []
    for section_node, body in _pairs(loader, root, path, "sections such as `model:`"):
        section = str(section_node.value)
        if isinstance(body, yaml.ScalarNode) and loader.construct_object(body) is None:
            continue
        if section not in SECTIONS and not isinstance(body, yaml.MappingNode):
            raise ConfigError(_not_a_section(section, _where(path, section_node)))
        for key, value in _pairs(loader, body, path, f"`name: value` lines under `{section}:`"):
            entries.append(
                YamlEntry(
                    section=section,
                    name=str(key.value),
                    value=loader.construct_object(value, deep=True),
                    where=_where(path, key),
                )
            )
    return entries


def _pairs(
    loader: yaml.SafeLoader, node: yaml.Node, path: Path, expected: str
) -> list[tuple[yaml.Node, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        found = shown(loader.construct_object(node, deep=True))
        raise ConfigError(f"{_where(path, node)}: found {found}; expected {expected}.")
    seen: dict[str, yaml.Node] = {}
    for key, _ in node.value:
        name = str(key.value)
        if name in seen:
            raise ConfigError(
                f"{_where(path, key)}: {name} is written twice; it was already at line "
                f"{seen[name].start_mark.line + 1}. Keep one of them."
            )
        seen[name] = key
    # After the search for duplicates: a key may override one that came in by `<<`.
    loader.flatten_mapping(node)
    pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
    return pairs


def _where(path: Path, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def _not_a_section(name: str, where: str) -> str:
    option = options().get(name.replace("-", "_"))
    if option is None:
        return f"{where}: there is no section {name!r}; expected one of {', '.join(SECTIONS)}."
    return (
        f"{where}: {name} stands outside of any section; expected it in {option.section!r}. Indent it under "
        f"`{option.section}:`."
    )
