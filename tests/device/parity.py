"""The parity suite on the device: every layout against one process there, and all against the cpu."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.device.result import Result, Unsupported, checked
from tests.launch import RankError, run_ranks
from tests.parity.case import LAYOUTS, REFERENCES, SABOTAGED, Layout
from tests.parity.compare import FP32, Bounds, Record, check, read_record
from tests.parity.run import record_folder

ON_ANOTHER_DEVICE = Bounds(gradient=1e-4, loss=1e-4, norm=1e-3, weight=1e-2)
"""Two devices' fp32 kernels sum in different orders, which AdamW's first steps enlarge where a
gradient is nearly zero. Set from the number format; an H200 stays within 1.1e-7 (losses) and 1.4e-6
(weights)."""

BF16 = Bounds(gradient=0.04, loss=0.003, norm=0.03, weight=0.05)
"""The bounds that layouts keep among each other in bf16 (tests/parity/test_layouts.py), on one device."""

UNBOUNDED = Bounds(gradient=math.inf, loss=math.inf, norm=math.inf, weight=math.inf)

SEED = 1234


class Suite:
    """Runs layouts once each and judges them; every launch has a set of processes of its own."""

    def __init__(self, backend: str, devices: int, environment: Mapping[str, str]) -> None:
        self._backend, self._devices, self._environment = backend, devices, environment
        self._records: dict[tuple[str, str, bool], Record | str] = {}

    def results(self, bf16: bool) -> list[Result]:
        """One result per layout, precision and comparison."""
        with tempfile.TemporaryDirectory(prefix="mt_megatron_device_") as folder:
            found = self._judge(Path(folder), False)
            if bf16:
                found += self._judge(Path(folder), True)
            return found

    def _judge(self, folder: Path, bf16: bool) -> list[Result]:
        everything = [*REFERENCES, *LAYOUTS, *([] if bf16 else SABOTAGED)]
        fits = [layout for layout in everything if layout.world <= self._devices]
        # The cpu's single process writes the weights that all others start from.
        self._launch(folder, list(REFERENCES), "cpu", bf16)
        for world in sorted({layout.world for layout in fits}):
            self._launch(folder, [each for each in fits if each.world == world], self._backend, bf16)
        precision, bounds = ("bf16", BF16) if bf16 else ("fp32", FP32)
        found = []
        for layout in everything:
            sabotaged = layout.sabotage is not None
            found.append(
                checked(
                    "parity",
                    f"{layout.name} {precision} against one process"
                    + " (a deliberate mistake: must deviate)" * sabotaged,
                    self._compare(layout, self._backend, bf16, bounds, must_deviate=sabotaged),
                )
            )
            if not sabotaged:
                found.append(
                    checked(
                        "parity",
                        f"{layout.name} {precision} against the cpu",
                        lambda layout=layout: self._against_the_cpu(layout, bf16),
                    )
                )
        return found

    def _launch(self, folder: Path, layouts: list[Layout], backend: str, bf16: bool) -> None:
        missing = [each for each in layouts if (each.name, backend, bf16) not in self._records]
        if not missing:
            return
        names = [layout.name for layout in missing]
        try:
            results = run_ranks(
                missing[0].world,
                "tests.parity.run:run_layouts",
                names,
                str(folder),
                SEED,
                bf16,
                timeout=180 + 60 * len(names),
                env={**self._environment, "MT_MEGATRON_TEST_BACKEND": backend},
            )
            for name in names:
                where = folder / record_folder(bf16, backend) / name
                self._records[name, backend, bf16] = read_record(where, [r[name] for r in results])
        except (RankError, AssertionError, OSError) as error:
            for name in names:
                self._records.setdefault((name, backend, bf16), str(error))

    def _compare(
        self, layout: Layout, with_backend: str, bf16: bool, bounds: Bounds, *, must_deviate: bool
    ) -> Callable[[], dict[str, float]]:
        def compare() -> dict[str, float]:
            if layout.world > self._devices:
                raise Unsupported(f"needs {layout.world} devices and {self._devices} are used")
            reference = self._record(layout.reference, with_backend, bf16)
            candidate = self._record(layout.name, self._backend, bf16)
            if not must_deviate:
                return check(reference, candidate, bounds)
            try:
                figures = check(reference, candidate, bounds)
            except AssertionError as noticed:
                if "deviates by" in str(noticed) or "different copies" in str(noticed):
                    return {}
                raise
            raise AssertionError(f"the mistake was not noticed: {figures}")

        return compare

    def _against_the_cpu(self, layout: Layout, bf16: bool) -> dict[str, float]:
        """In bf16 each of two devices' mixtures may be as far from fp32 as the cpu's: routers choose other
        experts where two are nearly equal, which changes gradients at once."""
        if not bf16 or not layout.mixture or layout.world > self._devices:
            bounds = BF16 if bf16 else ON_ANOTHER_DEVICE
            return self._compare(layout, "cpu", bf16, bounds, must_deviate=False)()
        exact, rounded = (self._record(layout.reference, "cpu", precision) for precision in (False, True))
        own = check(exact, rounded, UNBOUNDED)
        # A gradient of zeros would deviate by 1.
        bounds = Bounds(
            **{name: min(max(2 * value, getattr(BF16, name)), 0.5) for name, value in own.items()}
        )
        figures = self._compare(layout, "cpu", bf16, bounds, must_deviate=False)()
        return {**figures, **{f"{name} of the cpu's bf16 from fp32": value for name, value in own.items()}}

    def _record(self, name: str, backend: str, bf16: bool) -> Record:
        record = self._records[name, backend, bf16]
        if isinstance(record, str):
            raise AssertionError(f"{name} on {backend} did not run:\n{record}")
        return record
