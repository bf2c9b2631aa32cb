"""Lists of layers as people write them: ``([0]*3+[1]*58)``, ``[0,1,1]``, ``8,8,7``."""

from __future__ import annotations

import ast
import re

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
