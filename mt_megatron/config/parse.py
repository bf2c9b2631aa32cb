"""``load_config``: a preset, then one YAML file with sections, then flags with Megatron's names.

Errors name the line of the YAML file that a key stands in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from mt_megatron.config import presets
from mt_megatron.config.megatron_lm_arguments import ALIASES, ELSEWHERE, REFUSED, RENAMED, SET, Alias
from mt_megatron.config.resolve import assemble
from mt_megatron.config.schema import TrainingConfig
from mt_megatron.config.types import (
    NOT_SETTABLE,
    SECTIONS,
    Option,
    convert,
    members,
    options,
    shown,
    type_text,
)
from mt_megatron.errors import ConfigError
from mt_megatron.near_names import hint, near

_SHOWN = 60
_OCTAL = re.compile(r"[-+]?0[0-7_]+")

Written = str | tuple[str | None, ...] | None
"""A scalar as it stands in a file, or those of a list; None for anything else."""


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

    written: Written = None
    """Text that ``value`` was read from."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Builds plain values only; its nodes, unlike its dictionaries, keep lines and duplicates. No option is a
    date: what looks like one stays text."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_scalar)


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
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            return [] if root is None else _entries(loader, root, path)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # Not YAMLError alone: a number may have too many digits, and a million brackets are a nest.
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
                    written=_written(value),
                )
            )
    return entries


def _written(node: yaml.Node) -> Written:
    if isinstance(node, yaml.SequenceNode):
        return tuple(each.value if isinstance(each, yaml.ScalarNode) else None for each in node.value)
    return str(node.value) if isinstance(node, yaml.ScalarNode) else None


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


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A number of samples where the option itself is a number of steps."""

    count: int
    where: str
    """How it was written, for messages."""


def divide_samples(values: dict[str, Any], problems: list[str]) -> list[str]:
    """Put steps in the place of every ``Samples`` in ``values``. As in Megatron-LM, the steps of the run are
    rounded down and the schedule of the learning rate is not: it ends within a step.

    Returns a line about each for the log; what cannot be divided goes to ``problems``.
    """
    notes = []
    for name, given in list(values.items()):
        if not isinstance(given, Samples):
            continue
        option = options()[name]
        values[name] = option.default
        batch = values.get("global_batch_size", options()["global_batch_size"].default)
        if values.get("rampup_batch_size") is not None:
            problems.append(
                f"{given.where} counts samples, which --rampup-batch-size takes in steps of changing size; "
                f"expected {option.flag}."
            )
        elif not isinstance(batch, int) or batch < 1 or (name == "train_iters" and given.count < batch):
            problems.append(
                f"{given.where} is {given.count}; expected at least one global batch of {batch} samples. "
                "Change it or --global-batch-size."
            )
        else:
            exact = given.count / batch if given.count % batch else given.count // batch
            values[name] = given.count // batch if name == "train_iters" else exact
            if name == "train_iters" and values.get("lr_decay_iters") is None:
                values["lr_decay_iters"] = exact if given.count % batch else None
            notes.append(
                f"{given.where} {given.count}: {option.flag} {values[name]}, as a step takes {batch} samples"
            )
    return notes


def _fit_warmup(values: dict[str, Any], file: Mapping[str, Any], flags: Mapping[str, Any]) -> list[str]:
    """Make a warm-up that comes from a file fit what was typed: typed as a share, it replaces the file's
    steps; where the typed schedule is not longer than it, it keeps its share of the file's schedule. Returns
    a line about it for the log."""
    # Of samples the steps are in ``values``, divided.
    steps, share = file.get("lr_warmup_iters") and values.get("lr_warmup_iters"), "lr_warmup_fraction"
    if "lr_warmup_iters" in flags or steps is None:
        return []
    if flags.get(share) is not None:
        values["lr_warmup_iters"] = None
        return [
            f"lr_warmup_iters {steps} of the file is not used: --lr-warmup-fraction {flags[share]} is given"
        ]
    before, now = (each.get("lr_decay_iters") or each.get("train_iters") for each in (file, values))
    if not (isinstance(steps, int) and isinstance(before, int | float) and isinstance(now, int | float)):
        return []
    if not 0 < now <= steps < before:
        return []
    values["lr_warmup_iters"] = int(steps * now // before)
    return [
        f"lr_warmup_iters {steps} -> {values['lr_warmup_iters']}: its share of the file's {before} "
        f"steps, as this run's schedule has {now:g} steps; --lr-warmup-iters sets it"
    ]


def load_config(
    argv: Sequence[str], yaml_path: str | Path | None = None, *, published: Mapping[str, Any] | None = None
) -> TrainingConfig:
    """The configuration that ``argv`` and the YAML file describe; later ones win: ``published`` options of a
    model, preset, YAML, flags.

    ``argv`` holds options only (``--num-layers 4``, ``--num-layers=4``, ``--bf16``, ``--no-bf16``),
    by Megatron-Core's field names or Megatron-LM 0.9's argument names. One ``--config FILE`` in ``argv``
    names the YAML file when ``yaml_path`` does not. No check of how values fit together is made:
    call ``mt_megatron.training.validate.validate`` for that. Imports neither torch nor megatron.

    Raises ``ConfigError`` naming every unknown, refused or badly typed option at once.
    """
    words = _split_flags(argv)
    config_words = [word for word in words if word.name == "config"]
    if config_words and yaml_path is not None:
        raise ConfigError(f"--config is given and so is the file {yaml_path}. Keep one of them.")
    reader = _Reader()
    if len(config_words) > 1:
        files = ", ".join(" ".join(word.given) or "nothing" for word in config_words)
        raise ConfigError(
            f"--config is given {len(config_words)} times ({files}); expected one file. Put what they say "
            "into one, or give options of the others as flags."
        )
    for word in config_words:
        yaml_path = reader.one_value(word)
    entries = read_yaml(Path(yaml_path)) if yaml_path is not None else []
    from_yaml = _Reader(problems=reader.problems)
    for entry in entries:
        from_yaml.take_entry(entry)
    from_flags = _Reader(problems=reader.problems)
    for word in words:
        if word.name != "config":
            from_flags.take_word(word)
    preset = from_flags.values.get("preset", from_yaml.values.get("preset"))
    from_preset = _Reader(problems=reader.problems)
    if preset is not None:
        for entry in read_yaml(presets.path(preset)):
            from_preset.take_entry(entry)
    aliases = from_preset.aliases + from_yaml.aliases + from_flags.aliases
    values = {**(published or {}), **from_preset.values, **from_yaml.values, **from_flags.values}
    # Last of all: what the preset or the file says goes before what a flag makes likely, which it does as
    # long as nobody takes back what it sets.
    for alias in aliases:
        if all(values.get(name) == value for name, value in alias.sets.items()):
            values = {**alias.presumes, **values}
    counted = divide_samples(values, reader.problems)
    counted += _fit_warmup(values, {**from_preset.values, **from_yaml.values}, from_flags.values)
    reader.problems.extend(_unmet(aliases, values))
    if reader.problems:
        raise ConfigError("\n".join(reader.problems))
    notes = tuple(dict.fromkeys(f"--{alias.name}: {alias.note}" for alias in aliases if alias.note))
    return assemble(values, (*notes, *counted))


def option_help(word: str | None = None) -> str:
    """Every option with its section, type, default and meaning, as text for a terminal; with ``word`` those
    whose section, name or meaning has it. Raises ``ConfigError`` where none has."""
    wanted = (word or "").lower().lstrip("-")
    lines = []
    for section in SECTIONS:
        shown = []
        for option in options().values():
            text = f"{option.section} {option.flag} {option.name} {option.doc}"
            if option.section == section and wanted in text.lower():
                switch = f" | --no-{option.flag[2:]}" if option.is_bool else ""
                shown.append(f"  {option.flag}{switch}  ({type_text(option.type)}; default {option.default})")
                shown.append(f"      {option.doc}")
        lines += [f"{section}:", *shown] if shown else []
    if aliases := [f"--{name}" for name in ALIASES if wanted in name]:
        lines.append("Megatron-LM's own names that are understood as well:")
        lines.append("  " + " ".join(aliases))
    if not lines:
        dashed = wanted.replace("_", "-")
        raise ConfigError(f"--list-options {word}: {_unknown(f'with {word!r}', dashed)}")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class _Word:
    name: str
    typed: str
    inline: str | None
    values: tuple[str, ...]

    @property
    def given(self) -> list[str]:
        return ([] if self.inline is None else [self.inline]) + list(self.values)


def _split_flags(argv: Sequence[str]) -> list[_Word]:
    words: list[_Word] = []
    rest = list(argv)
    while rest:
        typed = rest.pop(0)
        if not typed.startswith("--") or typed == "--":
            raise ConfigError(
                f"found {typed!r} where an option was expected. Options start with --; a value comes right "
                "after its option, and switches such as --bf16 take none."
            )
        name, equals, inline = typed[2:].partition("=")
        values = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        words.append(
            _Word(
                name=name.replace("_", "-") if name not in REFUSED else name,
                typed="--" + name,
                inline=inline if equals else None,
                values=tuple(values),
            )
        )
    return words


@dataclass(kw_only=True)
class _Reader:
    """Turns words and YAML entries into values by option name, and collects what is wrong."""

    problems: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    aliases: list[Alias] = field(default_factory=list)

    def take_word(self, word: _Word) -> None:
        name = word.name.replace("-", "_")
        known = options()
        if name in known:
            self._set_from_word(known[name], word)
        elif name.startswith("no_") and name[3:] in known and known[name[3:]].is_bool:
            if word.given:
                self.problems.append(f"{word.typed} takes no value; found {word.given[0]!r}. Remove it.")
            self.values[name[3:]] = False
        elif word.name in ALIASES:
            self._take_alias_word(ALIASES[word.name], word)
        else:
            self.problems.append(_unknown(word.typed, word.name))

    def take_entry(self, entry: YamlEntry) -> None:
        if entry.section not in SECTIONS:
            self.problems.append(
                f"{entry.where}: there is no section {entry.section!r}; expected one of "
                f"{', '.join(SECTIONS)}." + hint(entry.section, list(SECTIONS), "")
            )
            return
        name, dashed = entry.name.replace("-", "_"), entry.name.replace("_", "-")
        known = options()
        if name in known:
            option = known[name]
            if option.section != entry.section:
                self.problems.append(
                    f"{entry.where}: {entry.name} belongs to the section {option.section!r}; found it in "
                    f"{entry.section!r}. Move it there."
                )
            else:
                self._convert(option, entry.value, entry.where, entry.written)
        elif dashed in ALIASES:
            self._take_alias_entry(ALIASES[dashed], entry)
        else:
            self.problems.append(_unknown(f"{entry.where}: {entry.name}", dashed, entry.section))

    def one_value(self, word: _Word) -> str | None:
        """The single value of ``word``; None, and a problem, when there is none or several."""
        if len(word.given) == 1:
            return word.given[0]
        found = "none" if not word.given else " ".join(word.given)
        self.problems.append(f"{word.typed} takes one value; found {found}.")
        return None

    def _set_from_word(self, option: Option, word: _Word) -> None:
        if option.is_bool:
            if word.values:
                self.problems.append(
                    f"{word.typed} takes no value; found {word.values[0]!r}. Write {option.flag}, "
                    f"--no-{option.flag[2:]} or {option.flag}=true."
                )
            else:
                self._convert(option, True if word.inline is None else word.inline, word.typed)
        elif option.is_list:
            # One value is passed bare, because it may be `none`.
            self._convert(option, word.given[0] if len(word.given) == 1 else word.given, word.typed)
        else:
            value = self.one_value(word)
            if value is not None:
                self._convert(option, value, word.typed)

    def _take_alias_word(self, alias: Alias, word: _Word) -> None:
        if alias.to is None and not alias.takes_value:
            if word.given:
                self.problems.append(f"{word.typed} takes no value; found {word.given[0]!r}. Remove it.")
            self._use(alias, None, word.typed)
            return
        value = self.one_value(word)
        if value is not None:
            self._use(alias, value, word.typed)

    def _take_alias_entry(self, alias: Alias, entry: YamlEntry) -> None:
        if alias.to is None and not alias.takes_value and entry.value is not True:
            self.problems.append(
                f"{entry.where}: {entry.name} is a switch of Megatron-LM; found {shown(entry.value)}, "
                "expected true. To say the opposite, set the field itself: "
                + (", ".join(alias.sets) or "leave the line out")
                + "."
            )
            return
        self._use(alias, entry.value, entry.where, entry.written)

    def _use(self, alias: Alias, value: Any, where: str, written: Written = None) -> None:
        known = options()
        self.aliases.append(alias)
        if alias.to is not None:
            # Megatron-LM's spelling of "no experts".
            none = alias.to == "num_moe_experts" and value in ("0", 0)
            self._convert(known[alias.to], "none" if none else value, where, written)
            if alias.in_samples and isinstance(self.values.get(alias.to), int):
                self.values[alias.to] = Samples(count=self.values[alias.to], where=where)
        elif alias.takes_value and (isinstance(value, list | dict) or str(value) not in alias.values):
            self.problems.append(
                f"{where}: {alias.name} is {shown(value)}; expected {' or '.join(alias.values)}: "
                f"{alias.otherwise}."
            )
        else:
            self.values |= alias.sets

    def _convert(self, option: Option, value: object, where: str, written: Written = None) -> None:
        try:
            if isinstance(value, list) and isinstance(written, tuple):
                pairs = zip(value, written, strict=False)
                value = [_as_written(option, each, text, where) for each, text in pairs]
            elif isinstance(written, str):
                value = _as_written(option, value, written, where)
            self.values[option.name] = convert(option, value, where)
        except ConfigError as error:
            self.problems.append(str(error))


def _as_written(option: Option, value: object, written: str | None, where: str) -> object:
    """A scalar of a YAML file without the surprises of YAML 1.1: a text has the file's characters, as 1.10
    is another name than 1.1, and a number is decimal. Raises ``ConfigError``."""
    if written is None or not isinstance(value, int | float):
        return value
    if _is_text(option):
        if isinstance(value, bool):
            raise ConfigError(
                f"{where}: {option.name} is {value}; expected text. YAML reads {written} so: put it in "
                "quotes if it is the text."
            )
        return written
    is_octal = _OCTAL.fullmatch(written) is not None and not -8 < value < 8
    if len(written) < _SHOWN and (is_octal or ":" in written):
        base = 8 if is_octal else 60
        raise ConfigError(
            f"{where}: {option.name} is {written}, which YAML reads as {value}, in base {base}; "
            f"expected {type_text(option.type)} in base 10. Write {value} if that is meant."
        )
    return value


def _is_text(option: Option) -> bool:
    kinds = members(option.type)
    return all((get_args(kind)[0] if get_origin(kind) is tuple else kind) is str for kind in kinds)


def _unmet(aliases: Sequence[Alias], values: dict[str, Any]) -> list[str]:
    problems = []
    for alias in aliases:
        if alias.needs is None:
            continue
        name, expected = alias.needs
        option = options()[name]
        found = values.get(name, option.default)
        if expected is SET and found is None:
            problems.append(f"--{alias.name} is given without {option.flag}; give both.")
        elif expected is not SET and found != expected:
            problems.append(
                f"--{alias.name} is only true with {name} = {expected}; found {found}. Leave "
                f"--{alias.name} out or change {option.flag}."
            )
    return problems


def check_names(argv: Sequence[str], more: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a word in ``argv`` that belongs to no option, and for an option that no
    configuration has and that is nearest to one of ``more``, the other options (without dashes) of the
    command that was typed."""
    _split_flags(argv)
    for word in argv:
        dashed = word[2:].partition("=")[0]
        name = dashed.replace("-", "_")
        if not word.startswith("--") or not dashed or name in options() or dashed in ALIASES:
            continue
        if dashed in {*REFUSED, *RENAMED, *ELSEWHERE} or name in NOT_SETTABLE or name.startswith("no_"):
            continue
        known = [*more, *ALIASES, *(option.flag[2:] for option in options().values()), "config"]
        if near(dashed, known)[:1] and near(dashed, known)[0] in more:
            raise ConfigError(f"there is no option --{dashed}.{hint(dashed, known, '--')}")


def _unknown(shown: str, dashed: str, section: str | None = None) -> str:
    name = dashed.replace("-", "_")
    refused = REFUSED.get(dashed) or next(
        (reason for key, reason in REFUSED.items() if key.replace("_", "-") == dashed), None
    )
    if refused is not None:
        return f"{shown} is an argument of Megatron-LM 0.9 that is refused: {refused}."
    if dashed in RENAMED:
        return f"{shown} is an argument of MT-MegatronLM: {RENAMED[dashed]}."
    if dashed in ELSEWHERE:
        return f"there is no option {shown}: {ELSEWHERE[dashed]}."
    if name in NOT_SETTABLE:
        return f"{shown} is a field of Megatron-Core that cannot be set: {NOT_SETTABLE[name]}."
    candidates = list(ALIASES)
    for option in options().values():
        candidates.append(option.flag[2:])
        if option.is_bool and section is None:
            candidates.append("no-" + option.flag[2:])
    if section is None:
        candidates.append("config")
        return f"there is no option {shown}." + hint(dashed, candidates, "--")
    return f"{shown} is unknown." + hint(name, [each.replace("-", "_") for each in candidates], "")
