"""Which names can be set, in which section, as which type; and text to typed values."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mt_megatron.config.schema import (
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from mt_megatron.config.upstream_fields import (
    DDP,
    OPTIMIZER,
    TRANSFORMER,
    CoreField,
    core_fields,
    docstring_after,
)
from mt_megatron.config.watching import ScanConfig, ScopeConfig
from mt_megatron.errors import ConfigError
from mt_megatron.layers.transformer_fields import FIELDS, LOAD_BALANCING, AddedField
from mt_megatron.near_names import hint

_COUNTS = re.compile(r"\[?\s*\d+(\s*,\s*\d+)*\s*\]?")
_LONGEST = 100_000


def layer_kinds(value: object) -> object:
    """``moe_layer_freq`` as a number or a list: texts of Megatron-LM's, which it evaluates, are read here.

    Understood are whole numbers, lists of them, ``+`` between lists and ``*`` with a number; anything
    else stays as it is, for the conversion to complain of.
    """
    if not isinstance(value, str):
        return value
    try:
        found = _value(ast.parse(value.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return value
    return found


def layer_counts(value: object) -> object:
    """``pipeline_model_parallel_layout``: numbers separated by commas as a list, other texts as they are."""
    if isinstance(value, str) and _COUNTS.fullmatch(value.strip()):
        return [int(number) for number in re.findall(r"\d+", value)]
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return value


def _value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_number(_value(element)) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _short([*_list(_value(node.left)), *_list(_value(node.right))])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _value(node.left), _value(node.right)
        entries, times = (left, right) if isinstance(left, list) else (right, left)
        if len(_list(entries)) * _number(times) > _LONGEST:
            raise ValueError("too long")
        return _list(entries) * _number(times)
    raise ValueError("neither a number nor a list")


def _short(entries: list[int]) -> list[int]:
    if len(entries) > _LONGEST:
        raise ValueError("too long")
    return entries


def _list(value: int | list[int]) -> list[int]:
    if not isinstance(value, list):
        raise ValueError("a list is expected")
    return value


def _number(value: int | list[int]) -> int:
    if isinstance(value, list):
        raise ValueError("a number is expected")
    return value


SECTIONS: Mapping[str, type | None] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "train": TrainConfig,
    "optimizer": None,
    "ddp": None,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "launch": LaunchConfig,
    "scan": ScanConfig,
    "scope": ScopeConfig,
}
"""Section -> our dataclass, in printing order. None: the section holds Megatron-Core's fields alone."""

_CORE_SECTIONS = {"model": TRANSFORMER, "optimizer": OPTIMIZER, "ddp": DDP}

DTYPES = Literal["float32", "float16", "bfloat16"]

CHOICES: Mapping[str, Any] = {
    "normalization": Literal["LayerNorm", "RMSNorm"],
    "activation_func": Literal["gelu", "silu", "relu", "squared_relu"],
    "init_method": Literal["normal", "xavier_uniform"],
    "output_layer_init_method": Literal["scaled_normal", "normal", "xavier_uniform"],
    "recompute_granularity": Literal["full", "selective"],
    "recompute_method": Literal["uniform", "block"],
    "fp8": Literal["e4m3", "hybrid"],
    "fp8_amax_compute_algo": Literal["most_recent", "max"],
    "moe_router_load_balancing_type": Literal[LOAD_BALANCING],
    "moe_token_dispatcher_type": Literal["allgather", "alltoall", "alltoall_seq"],
    "moe_token_drop_policy": Literal["probs", "position"],
    "optimizer": Literal["adam", "sgd"],
}
"""Core fields whose upstream annotation is wider than what upstream accepts, or is a callable."""

_DEFAULTS_TO = re.compile(r"\s*(Defaults? to|The default is) [^.]*\.")

CORRECTED: Mapping[str, str] = {
    "gradient_accumulation_fusion": "Whether the product that computes a weight's gradient adds it to "
    "``main_grad``. It needs no extra package here.",
    "fp8": "Names a recipe by its format: e4m3 for all tensors, or hybrid with e5m2 for outputs' gradients. "
    "It needs no Transformer Engine here; ``fp8_recipe`` names more recipes.",
    "moe_grouped_gemm": "Whether a layer's local experts are computed by one grouped product. It needs no "
    "extra package here. None: where the model has experts.",
    "use_cpu_initialization": "Whether weights are drawn on the host, which gives the same ones for every "
    "tensor-parallel size, and takes longer.",
}
"""Meanings that Megatron-Core's own texts state otherwise: name -> text."""

DEFAULTS: Mapping[str, Any] = {
    "init_method": "normal",
    "output_layer_init_method": "scaled_normal",
    "min_lr": 0.0,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "check_for_nan_in_grad": True,
    "deallocate_pipeline_outputs": True,
    "gradient_accumulation_fusion": True,
    "cross_entropy_loss_fusion": True,
    "grad_reduce_in_fp32": None,
    "overlap_p2p_comm": None,
    "bias_activation_fusion": None,
    "moe_grouped_gemm": None,
}
"""Core fields with another default here. The first two name what None means upstream; min_lr and the
two after the optimizer's are what Megatron-LM 0.9's own arguments default to; adam_beta2 and weight_decay
are what language models are trained with (GPT-3, Llama); both fusions
save passes over memory and need no extension here. The last four are decided by others: gradients are
reduced in fp32 under bf16, p2p overlaps under the interleaved schedule, SwiGLU is fused, experts are
grouped, unless set."""

NOT_SETTABLE: Mapping[str, str] = {
    "params_dtype": "it follows from train.bf16 and train.fp16",
    "pipeline_dtype": "it follows from train.bf16 and train.fp16",
    "batch_p2p_comm": "it is the opposite of overlap_p2p_comm",
    "timers": "it is a Python object that the trainer sets",
    "barrier_with_L1_time": "the trainer has no Megatron timers",
    "finalize_model_grads_func": "it is a Python function that the trainer sets",
    "grad_scale_func": "it is a Python function that the trainer sets",
    "no_sync_func": "it is a Python function that the trainer sets",
    "grad_sync_func": "it is a Python function that the trainer sets",
    "param_sync_func": "it is a Python function that the trainer sets",
    "async_tensor_model_parallel_allreduce": "megatron-core 0.9.0 ignores it",
    "fp8_interval": "megatron-core 0.9.0 ignores it",
    "moe_token_dropping": "megatron-core 0.9.0 does not support it; set moe_expert_capacity_factor",
    "pipeline_model_parallel_split_rank": "it is for encoder-decoder models, which have no family here",
    "test_mode": "nothing in megatron-core 0.9.0 reads it",
}
"""Core fields that exist and cannot be set from a configuration, and why."""

PARSERS: Mapping[str, Callable[[object], object]] = {
    "moe_layer_freq": layer_kinds,
    "pipeline_model_parallel_layout": layer_counts,
}
"""Options that can be written as a text of their own: what makes numbers of it."""

_ANNOTATIONS: Mapping[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "Optional[int]": int | None,
    "Optional[float]": float | None,
    "Optional[Tuple[int, int]]": tuple[int, int] | None,
    "torch.dtype": DTYPES,
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One settable name: what a YAML key and a flag refer to."""

    name: str
    """The field's name; the flag is ``--`` and the name with dashes."""

    section: str
    """The one section it lives in."""

    type: Any
    """The Python type its value is converted to."""

    default: Any
    """The value when nobody sets it."""

    core: bool
    """Whether it is Megatron-Core's field rather than ours."""

    described: str | type
    """Meaning on one line; or the dataclass of ours whose source has it."""

    @property
    def doc(self) -> str:
        """Meaning on one line. Help alone asks for it, so other commands do not read our source."""
        if isinstance(self.described, str):
            # The default that upstream's text ends with may be another one here, and is printed anyway.
            return CORRECTED.get(self.name, _DEFAULTS_TO.sub("", self.described).strip())
        return _field_docs(self.described).get(self.name, "")

    @property
    def flag(self) -> str:
        """The option as typed on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        """Whether the flag takes no value and has a ``--no-`` form."""
        return bool in members(self.type)

    @property
    def is_list(self) -> bool:
        """Whether the flag takes several values."""
        return any(get_origin(member) is tuple for member in members(self.type))


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of ``A | B``, without None; ``(A,)`` for a plain type."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for member in get_args(annotation) if member is not type(None))
    return (annotation,)


def options() -> dict[str, Option]:
    """Every settable name, in the order of the sections. Raises ``ConfigError`` without megatron-core."""
    return dict(_options())


@cache
def _options() -> dict[str, Option]:
    found: dict[str, Option] = {}
    for section, owner in SECTIONS.items():
        if owner is not None:
            found.update((option.name, option) for option in _ours(section, owner))
    for section, which in _CORE_SECTIONS.items():
        for core in core_fields(which).values():
            if core.name not in found and core.name not in NOT_SETTABLE:
                found[core.name] = _core_option(section, core)
        if which == TRANSFORMER:
            found |= {each.name: _added_option(section, each) for each in FIELDS if each.name not in found}
    order = list(SECTIONS)
    return dict(sorted(found.items(), key=lambda item: order.index(item[1].section)))


def _ours(section: str, owner: type) -> list[Option]:
    hints = get_type_hints(owner)
    return [
        Option(
            name=field.name,
            section=section,
            type=hints[field.name],
            default=field.default,
            core=False,
            described=owner,
        )
        for field in dataclasses.fields(owner)
        if field.name != "core"
    ]


@cache
def _field_docs(owner: type) -> dict[str, str]:
    # Python drops the text under a field, so it is read from our own source like upstream's.
    (node,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(node, ast.ClassDef)
    return {
        statement.target.id: docstring_after(node.body, index)
        for index, statement in enumerate(node.body)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _core_option(section: str, core: CoreField) -> Option:
    default = DEFAULTS.get(core.name, core.default)
    annotation = CHOICES.get(core.name, _ANNOTATIONS.get(core.annotation))
    if annotation is None:
        raise ConfigError(
            f"megatron-core's field {core.name} has the annotation {core.annotation!r}, which this version "
            "does not know: expected megatron-core 0.9.0. Install it with: pip install megatron-core==0.9.0"
        )
    if default is None and type(None) not in get_args(annotation):
        annotation = annotation | None
    return Option(
        name=core.name, section=section, type=annotation, default=default, core=True, described=core.doc
    )


def _added_option(section: str, added: AddedField) -> Option:
    # Values of a configuration do not change, so a list is a tuple.
    kinds: list[Any] = []
    for member in members(added.type):
        element: Any = get_args(member)[0] if get_origin(member) is list else None
        kinds.append(member if element is None else tuple[element, ...])
    if type(None) in get_args(added.type):
        kinds.append(type(None))
    return Option(
        name=added.name,
        section=section,
        type=Union[tuple(kinds)],  # noqa: UP007
        default=added.default,
        core=True,
        described=added.doc,
    )


def type_text(annotation: Any) -> str:
    """A type as people say it: ``integer``, ``one of a, b``, ``list of text``."""
    words = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            words.append("one of " + ", ".join(str(choice) for choice in get_args(member)))
        elif get_origin(member) is tuple:
            inner = get_args(member)
            if inner[-1] is Ellipsis:
                words.append(f"list of {type_text(inner[0])}")
            else:
                words.append(f"{len(inner)} x {type_text(inner[0])}")
        else:
            names = {int: "integer", float: "number", bool: "true or false", str: "text"}
            words.append(names[member])
    if type(None) in get_args(annotation):
        words.append("none")
    return " or ".join(words)


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True))


def shown(value: object) -> str:
    """``value`` as Python writes it, cut short: a few aliases in YAML can stand for gigabytes."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def convert(option: Option, value: object, where: str) -> Any:
    """``value`` (text, number, list, None) as ``option``'s type.

    ``where`` says in the error where the value was written. Raises ``ConfigError``.
    """
    prepared = value
    optional = type(None) in get_args(option.type)
    if optional and isinstance(value, str) and value.strip().lower() in ("none", "null"):
        return None
    if value is False and any("off" in get_args(member) for member in members(option.type)):
        # YAML reads a bare `off` as false.
        value = prepared = "off"
    if option.name in PARSERS:
        prepared = PARSERS[option.name](value)
    elif option.is_list and isinstance(value, str | int | float) and not isinstance(value, bool):
        prepared = [value]
    wrong = isinstance(value, bool) and not option.is_bool
    if not wrong:
        try:
            return _adapter(option.type).validate_python(prepared)
        except ValidationError:
            wrong = True
    choices = [str(each) for member in members(option.type) for each in _choices(member)]
    near = hint(value, choices) if isinstance(value, str) else ""
    raise ConfigError(f"{where}: {option.name} is {shown(value)}; expected {type_text(option.type)}.{near}")


def _choices(member: object) -> tuple[object, ...]:
    return get_args(member) if get_origin(member) is Literal else ()
