"""20 steps, checkpoints and resumption of unmodified scripts of Megatron-LM, under several layouts."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mt_megatron.cli.main import main as main_of_command
from mt_megatron.launching.scripts.choice import (
    LOG_FOLDER,
    MEGASCAN,
    MEGASCOPE,
    MEGASCOPE_INTERVAL,
    RUN_DIR,
    SCHEDULE,
)
from mt_megatron.pipeline.policy.decision_log import FILE, records
from mt_megatron.scope.recording.reader import open_recording
from tests.emulators import environment as emulator
from tests.upstream.checkout import checked, unchanged
from tests.upstream.data import preprocess_sentences, write_dataset, write_sentences
from tests.upstream.gate import judge_checkout
from tests.upstream.job import ONE_DEVICE, Output, pretrain, run_script

STEPS, SAVED = 20, 10
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
NO_DROPOUT = ("--attention-dropout", "0.0", "--hidden-dropout", "0.0")
DISTRIBUTED = ("--ckpt-format", "torch_dist", "--use-dist-ckpt")
PER_RANK = ("--ckpt-format", "torch")
PIPELINED = (*NO_DROPOUT, *DISTRIBUTED, "--pipeline-model-parallel-size", "2")
CHUNKS = (
    *(*PIPELINED, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"),
    *("--global-batch-size", "16"),
)
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
# The first and the last layer stay in bf16; in the middle of a window of magnitudes.
FP8 = (
    *("--num-layers", "4", "--bf16", "--fp8-format", "hybrid"),
    *("--fp8-amax-history-len", "16", "--fp8-amax-compute-algo", "max"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, a form of checkpoint and where the samples come from."""

    name: str
    ranks: int = 1
    arguments: tuple[str, ...]
    files: bool = False
    """Samples from a .bin/.idx pair instead of mock data."""
    continues: str = ""
    """Another case whose checkpoint it also goes on from, to losses that differ by rounding alone."""
    rounding: float = 2e-5
    """Relative: losses are printed with seven digits, and layouts add in other orders."""
    schedule: str = ""
    """Value of ``--pipeline-schedule``."""
    same_as: str = ""
    """Another case whose losses and norms these are, to every digit that is printed."""
    recorded: bool = False
    """Whether MegaScan and MegaScope record it."""
    script: str = "pretrain_gpt.py"
    """A script other than pretrain_gpt.py trains on sentences, whatever ``files`` says."""


CASES = (
    Case(name="one", arguments=(*NO_DROPOUT, *DISTRIBUTED)),
    Case(name="one-torch", arguments=(*DROPOUT, *PER_RANK)),
    Case(name="files-llama", arguments=(*DROPOUT, *DISTRIBUTED, *LLAMA.split()), files=True),
    Case(
        name="tp2",
        ranks=2,
        arguments=(*NO_DROPOUT, *DISTRIBUTED, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        continues="one",
    ),
    Case(
        name="pp2",
        ranks=2,
        arguments=PIPELINED,
        continues="one",
    ),
    *(
        Case(name=f"pp2-{name}", ranks=2, schedule=name, same_as="pp2", arguments=PIPELINED)
        for name in ("1f1b", "auto", "zb_h1")
    ),
    Case(
        name="tp2-recorded",
        ranks=2,
        recorded=True,
        same_as="tp2",
        arguments=(*NO_DROPOUT, *DISTRIBUTED, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ),
    Case(name="pp2-recorded", ranks=2, recorded=True, same_as="pp2", arguments=PIPELINED),
    Case(name="vpp2", ranks=2, arguments=CHUNKS),
    Case(name="vpp2-auto", ranks=2, schedule="auto", same_as="vpp2", arguments=CHUNKS),
    Case(name="pp2-torch", ranks=2, arguments=(*DROPOUT, *PER_RANK, "--pipeline-model-parallel-size", "2")),
    Case(
        name="distributed-optimizer",
        ranks=2,
        arguments=(
            *DROPOUT,
            *DISTRIBUTED,
            "--bf16",
            "--use-distributed-optimizer",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
        ),
    ),  # fmt: skip
    Case(name="fp8", arguments=(*DROPOUT, *DISTRIBUTED, *FP8)),
    Case(name="fp8-torch", arguments=(*DROPOUT, *PER_RANK, *FP8)),
    Case(
        name="fp8-tp2",
        ranks=2,
        arguments=(*DROPOUT, *DISTRIBUTED, *FP8, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        continues="fp8",
        # Another dropout, and codes that change where sums round otherwise.
        rounding=3e-3,
    ),
    Case(
        name="distributed-optimizer-torch",
        ranks=2,
        arguments=(*DROPOUT, *PER_RANK, "--use-distributed-optimizer"),
    ),
    *(
        Case(
            name=f"bert{name}",
            script="pretrain_bert.py",
            ranks=2 if layout else 1,
            arguments=(*NO_DROPOUT, *DISTRIBUTED, *spec.split(), *layout.split()),
            continues=f"bert{name.removesuffix('-tp2').removesuffix('-pp2')}" if layout else "",
        )
        # The script's own choice are the layers of Transformer Engine.
        for spec, kind in (("", ""), ("--transformer-impl local --spec local", "-local"))
        for layout, name in (
            ("", kind),
            ("--tensor-model-parallel-size 2 --sequence-parallel", f"{kind}-tp2"),
            ("--pipeline-model-parallel-size 2", f"{kind}-pp2"),
        )
    ),
    Case(name="bert-dropout", script="pretrain_bert.py", arguments=(*DROPOUT, *PER_RANK)),
    *(
        Case(
            name=f"t5{name}",
            script="pretrain_t5.py",
            ranks=2 if layout else 1,
            arguments=(*NO_DROPOUT, *DISTRIBUTED, "--transformer-impl", spec, *layout.split()),
            continues=f"t5{kind}" if layout else "",
        )
        for spec, kind in (("transformer_engine", ""), ("local", "-local"))
        for layout, name in (
            ("", kind),
            ("--tensor-model-parallel-size 2 --sequence-parallel", f"{kind}-tp2"),
            # A stage of the encoder and one of the decoder, whose random states 0.9 does not load.
            ("--encoder-pipeline-model-parallel-size 1 --no-load-rng", f"{kind}-pp2"),
        )
    ),
    Case(
        name="t5-pp2-split",
        script="pretrain_t5.py",
        ranks=2,
        arguments=(*PIPELINED, "--pipeline-model-parallel-split-rank", "1", "--no-load-rng"),
        same_as="t5-pp2",
    ),
    Case(name="t5-dropout", script="pretrain_t5.py", arguments=(*DROPOUT, *PER_RANK)),
)


class Proof:
    """The cases on one checkout and backend."""

    def __init__(self, checkout: Path, backend: str, scratch: Path) -> None:
        self._checkout, self._backend, self._scratch = checkout, backend, scratch
        self._data = write_dataset(scratch / "text", vocabulary=4096)
        self._first: dict[str, Output] = {}
        self._sentences: tuple[str, ...] = ()

    def sentences(self) -> tuple[str, ...]:
        """Arguments for sentences that the checkout's tools/preprocess_data.py has encoded; made once. Raises
        AssertionError where ``mt-megatron preprocess`` makes other files of the same text."""
        if not self._sentences:
            text, vocabulary = write_sentences(self._scratch / "sentences", vocabulary=766)
            theirs, ours = self._scratch / "theirs", self._scratch / "ours"
            run_script(
                self._checkout,
                self._scratch / "preprocess.log",
                ["tools/preprocess_data.py", "--input", f"{text}.lists.jsonl", "--output-prefix", str(theirs)]
                + ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary)]
                + ["--workers", "1"],
                backend=self._backend,
                environment=surroundings(self._backend),
            )
            preprocess_sentences(text, ours)
            for suffix in (".bin", ".idx"):
                made = [Path(f"{theirs}_text_document{suffix}"), Path(f"{ours}_text_sentence{suffix}")]
                assert made[0].read_bytes() == made[1].read_bytes(), f"{made[0]} and {made[1]} differ"
            print(
                "sentences: mt-megatron preprocess writes the bytes of tools/preprocess_data.py", flush=True
            )
            cache = ("--data-cache-path", str(self._scratch / "index"))
            self._sentences = ("--data-path", f"{theirs}_text_document", "--split", "90,5,5", *cache)
            self._sentences += ("--vocab-file", str(vocabulary))
        return self._sentences

    def run(self, case: Case) -> None:
        """Raises AssertionError or JobError; prints the losses."""
        started = time.monotonic()
        saved = self._scratch / case.name
        first = self._pretrain(case, "train", "--save", str(saved), "--save-interval", str(SAVED))
        assert list(first.losses) == list(range(1, STEPS + 1)), f"{case.name}: {first.text[-3000:]}"
        print(f"{case.name}: " + " ".join(first.losses.values()))
        self._first[case.name] = first
        if case.same_as:
            wanted = self._first[case.same_as]
            assert (first.losses, first.norms) == (wanted.losses, wanted.norms), (
                f"{case.name}: {first.losses}"
            )
            print(f"{case.name}: losses and norms of {case.same_as}, to every digit")
        if case.schedule == "auto":
            decided = [each["record"] for each in records(self._decisions(case, "train") / FILE)]
            assert "decision" in decided, f"{case.name}: {decided}"
            print(f"{case.name}: {decided.count('decision')} decisions")
        if case.recorded:
            self._read(case, "train", 1, first)
        _rewind(saved)
        self._compare(case, "resumed", self._pretrain(case, "resume", "--load", str(saved)), first)
        if case.recorded:
            self._read(case, "resume", SAVED + 1, first)
        if case.continues in self._first:
            other = self._scratch / case.continues
            found = self._pretrain(case, "continue", "--load", str(other), "--no-load-rng")
            self._compare(case, f"from {case.continues}", found, self._first[case.continues], case.rounding)
        print(f"{case.name}: {time.monotonic() - started:.0f} s", flush=True)

    def _pretrain(self, case: Case, what: str, *more: str) -> Output:
        samples = ("--data-path", str(self._data), "--split", "90,5,5") if case.files else ("--mock-data",)
        if case.files:
            samples = (*samples, "--data-cache-path", str(self._scratch / "index"))
        if case.script != "pretrain_gpt.py":
            samples = self.sentences()
        return pretrain(
            self._checkout,
            self._scratch / f"{case.name}.{what}.log",
            (*case.arguments, *samples, *more),
            backend=self._backend,
            ranks=case.ranks,
            environment={**surroundings(self._backend), **self._schedule(case, what)},
            script=case.script,
        )

    def _run(self, case: Case, what: str) -> Path:
        return self._scratch / f"{case.name}.{what}.run"

    def _read(self, case: Case, what: str, begins: int, printed: Output) -> None:
        """The steps and losses recorded of ``what`` are those printed, and reports are made of it."""
        with open_recording(self._run(case, what)) as recording:
            steps = recording.steps()
            assert list(steps.step) == list(range(begins, STEPS + 1)), f"{case.name}: {steps.step}"
            for step, loss in zip(steps.step, steps.loss, strict=True):
                # Printed with seven digits, of a mean in float32.
                assert abs(loss / float(printed.losses[step]) - 1) <= 1e-6, f"{case.name}: {step} {loss}"
            assert set(recording.sampled()) == set(steps.step)
        assert main_of_command(["scan", "report", str(self._run(case, what))]) in (0, 1)
        print(f"{case.name} {what}: recorded steps and losses are those printed")

    def _schedule(self, case: Case, what: str) -> Mapping[str, str]:
        if case.recorded:
            return {
                MEGASCAN: "base",
                MEGASCOPE: "record",
                MEGASCOPE_INTERVAL: "1",
                RUN_DIR: str(self._run(case, what)),
            }
        if not case.schedule:
            return {}
        self._decisions(case, what).mkdir(exist_ok=True)
        return {SCHEDULE: case.schedule, LOG_FOLDER: str(self._decisions(case, what))}

    def _decisions(self, case: Case, what: str) -> Path:
        return self._scratch / f"{case.name}.{what}.decisions"

    def _compare(
        self, case: Case, what: str, found: Output, expected: Output, tolerance: float = 0.0
    ) -> None:
        wanted = {step: loss for step, loss in expected.losses.items() if step > SAVED}
        assert list(found.losses) == list(wanted), f"{case.name} {what}: {found.text[-3000:]}"
        worst = max(abs(float(found.losses[step]) / float(loss) - 1) for step, loss in wanted.items())
        same = found.losses == wanted and found.norms == {step: expected.norms[step] for step in wanted}
        print(f"{case.name} {what}: largest relative difference of losses 11 to 20 is {worst:.1e}")
        assert same if not tolerance else worst <= tolerance, (
            f"{case.name} {what}: {wanted} became {found.losses}"
        )


def surroundings(backend: str) -> Mapping[str, str]:
    """Variables for the emulator, where the device is not here."""
    if backend != "musa" or importlib.util.find_spec("torch_musa") is not None:
        return {}
    return {**emulator(), ONE_DEVICE: "1"}


def _rewind(saved: Path) -> None:
    """Make the checkpoint of step 10 the latest."""
    shutil.rmtree(saved / f"iter_{STEPS:07d}")
    (saved / "latest_checkpointed_iteration.txt").write_text(str(SAVED))


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/upstream/run.sh", description=__doc__)
    parser.add_argument("checkout", type=Path, help="root of a core_r0.9.0 checkout of Megatron-LM")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="these cases alone")
    parser.add_argument("--no-gate", action="store_true", help="leave the coverage gate out")
    options = parser.parse_args()
    checkout = checked(options.checkout)
    os.environ.pop("PYTHONPATH", None)
    said = " (the emulator of tests/emulators)" if surroundings(options.backend) else ""
    print(f"the scripts of {checkout} on {options.backend}{said}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mt_megatron_upstream_") as folder, unchanged(checkout):
        proof = Proof(checkout, options.backend, Path(folder))
        wanted = set(options.only or (case.name for case in CASES))
        wanted |= {case.same_as for case in CASES if case.name in wanted}
        for case in CASES:
            if case.name in wanted:
                proof.run(case)
        if options.backend == "cpu" and not options.no_gate:
            print(judge_checkout(checkout, Path(folder)))
    print("passed")


if __name__ == "__main__":
    main()
