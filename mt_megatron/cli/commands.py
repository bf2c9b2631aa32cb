"""The subcommands, grouped as ``mt-megatron --help`` shows them; their modules are not imported for it."""

from __future__ import annotations

GROUPS: dict[str, dict[str, str]] = {
    "start": {
        "doctor": "what this machine has, what would run and what would not",
        "prepare": "make training data from text",
        "preprocess": "turn text, JSONL or Parquet into indexed data files",
        "plan": "parameters, operations and memory of a run; layouts that fit a machine",
        "pipeline": "schedules of a pipeline, simulated: step, bubble, memory, links",
    },
    "train": {
        "pretrain": "train a model",
        "launch": "start training on this machine, or print what a scheduler needs to start it on many",
        "run": "run a script that uses Megatron-Core, unchanged, on another device",
    },
    "look": {
        "scan": "traces of runs: what every rank did, on one clock, and who held the others up",
        "scope": "recordings of runs: what happened inside the model, live and afterwards",
        "diverge": "find the first module that differs between two backends, layouts or dtypes",
        "fp8": "recipes, and which layers of a run compute in them",
    },
    "take along": {
        "convert": "weights from and to Hugging Face",
    },
    "internals": {
        "patches": "list, explain and check the patches; changes nothing",
    },
}
"""Group -> subcommand -> one line about it."""

NEXT: dict[str, str] = {
    "doctor": "mt-megatron prepare --output data; where there is a problem, what its line says",
    "prepare": "mt-megatron pretrain --train-data-path DIR/train --valid-data-path DIR/valid "
    "--tokenizer-model DIR/tokenizer.json (DIR where --tokenizer named a folder)",
    "preprocess": "mt-megatron pretrain --data-path PREFIX_text_document --tokenizer-model tokenizer.json",
    "plan": "mt-megatron launch with the options of the layout you chose",
    "pipeline": "mt-megatron pretrain --pipeline-schedule NAME or FILE.csv",
    "pretrain": "the same command resumes; mt-megatron convert --from-megatron SAVE --to-hf FOLDER; "
    "mt-megatron scan report SAVE/scan",
    "launch": "the same command resumes; mt-megatron scan status RUN while it trains",
    "run": "mt-megatron patches list shows what was changed for the script",
    "scan": "mt-megatron scan status RUN while a run trains, scan report RUN afterwards",
    "scope": "mt-megatron scope status RUN while a run trains, scope open RUN for the page, scope report RUN",
    "diverge": "read OUTPUT/report.md; the first module that differs is where to look",
    "fp8": "mt-megatron pretrain --fp8-recipe NAME --fp8-telemetry-interval 100",
    "convert": "AutoModelForCausalLM.from_pretrained(FOLDER), or mt-megatron pretrain --load DIR",
    "patches": "mt-megatron patches explain ID; mt-megatron patches check after an update",
}
"""Subcommand -> what to do after it, the last line of its ``--help``."""

COMMANDS = tuple(name for group in GROUPS.values() for name in group)
"""Subcommands, in the order of ``--help``."""

_IN_FOLDERS = {
    "doctor": "doctor.command",
    "scan": "scan.command",
    "scope": "scope.command",
    "pipeline": "pipeline.command",
}


def module_of(command: str) -> str:
    """The module of a subcommand: a file of this package, or ``command`` in a folder of it."""
    return f"mt_megatron.cli.{_IN_FOLDERS.get(command, command)}"


def listing() -> str:
    """The groups as text for a terminal."""
    lines = []
    for group, members in GROUPS.items():
        lines += [f"{group}:", *(f"    {name:<12}{about}" for name, about in members.items())]
    return "\n".join(lines)
