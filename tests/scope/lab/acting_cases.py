"""The ranks' side: what perturbations do inside of training steps."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from mt_megatron.errors import ConfigError
from mt_megatron.scope.lab import lab
from mt_megatron.scope.lab.snapshot import MIB, Snapshot, bytes_of
from mt_megatron.scope.lab.specification import lab_file_from, perturbation_from
from mt_megatron.seams import events, taps
from tests.parity.case import SEQUENCE
from tests.scope.lab import oracle
from tests.scope.lab.bench import Bench, bench, entry, start

KINDS: list[dict[str, Any]] = [
    {"kind": "bit_flip", "bit": 9, "fraction": 0.01},
    {"kind": "bit_flip", "bit": 14},
    {"kind": "gaussian", "sigma": 0.25, "fraction": 0.1},
    {"kind": "uniform", "low": -0.5, "high": 0.25, "relative": True, "fraction": 0.1},
    {"kind": "mask", "fraction": 0.1},
    {"kind": "scale", "factor": 1.7, "fraction": 0.1},
    {"kind": "stuck", "value": 0.3, "fraction": 0.1},
]
MODULE = "decoder.layers.1.mlp.linear_fc2"
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _numpy(tensor: torch.Tensor) -> tuple[NDArray[Any], str]:
    name = NAMES[tensor.dtype]
    bits = tensor.detach().contiguous().view(getattr(torch, f"int{oracle.WIDTH[name]}")).numpy().copy()
    return bits.view(ml_dtypes.bfloat16 if name == "bfloat16" else oracle.DTYPES[name]), name


def _wrong(found: torch.Tensor, before: torch.Tensor, places: Any, given: dict[str, Any], key: int) -> int:
    """Elements that are not what the oracle makes of ``before``; all of them where nothing was changed."""
    values, name = _numpy(before)
    expected = oracle.perturbed(values, name, places, given, key).view(oracle.BITS[name])
    got = _numpy(found)[0].view(oracle.BITS[name])
    if np.array_equal(expected, values.view(oracle.BITS[name])):
        return int(expected.size)
    return int((got != expected).sum())


def _captured(run: Bench, on: str) -> dict[int, torch.Tensor]:
    """Outputs of ``MODULE``, or their gradients, by micro-batch, in the next step."""
    kept: dict[int, torch.Tensor] = {}
    module = dict(taps.named_modules(run.trainable.bare_chunks()))[MODULE]

    def output(call: taps.Call, value: Any) -> None:
        kept[call.microbatch] = value[0].clone()

    def gradient(call: taps.Call, value: torch.Tensor, index: int) -> None:
        kept[call.microbatch] = value.clone()

    tap = taps.watch(
        module,
        after=output if on == "activation" else None,
        output_gradient=gradient if on == "gradient" else None,
    )
    with tap:
        run.steps.rehearse()
    return kept


def equal_to_oracle(flags: str, kinds: list[dict[str, Any]]) -> list[Any]:
    """Kind, place and number of wrong elements, of each kind on each place."""
    start()
    found = []
    with bench(f"--clip-grad 0 {flags}") as run:
        run.step()
        step, snapshot = 2, Snapshot(run.trainer)
        weight = dict(run.trainable.bare_chunks()[0].named_parameters())[f"{MODULE}.weight"]
        plain = {on: _restored(run, snapshot, on) for on in ("activation", "gradient")}
        reduced = _reduced(run, snapshot, weight)
        for given in kinds:
            for on in ("weight", "weight_gradient", "activation", "gradient"):
                target = f"{MODULE}.weight" if on.startswith("weight") else MODULE
                run.lab.arm(perturbation_from({**given, "name": "p", "on": on, "module": target, "seed": 11}))
                words = (11, "p", target, step)
                run.lab.begin_step(step)
                snapshot_weight = snapshot_of(weight) if on == "weight" else None
                if on == "weight":
                    assert snapshot_weight is not None
                    before = _weight_before(snapshot, run, weight)
                    wrong = _wrong(
                        snapshot_weight, before, np.arange(before.numel()), given, oracle.key(*words)
                    )
                elif on == "weight_gradient":
                    run.steps.rehearse()
                    places = np.arange(reduced.numel())
                    wrong = _wrong(weight.main_grad, reduced, places, given, oracle.key(*words))
                else:
                    wrong = 0
                    for microbatch, values in _captured(run, on).items():
                        before = plain[on][microbatch]
                        length, batch, features = before.shape
                        assert (length, batch) == (SEQUENCE, 1)
                        position, feature = np.mgrid[:length, :features]
                        places = (microbatch * SEQUENCE + position) * features + feature
                        wrong += _wrong(values, before, places, given, oracle.key(*words, 0))
                    assert len(plain[on]) == run.shape.num_microbatches
                found.append([given["kind"], on, wrong])
                run.lab.end_step(step)
                run.lab.undo()
                snapshot.restore()
    return found


def snapshot_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.clone()


def _weight_before(snapshot: Snapshot, run: Bench, weight: Any) -> torch.Tensor:
    now = weight.data.clone()
    snapshot.restore()
    before: torch.Tensor = weight.data.clone()
    weight.data.copy_(now)
    return before


def _restored(run: Bench, snapshot: Snapshot, on: str) -> dict[int, torch.Tensor]:
    kept = _captured(run, on)
    snapshot.restore()
    return kept


def _reduced(run: Bench, snapshot: Snapshot, weight: Any) -> torch.Tensor:
    run.steps.rehearse()
    gradient: torch.Tensor = weight.main_grad.clone()
    snapshot.restore()
    return gradient


def scopes() -> dict[str, Any]:
    """Steps, micro-batches, heads, recomputation, evaluation; and what is left when it is over."""
    start()
    noise = {"kind": "gaussian", "sigma": 0.3, "on": "activation", "module": "decoder.layers.0", "seed": 1}
    found: dict[str, Any] = {}
    with bench() as run:
        forward = _forwards(run)
        finalize = run.trainable.core.finalize_model_grads_func
        run.lab.handlers["arm"](entry(**noise, steps="2-3"))
        waiting = run.lab.status()["armed"][0]["state"]
        clean = [run.step().loss for _ in range(4)]
        found["states"] = [waiting, run.lab.status()["armed"][0]["state"]]
        found["perturbed"] = run.lab.perturbed
        found["told"] = list(run.said)
        found["nothing left"] = _forwards(run) == forward and not events.listening()
        found["gradients left"] = run.trainable.core.finalize_model_grads_func is finalize
        run.lab.undo()
        found["again"] = [run.step().loss for _ in range(3)]
        found["perturbed losses"] = clean
    losses = {}
    for name, flags, changes in (
        ("none", "", None),
        ("all", "", {}),
        ("first", "", {"microbatches": [0]}),
        ("none of these", "", {"microbatches": [99]}),
        (
            "recomputed",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            {},
        ),
        ("gradient", "", {"on": "gradient"}),
        (
            "gradient recomputed",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            {"on": "gradient"},
        ),
        ("differentiated", "", {"kind": "mask", "fraction": 0.5, "differentiate": True}),
        ("passed on", "", {"kind": "mask", "fraction": 0.5}),
    ):
        with bench(flags) as run:
            if changes is not None:
                given = {**noise, **changes}
                if given["kind"] == "mask":
                    del given["sigma"]
                run.lab.handlers["arm"](entry(**given))
            losses[name] = [run.step().loss for _ in range(3)] + [run.digest()]
    return {**found, "losses": losses}


def _forwards(run: Bench) -> list[str]:
    modules = run.trainable.bare_chunks()[0].modules()
    return [type(module).__name__ for module in modules if "forward" in vars(module)]


def masked_heads() -> dict[str, Any]:
    """Masked heads of the context, of the projection's columns and of the queries' rows."""
    start()
    found = {}
    for name, given in {
        "context": {"on": "activation", "module": "decoder.layers.1.self_attention.core_attention"},
        "columns": {"on": "weight", "module": "decoder.layers.1.self_attention.linear_proj"},
        "rows": {"on": "weight", "module": "decoder.layers.1.self_attention.linear_qkv"},
    }.items():
        with bench() as run:
            told = run.lab.handlers["arm"](entry(kind="mask", heads=[2], **given))
            losses = [run.step().loss for _ in range(2)]
            attention = dict(taps.named_modules(run.trainable.bare_chunks()))[
                "decoder.layers.1.self_attention"
            ]
            found[name] = {
                "losses": losses,
                "elements": told["targets"][0]["elements"],
                "proj": _zeros(attention.linear_proj.weight, 1),
                "qkv": _zeros(attention.linear_qkv.weight, 0),
            }
    return found


def _zeros(weight: torch.Tensor, dim: int) -> list[int]:
    # After the update what was masked at the beginning of the step has only one update's size.
    return torch.nonzero((weight.abs() < 0.021).all(dim=1 - dim)).flatten().tolist()


def refused() -> list[str]:
    """Errors of perturbations that the model cannot have."""
    start()
    wrong: list[dict[str, Any]] = [
        {"kind": "mask", "on": "activation", "module": "decoder.layers.7.mlp"},
        {"kind": "mask", "on": "activation", "module": "decoder.layer.1.mlp"},
        {"kind": "mask", "on": "weight", "module": "decoder.layers.1.mlp.linear_fc1.wieght"},
        {"kind": "mask", "on": "weight", "module": "*.linear_fc1.weight", "layers": [9]},
        {
            "kind": "mask",
            "on": "weight",
            "module": "decoder.layers.1.mlp.linear_fc1.weight",
            "index": [96, 0],
        },
        {
            "kind": "mask",
            "on": "weight",
            "module": "decoder.layers.1.mlp.linear_fc1.weight",
            "index": [1, 2, 3],
        },
        {"kind": "mask", "on": "activation", "module": "decoder.layers.1.mlp", "index": [9999, 0, 5]},
        {"kind": "mask", "on": "weight", "module": "*.linear_fc1.weight", "heads": [0]},
        {"kind": "mask", "on": "activation", "module": "*.core_attention", "heads": [4]},
        {"kind": "bit_flip", "bit": 32, "on": "weight", "module": "*.linear_fc1.weight"},
        {"kind": "mask", "on": "activation", "module": "output_layer"},
        {"kind": "mask", "on": "weight", "module": "*", "ranks": [1]},
        {"kind": "delay", "ms": 1, "ranks": [0, 1]},
        {"kind": "delay", "ms": 1, "ranks": [0, 0], "on": "communication"},
        {"kind": "fault", "fault": "slow_rank:rank=3"},
        {"kind": "mask", "on": "weight", "module": "*", "steps": "1-2"},
        {"kind": "mask", "on": "weight", "module": "*", "undo_at": 2},
    ]
    found = []
    with bench() as run:
        run.step()
        run.step()
        before = run.digest()
        for given in wrong:
            try:
                run.lab.handlers["arm"](entry(**given))
            except ConfigError as error:
                found.append(str(error))
            else:
                found.append("")
        run.lab.limit_mib = 0.01
        for command in ("arm", "pair"):
            try:
                run.lab.handlers[command](entry(kind="mask", on="weight", module="*"))
            except ConfigError as error:
                found.append(str(error))
        assert run.lab.status() == {"perturbed": None, "armed": []} and run.digest() == before
    return found


def previewed() -> dict[str, Any]:
    """A preview, and that it changes nothing; then the audit of what is done."""
    start()
    with bench() as run:
        run.step()
        before = run.digest()
        given = {
            "kind": "bit_flip",
            "bit": 3,
            "on": "weight",
            "module": "decoder.layers.*.mlp.*",
            "fraction": 0.5,
        }
        told = run.lab.handlers["preview"](entry(**given))
        assert run.lab.status()["armed"] == [] and run.digest() == before
        size = sum(each.numel() for chunk in run.trainable.chunks for each in chunk.parameters())
        modules = run.lab.handlers["preview"](entry(kind="mask", on="activation", module="*.linear_qkv"))
    return {"weights": told, "parameters": size, "modules": modules}


def paired() -> dict[str, Any]:
    """A pair: what it says, that it leaves everything as it was, and that the step itself says the same."""
    start()
    found: dict[str, Any] = {}
    with bench() as run:
        run.step()
        before = run.digest()
        given = {"kind": "gaussian", "sigma": 0.2, "on": "activation", "module": "decoder.layers.1.mlp"}
        found["told"] = run.lab.handlers["pair"]({**entry(**given), "microbatches": [0, 1]})
        found["nothing"] = run.lab.handlers["pair"](entry(**{**given, "sigma": 0}))
        found["untouched"] = run.digest() == before and _forwards(run) == [] and run.lab.perturbed is None
        found["closed"] = _refused_for_memory(run, given) == []
        found["clean"] = run.step().loss
    with bench() as run:
        run.step()
        run.lab.handlers["arm"](entry(**given))
        found["perturbed"] = run.step().loss
    return found


def _refused_for_memory(run: Bench, given: dict[str, Any]) -> list[str]:
    """A pair whose snapshot does not fit: what is left open of it."""

    def full(trainer: Any) -> None:
        raise MemoryError

    with patch.object(lab, "Snapshot", full), suppress(MemoryError):
        run.lab.handlers["pair"](entry(**given))
    return _forwards(run)


def forgetful() -> dict[str, bool]:
    """Whether a run that goes back without a part of the snapshot is told from one that was not perturbed."""
    start()
    flags = (
        "--hidden-dropout 0.1 --attention-dropout 0.1 --bf16 --fp8-recipe delayed --no-first-last-layers-bf16"
    )
    original = {name: getattr(Snapshot, name) for name in ("_keep_modules", "_keep_optimizer", "_keep_rest")}
    found = {}
    with bench(flags) as run:
        states = []
        for _ in range(4):
            run.step()
            states.append(run.digest())
    for name in (*original, "none"):
        if name != "none":
            setattr(Snapshot, name, lambda *ignored: None)
        with bench(flags) as run:
            run.step()
            run.lab.handlers["arm"](entry(kind="scale", factor=2, on="weight", module="*.linear_fc1"))
            run.step()
            snapshot = run.lab._earliest()
            assert snapshot is not None
            snapshot.restore()
            run.lab.close()
            for _ in range(2):
                run.step()
            # Without the trainer's own part the run goes on from the step at which it is.
            found[name] = run.digest() != states[run.trainer.iteration - 1]
        for each, value in original.items():
            setattr(Snapshot, each, value)
    return found


def promptly(count: int, seed: int) -> dict[str, Any]:
    """Commands that come in the middle of a step's forward, and at random moments: steps until each acts, and
    seconds; rank 0 of two is commanded."""
    start()
    found: dict[str, Any] = {"in forward": [], "at random": [], "seconds": []}
    rng = random.Random(seed)
    with bench() as run:
        layer = dict(taps.named_modules(run.trainable.bare_chunks()))["decoder.layers.1"]
        asked: dict[str, tuple[int, float]] = {}
        began: dict[str, tuple[int, float]] = {}
        waiting: list[str] = []
        write = run.lab._audit.write

        def audited(what: str, **values: Any) -> None:
            if what == "acts":
                began[values["id"]] = values["step"] + 1, time.monotonic()
            write(what, **values)

        run.lab._audit.write = audited  # type: ignore[method-assign]

        def command(name: str) -> None:
            if run.job.rank == 0:
                asked[name] = run.trainer.iteration + 1, time.monotonic()
                given = {
                    "kind": "scale",
                    "factor": 1,
                    "on": "weight",
                    "module": "*.linear_proj",
                    "name": name,
                }
                run.control.put({"id": name, "do": "arm", "arguments": {"perturbation": given}})

        def in_forward(call: taps.Call, args: Any, kwargs: Any) -> None:
            if call.microbatch == 0 and not waiting:
                waiting.append(f"f{len(found['in forward'])}")
                command(waiting[0])

        for kind in ("in forward", "at random"):
            for number in range(count):
                waiting.clear()
                if kind == "in forward":
                    with taps.watch(layer, before=in_forward):
                        run.run(run.trainer.iteration + 1)
                else:
                    threading.Timer(rng.random() * 0.2, command, [f"r{number}"]).start()
                until = run.trainer.iteration + 60
                while run.trainer.sum_over_ranks([float(not began)])[0]:
                    run.run(run.trainer.iteration + 1)
                    assert run.trainer.iteration < until
                if run.job.rank == 0:
                    (name,) = began
                    found[kind].append(began[name][0] - asked[name][0])
                    found["seconds"].append(began[name][1] - asked[name][1])
                run.lab.undo()
                began.clear()
    return found


def in_vain() -> list[str]:
    """What is said of perturbations that meet nothing in their first step, and of one that does."""
    start()
    module = {"on": "activation", "module": "decoder.layers.0"}
    given: dict[str, dict[str, Any]] = {
        "micro-batch": {"kind": "mask", **module, "microbatches": [99]},
        "sample": {"kind": "mask", **module, "index": [0, 999, 0]},
        "no tensor": {"kind": "mask", "on": "activation", "module": "decoder.layers.0.cross_attn_bda"},
        "rate": {"kind": "drop", "rate": 1e-9, "ranks": [0, 1], "on": "communication"},
        "weight": {"kind": "mask", "on": "weight", "module": "*.linear_fc1", "index": [0, 0]},
        "reduced": {"kind": "mask", "on": "weight_gradient", "module": "*.linear_fc1"},
        "gradient": {"kind": "mask", "on": "gradient", "module": "decoder.layers.0", "index": [0, 0, 0]},
        "link": {"kind": "offset", "value": 0.5, "ranks": [0, 1], "on": "communication"},
        "slow link": {"kind": "delay", "ms": 1, "ranks": [0, 1], "on": "communication"},
    }
    with bench() as run:
        for name, each in given.items():
            run.lab.handlers["arm"](entry(**{**each, "name": name}))
        run.run(3)
        return list(run.said)


def of_experts() -> list[int]:
    """Experts' outputs in two steps: elements that were changed, and places that are kept of them."""
    start()
    with bench(model="mixture") as run:
        given = {"kind": "mask", "fraction": 0.5, "on": "activation", "module": "*.mlp.experts"}
        run.lab.handlers["arm"](entry(**given))
        run.step()
        run.step()
        acting: Any = run.lab._armed[0].acting
        return [acting.acted, len(acting._known)]


def together() -> dict[str, Any]:
    """Several perturbations of one run: what an undo of the later leaves of the earlier, what it takes of
    those that came after, how much memory they need, and which of a file are over."""
    start()
    found: dict[str, Any] = {}
    doubled = {"kind": "scale", "factor": 2, "on": "weight", "module": "*.linear_fc1", "steps": "2-3"}
    noise = {"kind": "gaussian", "sigma": 0.3, "on": "activation", "module": "decoder.layers.0"}
    with bench() as run:
        clean = []
        for _ in range(4):
            run.step()
            clean.append(run.digest())
    for snapshot in (False, True):
        given = {**doubled, "snapshot": snapshot, "name": "early"}
        with bench() as run:
            run.lab.handlers["arm"](entry(**given))
            alone = []
            for _ in range(4):
                run.step()
                alone.append(run.digest())
        with bench() as run:
            run.lab.handlers["arm"](entry(**given))
            run.lab.handlers["arm"](entry(**noise, name="late", steps="3-"))
            for _ in range(4):
                run.step()
            both = run.digest()
            told = run.lab.handlers["undo"]({"id": "late"})
            marked, back = run.lab.perturbed, run.digest() == alone[1]
            for _ in range(2):
                run.step()
            found[f"snapshot {snapshot}"] = {
                "undone": told["undone"],
                "step": told["step"],
                "marked": marked,
                "back": back,
                "as alone": run.digest() == alone[3],
                "differ": len({both, alone[3], clean[3]}) == 3,
            }
    with bench() as run:
        run.lab.handlers["arm"](entry(**noise, name="first", steps="2-"))
        run.lab.handlers["arm"](entry(**{**doubled, "steps": "3"}, name="then", snapshot=False))
        for _ in range(3):
            run.step()
        found["disarmed"] = run.lab.handlers["disarm"]({"id": "then"})["perturbed"]
        run.lab.undo()
        found["clean again"] = [run.lab.perturbed, run.digest() == clean[0]]
    with bench() as run:
        run.step()
        run.step()
        size = bytes_of(run.trainer) / MIB
        run.lab.limit_mib = 1.5 * size
        needed = {}
        for name, steps, undo_at in (("a", "5", 6), ("b", "6", None), ("c", "5", None), ("d", "7", None)):
            try:
                told = run.lab.handlers["arm"](entry(**noise, name=name, steps=steps, undo_at=undo_at))
                needed[name] = told["snapshot_mib_of_a_rank"] / size
            except ConfigError as error:
                needed[name] = str(error)
        more = {**entry(**noise, name="e", steps="8"), "snapshot_limit_mib": 9 * size}
        needed["e"] = run.lab.handlers["arm"](more)["snapshot_mib_of_a_rank"] / size
        found["needed"], found["limit stays"] = needed, run.lab.limit_mib == 1.5 * size
    with bench() as run:
        run.step()
        run.step()
        run.said.clear()
        entries = [
            {**noise, "name": "old", "steps": "1-2"},
            {**noise, "name": "undone", "undo_at": 2},
            {**noise, "name": "new", "steps": "1-3"},
        ]
        run.lab.arm_file(lab_file_from({"perturbations": entries}))
        found["of a file"] = [each["id"] for each in run.lab.status()["armed"]]
        found["said"] = list(run.said)
        finalize = run.trainable.core.finalize_model_grads_func
        halved = {"kind": "scale", "factor": 0.5, "on": "weight_gradient", "module": "*.linear_proj"}
        run.lab.arm_file(
            lab_file_from(
                {"perturbations": [{**halved, "steps": "3"}, {**halved, "steps": "3-4", "name": "longer"}]}
            )
        )
        run.run(4)
        found["gradients left"] = run.trainable.core.finalize_model_grads_func is finalize
    return found


def on_some_ranks() -> list[list[int]]:
    """Four perturbations of weights that begin in one step, on rank 0 alone: elements of each weight, and
    how many of them are 0 on this rank. Parameters are gathered while the next step runs."""
    start()
    with bench("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather") as run:
        run.step()
        weights = dict(run.trainable.bare_chunks()[0].named_parameters())
        names = [name for name in weights if name.endswith(("linear_fc1.weight", "linear_fc2.weight"))]
        for name in names:
            run.lab.handlers["arm"](entry(kind="mask", on="weight", module=name, name=name, ranks=[0]))
        run.lab.begin_step(2)
        found = [[weights[name].numel(), int((weights[name] == 0).sum())] for name in names]
        run.lab.end_step(2)
        run.lab.undo()
    return found


def paired_mixture() -> dict[str, Any]:
    """A pair of all modules of a mixture, and the order in which outputs were complete in a step."""
    start()
    with bench(model="mixture") as run:
        run.step()
        called: dict[str, None] = {}
        opened = [
            taps.watch(module, after=lambda call, output, path=path: called.setdefault(path))
            for path, module in taps.named_modules(run.trainable.bare_chunks())
            if path and path != "output_layer"
        ]
        given = {"kind": "gaussian", "sigma": 0.5, "on": "activation", "module": "decoder.layers.1"}
        told = run.lab.handlers["pair"]({**entry(**given), "modules": "*"})
        for each in opened:
            each.close()
    return {"told": told, "called": list(called)}
