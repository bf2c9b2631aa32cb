"""Which places of the checkout's megatron.training touch the device, and which runs execute each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.coverage_gate.gate import GateError, judge, read_records, read_unreachable
from tests.coverage_gate.points import list_points
from tests.launch import ROOT
from tests.upstream.job import JobError, pretrain

UNREACHABLE = Path(__file__).with_name("unreachable.toml")
_TRACED = Path(__file__).parent / "traced"
_MOCK = ("--mock-data", "--train-iters", "4", "--ckpt-format", "torch", "--exit-duration-in-mins", "100")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run whose executions count; with ``refused`` it has to fail and say that."""

    name: str
    arguments: tuple[str, ...]
    ranks: int = 1
    refused: str = ""


def runs(folder: Path, checkout: Path) -> list[Run]:
    """What between them executes every touch point that can be."""
    saved, old = str(folder / "gate_saved"), str(folder / "gate_old")
    yaml = checkout / "examples" / "gpt3" / "gpt_config.yaml"
    plain, grouped = _yaml(yaml, folder / "plain.yaml"), _yaml(yaml, folder / "grouped.yaml", grouped=True)
    return [
        Run(
            name="train",
            arguments=(
                *_MOCK, "--save", saved, "--save-interval", "2", "--exit-interval", "2",
                "--exit-signal-handler",
                "--empty-unused-memory-level", "2", "--log-params-norm", "--train-sync-interval", "1",
                "--tensorboard-dir", str(folder / "tensorboard"), "--log-memory-to-tensorboard",
                "--tensorboard-log-interval", "1", "--deterministic-mode",
            ),
        ),
        Run(name="resume", arguments=(*_MOCK, "--load", saved, "--empty-unused-memory-level", "1")),
        Run(name="resume_flat_rng", arguments=(*_MOCK, "--load", old)),
        Run(name="tensor_parallel", ranks=2, arguments=(*_MOCK, "--tensor-model-parallel-size", "2")),
        Run(name="context_parallel", ranks=2, arguments=(*_MOCK, "--context-parallel-size", "2")),
        Run(
            name="grouped_gemm",
            arguments=(*_MOCK, "--num-experts", "2", "--moe-grouped-gemm", "--bf16"),
            refused="Unsupported compute capability for GroupedGEMM",
        ),
        Run(
            name="profile",
            arguments=(*_MOCK, "--profile", "--profile-step-start", "0"),
            refused="has no torch.cuda.cudart",
        ),
        # Upstream's YAML lacks arguments that its own code asks for, on every device: it stops behind
        # the checks, which is as far as this gate needs it.
        Run(name="yaml", arguments=("--yaml-cfg", plain), refused="object has no attribute"),
        Run(
            name="yaml_grouped_gemm",
            arguments=("--yaml-cfg", grouped),
            refused="Unsupported compute capability for GroupedGEMM",
        ),
    ]  # fmt: skip


def judge_checkout(checkout: Path, folder: Path) -> str:
    """Run them and judge; the counts as text. Raises GateError, or JobError when a run goes wrong."""
    root = checkout / "megatron" / "training"
    records = folder / "records"
    records.mkdir()
    for run in runs(folder, checkout):
        if run.name == "resume_flat_rng":
            _flatten_rng(folder / "gate_saved", folder / "gate_old")
        environment = {
            "PYTHONPATH": os.pathsep.join([str(_TRACED), str(ROOT)]),
            "MT_MEGATRON_GATE_CASE": run.name,
            "MT_MEGATRON_GATE_ROOT": str(root),
            "MT_MEGATRON_GATE_RECORDS": str(records),
            "NCCL_ALGO": "Ring",  # asked for by --deterministic-mode
        }
        said = _run(run, checkout, folder, environment)
        if run.refused and run.refused not in said:
            raise GateError(
                f"{run.name} was to be refused with {run.refused!r}, and was not:\n{said[-3000:]}"
            )
    points = list_points(root)
    verdict = judge(points, read_records(records), read_unreachable(UNREACHABLE), ())
    if verdict.problems:
        raise GateError("\n".join([f"{len(verdict.problems)} problem(s):", *verdict.problems]))
    reasons = sorted({entry.reason for entry in verdict.unreachable.values()})
    return "\n".join(
        [
            f"touch points in megatron/training: {len(verdict.executed)} executed by a named run on cpu, "
            f"{len(verdict.unreachable)} unreachable:",
            *(f"  {reason}" for reason in reasons),
        ]
    )


def _run(run: Run, checkout: Path, folder: Path, environment: dict[str, str]) -> str:
    log = folder / f"gate.{run.name}.log"
    try:
        found = pretrain(
            checkout, log, run.arguments, backend="cpu", ranks=run.ranks, environment=environment
        )
    except JobError:
        if not run.refused:
            raise
        return log.read_text(errors="replace")
    if not run.refused and not found.losses:
        raise JobError(f"{run.name} did not train:\n{found.text[-3000:]}")
    return found.text


def _yaml(source: Path, target: Path, *, grouped: bool = False) -> str:
    """The checkout's example configuration made small, for the local layers."""
    import yaml

    values = yaml.safe_load(source.read_text())
    values["language_model"].update(
        num_layers=2, hidden_size=64, num_attention_heads=4, layernorm_zero_centered_gamma=False,
        apply_rope_fusion=False, moe_grouped_gemm=grouped, num_moe_experts=2 if grouped else None,
    )  # fmt: skip
    values["model_parallel"].update(bf16=grouped, fp16=False, sequence_parallel=False)
    values.update(
        micro_batch_size=2, global_batch_size=4, rampup_batch_size=None, max_position_embeddings=64,
        seq_length=64, train_samples=None, train_iters=4, lr_decay_samples=None, lr_warmup_samples=0,
        mock_data=True, tokenizer_type="NullTokenizer", vocab_size=4351, log_interval=1, eval_iters=1,
        ckpt_convert_format=None, yaml_cfg=str(target),
    )  # fmt: skip
    target.write_text(yaml.safe_dump(values))
    return str(target)


def _flatten_rng(saved: Path, old: Path) -> None:
    """A copy with the random states where Megatron-LM kept them before it had states per rank."""
    import shutil

    import torch

    shutil.copytree(saved, old)
    (file,) = old.rglob("model_optim_rng.pt")
    state = torch.load(file, weights_only=False, map_location="cpu")
    state.update(state.pop("rng_state")[0])
    torch.save(state, file)
