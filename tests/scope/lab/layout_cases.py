"""The ranks' side: whole tensors put together from every rank's elements and places, perturbed and not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mt_megatron.checkpoint.load import load_weights
from mt_megatron.checkpoint.progress import Progress
from mt_megatron.checkpoint.store import CheckpointStore
from mt_megatron.scope.lab.placement import activation_places
from mt_megatron.scope.lab.snapshot import Snapshot
from mt_megatron.scope.lab.specification import perturbation_from
from mt_megatron.scope.lab.targets import module_targets, parameter_targets
from mt_megatron.seams import taps
from tests.scope.lab.bench import Bench, bench, start

NORMS = {"kind": "gaussian", "sigma": 0.5, "fraction": 0.1, "seed": 3, "name": "p"}

ALL = {key: value for key, value in NORMS.items() if key != "fraction"}
ENTRIES: dict[str, dict[str, Any]] = {
    "": NORMS,
    "heads": {**ALL, "heads": [3]},
    "index": {**ALL, "index": [[50, 5]]},
    "expert": {**ALL, "index": [[3, 20, 5]]},
    "token": {**ALL, "index": [[20, 3, 70]]},
}
"""Which elements are perturbed, by the word after ``on``."""

Wholes = dict[str, torch.Tensor]


def saved(folder: str, model: str) -> str:
    """A checkpoint of random weights, written by data-parallel ranks; where it is."""
    with bench(f"--vocab-size 4352 --save {folder}/{model}", model=model) as run:
        manifest = {"config": run.config.to_show().to_dict()}
        store = CheckpointStore(run.config.checkpoint, run.trainable, run.job, manifest, run.said.append)
        reports = store.save(Progress(iteration=1), final=True)
        store.close()
        assert reports[0].folder is not None, reports
        return str(reports[0].folder)


@contextmanager
def loaded(checkpoint: str, model: str, flags: str) -> Iterator[Bench]:
    # Every token weighs the same, so that gradients do not depend on how many micro-batches a rank has.
    also = "--vocab-size 4352 --calculate-per-token-loss --clip-grad 0"
    with bench(f"{flags} {also}", model=model) as run:
        load_weights(Path(checkpoint), run.trainable)
        yield run


def put_together(parts: list[tuple[str, torch.Tensor, torch.Tensor]]) -> Wholes:
    """Of (path, places, values) of all ranks: path -> flat values, NaN where nobody has any."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, parts)
    for rank in every:
        for wanted in {path for path, _, _ in rank}:
            own = torch.cat([places for path, places, _ in rank if path == wanted])
            assert own.unique().numel() == own.numel(), f"{wanted}: elements of one rank share places"
    found: Wholes = {}
    for path, places, values in (part for rank in every for part in rank):
        size = int(places.max()) + 1
        known = found.get(path, torch.zeros(0, dtype=torch.float64))
        if known.numel() < size:
            known = torch.cat([known, torch.full((size - known.numel(),), torch.nan, dtype=torch.float64)])
        found[path] = known
        known[places] = values.double()
    for path in found:
        if ".local_experts." in path:
            # Of one expert, whose elements lie behind those of the experts before it.
            first = min(int(places.min()) for rank in every for other, places, _ in rank if other == path)
            found[path] = found[path][first:]
    return found


def weights(run: Bench, pattern: str, entry: dict[str, Any]) -> tuple[Wholes, Wholes]:
    """All parameters that ``pattern`` meets, before and after a perturbation at the beginning of a step."""
    one = perturbation_from({**entry, "on": "weight", "module": pattern})
    targets = parameter_targets(one, run.trainable.bare_chunks())
    places = {target.path: target.place.places().all() for target in targets}
    before = put_together([(each.path, places[each.path], each.parameter.data.flatten()) for each in targets])
    run.lab.arm(one)
    run.control.begin_step(1)
    after = put_together([(each.path, places[each.path], each.parameter.data.flatten()) for each in targets])
    run.control.end_step(1)
    run.lab.undo()
    again = put_together([(each.path, places[each.path], each.parameter.data.flatten()) for each in targets])
    assert all(torch.equal(again[path], before[path]) for path in before)
    return before, after


def activations(run: Bench, pattern: str, entry: dict[str, Any] | None, on: str = "activation") -> Wholes:
    """Outputs (or their gradients) of the modules that ``pattern`` meets, in one step, perturbed by
    ``entry``."""
    one = perturbation_from({**(entry or NORMS), "on": on, "module": pattern})
    geometry = run.lab._geometry()
    parts: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def keep(path: str, call: taps.Call, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        places = activation_places(call.module, path, tensor, call.microbatch, geometry)
        assert places.whole, (path, tuple(tensor.shape))
        parts.append((path, places.all(), tensor.detach().flatten().clone()))

    if entry is not None:
        run.lab.arm(one)
        # Its taps are opened first, so that others see what it makes of the values.
        run.lab.begin_step(1)
    opened = []
    for target in module_targets(one, run.trainable.bare_chunks()):
        if on == "activation":
            opened.append(
                taps.watch(
                    target.module, after=lambda call, output, path=target.path: keep(path, call, output)
                )
            )
        else:
            opened.append(
                taps.watch(
                    target.module,
                    output_gradient=lambda call, gradient, index, path=target.path: (
                        keep(path, call, gradient) if index == 0 else None
                    ),
                )
            )
    run.steps.rehearse()
    for each in opened:
        each.close()
    if entry is not None:
        run.lab.end_step(1)
        run.lab.close()
    return put_together(parts)


def weight_gradients(run: Bench, pattern: str, entry: dict[str, Any] | None) -> Wholes:
    """Reduced gradients of the parameters that ``pattern`` meets, in one step, perturbed by ``entry``."""
    one = perturbation_from({**(entry or NORMS), "on": "weight_gradient", "module": pattern})
    if entry is not None:
        run.lab.arm(one)
        run.lab.begin_step(1)
    run.steps.rehearse()
    if entry is not None:
        run.lab.end_step(1)
        run.lab.close()
    targets = parameter_targets(one, run.trainable.bare_chunks())
    return put_together(
        [
            (each.path, each.place.places().all(), each.parameter.main_grad.flatten().clone())  # type: ignore[attr-defined]
            for each in targets
        ]
    )


def same_elements(
    folder: str, model: str, layouts: dict[str, str], patterns: dict[str, str]
) -> dict[str, Any]:
    """For each layout and pattern: whether whole tensors are those of the first layout, and whether the
    same elements of them are perturbed to the same values. ``patterns``: pattern -> weight, activation,
    gradient or weight_gradient, and maybe a word of ``ENTRIES``."""
    start()
    checkpoint = saved(folder, model)
    reference: dict[str, Any] = {}
    told: dict[str, Any] = {}
    for name, flags in layouts.items():
        with loaded(checkpoint, model, flags) as run:
            snapshot = Snapshot(run.trainer)
            for pattern, wanted in patterns.items():
                on, _, word = wanted.partition(" ")
                entry = ENTRIES[word]
                if on == "weight":
                    before, after = weights(run, pattern, entry)
                else:
                    found = []
                    for given in (None, entry):
                        found.append(
                            weight_gradients(run, pattern, given)
                            if on == "weight_gradient"
                            else activations(run, pattern, given, on)
                        )
                        snapshot.restore()
                    before, after = found
                first = reference.setdefault(pattern, (before, after))
                told[f"{name} {pattern}"] = _compared(first, (before, after), exact=on == "weight")
    return told


def _compared(first: tuple[Wholes, Wholes], second: tuple[Wholes, Wholes], *, exact: bool) -> dict[str, Any]:
    found = {"paths": sorted(second[0]), "missing": sorted(set(first[0]) ^ set(second[0])), "wrong": []}
    found["changed"] = 0
    for path in set(first[0]) & set(second[0]):
        (before, after), (other, perturbed) = ((each[0][path], each[1][path]) for each in (first, second))
        sizes = len({each.numel() for each in (before, after, other, perturbed)})
        complete = not any(bool(each.isnan().any()) for each in (before, after, other, perturbed))
        if sizes > 1 or not complete:
            found["wrong"].append(
                f"{path}: {before.numel()} and {other.numel()} elements, complete: {complete}"
            )
            continue
        changed = before != after
        found["changed"] += int(changed.sum())
        if not torch.equal(changed, other != perturbed):
            found["wrong"].append(f"{path}: other elements")
        for name, one, two in (("before", before, other), ("after", after, perturbed)):
            alike = torch.equal(one, two) if exact else torch.allclose(one, two, rtol=1e-4, atol=1e-6)
            if not alike:
                found["wrong"].append(f"{path}: other values {name}, by {float((one - two).abs().max()):.3g}")
    return found
