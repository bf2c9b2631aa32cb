"""The ranks' side of ``test_musa_refusals`` and ``test_flat_collectives``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def _start() -> Any:
    """Join, and return Megatron's view of torch."""
    import mt_megatron

    mt_megatron.patch(os.environ.get("MT_MEGATRON_TEST_BACKEND", "cpu"))
    mt_megatron.backend().set_device(0)
    dist.init_process_group(mt_megatron.backend().collective)
    from megatron.core.tensor_parallel import mappings

    return mappings.torch


def refused() -> dict[str, Any]:
    """What each thing that is to be refused says, and how many refusals were counted of each kind."""
    _start()
    from torch_musa import refusals  # type: ignore[import-not-found]

    rank, device = dist.get_rank(), "musa"
    ones = torch.ones(3, device=device)
    parts = [torch.zeros(2, device=device), torch.zeros(3, device=device)]
    mine, other = torch.ones(2 + rank, device=device), torch.ones(5, device=device)
    flags = torch.tensor([True, False], device=device)
    splits = [1, 2] if rank == 0 else [2, 3]

    def add(x: Tensor) -> Tensor:
        return x + 1

    tries: dict[str, Callable[[], Any]] = {
        "a tensor made as float64": lambda: torch.zeros(2, dtype=torch.float64, device=device),
        "float32 that becomes float64": lambda: ones.double(),
        "numpy's numbers": lambda: torch.from_numpy(np.ones(2)).to(device),
        "argsort of bool": lambda: torch.argsort(flags),
        "sort of bool": lambda: flags.sort(stable=True),
        "torch.compile": lambda: torch.compile(add)(ones),
        "torch.jit.script": lambda: torch.jit.script(add)(ones),
        "all_gather": lambda: dist.all_gather(parts, mine),
        "all_to_all_single": lambda: dist.all_to_all_single(
            torch.zeros(3 if rank == 0 else 5, device=device), other[: sum(splits)], splits, splits
        ),
        "all_to_all": lambda: dist.all_to_all(parts, [torch.ones(2, device=device)] * 2),
        "reduce_scatter": lambda: dist.reduce_scatter(mine, parts),
    }  # fmt: skip
    messages, not_refused = {}, []
    for name, attempt in tries.items():
        try:
            attempt()
        except refusals.RefusedByCards as error:
            messages[name] = str(error)
        else:
            not_refused.append(name)
    # What must go on working: integers in order, float32, the host's float64, compiled code of the host.
    flags.int().sort()
    torch.jit.script(add)(torch.ones(2, dtype=torch.float64))
    float(ones.sum().cpu().double())
    return {"messages": messages, "not refused": not_refused, "counts": dict(refusals.counts)}


def mended() -> dict[str, Any]:
    """What Megatron's modules reach instead, compared with what follows from the numbers that went in."""
    seen = _start()
    device, rank, wrong = seen.zeros(1, device="cuda").device, dist.get_rank(), []

    def check(name: str, found: Tensor, expected: list[float]) -> None:
        if found.flatten().tolist() != expected:
            wrong.append(f"{name}: {found.tolist()}")

    def numbers(count: int) -> Tensor:
        return torch.arange(count, device=device).float() + 10 * rank

    for wait in (False, True):
        parts = [torch.zeros(2, device=device), torch.zeros(3, device=device)]
        work = seen.distributed.all_gather(parts, numbers(2 + rank), async_op=wait)
        if wait:
            work.wait()
        check("all_gather", torch.cat(parts), [0, 1, 10, 11, 12])

        # Rank 0 sends 1 and 2 rows, rank 1 sends none and 3.
        sent, received = ([1, 2], [1, 0]) if rank == 0 else ([0, 3], [2, 3])
        rows = numbers(6).view(3, 2)
        into = torch.zeros(sum(received), 2, device=device)
        work = seen.distributed.all_to_all_single(into, rows, received, sent, async_op=wait)
        if wait:
            work.wait()
        check("all_to_all_single", into, [0, 1] if rank == 0 else [2, 3, 4, 5, 10, 11, 12, 13, 14, 15])

        mine = torch.zeros(2 + rank, device=device)
        work = seen.distributed.reduce_scatter(mine, [numbers(2), numbers(3)], async_op=wait)
        if wait:
            work.wait()
        check("reduce_scatter", mine, [10, 12] if rank == 0 else [10, 12, 14])
    even = torch.zeros(4, device=device)
    seen.distributed.all_to_all_single(even, numbers(4))
    check("all_to_all_single of equal parts", even, [0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
    empty = torch.zeros(0, 2, device=device)
    seen.distributed.all_to_all_single(empty.clone(), empty, [0, 0], [0, 0])
    try:
        seen.distributed.all_to_all_single(torch.zeros(3, device=device), numbers(4), [2, 2], [2, 2])
    except ValueError as error:
        if "add up to 3" not in str(error):
            wrong.append(str(error))
    else:
        wrong.append("all_to_all_single took split sizes beyond the tensor")
    return {"wrong": wrong, "counts": _counts()}


def flat() -> dict[str, Any]:
    """Collectives of one buffer, in shapes that NCCL takes."""
    seen = _start()
    device, rank, wrong = seen.zeros(1, device="cuda").device, dist.get_rank(), []
    library = seen.distributed

    def numbers(*shape: int) -> Tensor:
        return torch.arange(float(torch.Size(shape).numel()), device=device).view(shape) + 100 * rank

    def check(name: str, found: Tensor, expected: list[float], work: Any) -> None:
        if work is not None:
            work.wait()
        if found.flatten().tolist() != expected:
            wrong.append(f"{name} {tuple(found.shape)}: {found.flatten().tolist()}")

    six = [float(each) for each in range(6)]
    everyone = six + [each + 100 for each in six]
    total = [2 * (each + 6 * rank) + 100 for each in six]
    theirs = ([0.0, 1, 2, 100, 101, 102], [3.0, 4, 5, 103, 104, 105])[rank]
    for wait in (False, True):
        for name in ("_all_gather_base", "all_gather_into_tensor"):
            for into, given in (
                ((12,), (2, 3)),
                ((4, 3), (6,)),
                ((2, 2, 3), (2, 3)),
                ((3, 4), (2, 3)),
                ((2, 6), (6,)),
            ):
                output = torch.zeros(into, device=device)
                check(name, output, everyone, getattr(library, name)(output, numbers(*given), async_op=wait))
        for name in ("_reduce_scatter_base", "reduce_scatter_tensor"):
            for into, given in (((6,), (4, 3)), ((2, 3), (12,)), ((2, 3), (2, 2, 3)), ((3, 2), (3, 4))):
                output = torch.zeros(into, device=device)
                check(name, output, total, getattr(library, name)(output, numbers(*given), async_op=wait))
        for into, given in (((6,), (2, 3)), ((2, 3), (6,)), ((2, 1, 3), (2, 3))):
            output = torch.zeros(into, device=device)
            check(
                "all_to_all_single",
                output,
                theirs,
                library.all_to_all_single(output, numbers(*given), async_op=wait),
            )
        # Split sizes count the rows of the tensor that they are for.
        output = torch.zeros(6, device=device)
        work = library.all_to_all_single(output, numbers(2, 3), [3, 3], [1, 1], async_op=wait)
        check("all_to_all_single with sizes", output, theirs, work)
    scalar = torch.zeros(2, device=device)
    check("a number", scalar, [0, 100], library.all_gather_into_tensor(scalar, numbers(1)[0]))
    attempts: dict[str, Callable[[], Any]] = {
        "2 times as many elements in the output": lambda: library._all_gather_base(numbers(5), numbers(2, 2)),
        "2 times as many elements in the input": lambda: library._reduce_scatter_base(
            numbers(2, 2), numbers(7)
        ),
        "share equally": lambda: library.all_to_all_single(numbers(3), numbers(3)),
        "equal numbers": lambda: library.all_to_all_single(numbers(4), numbers(6)),
    }
    for expected, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            if expected not in str(error):
                wrong.append(str(error))
        else:
            wrong.append(f"not refused: {expected}")
    return {"wrong": wrong, "counts": _counts()}


def _counts() -> dict[str, int]:
    if os.environ.get("MT_MEGATRON_TEST_BACKEND", "cpu") != "musa":
        return {}
    from torch_musa import refusals

    return dict(refusals.counts)
