"""How several workers share the test files: the longest first, files with shared launches together."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

_GATE, _PARITY, _PLAN = "the coverage gate's launches", "the parity runs", "the planner's executed cases"
SECONDS: dict[str, int] = {
    _PARITY: 100,
    "tests/training/test_loop.py": 58,
    "tests/examples/test_launch.py": 51,
    "tests/parity/test_mixtures.py": 48,
    "tests/upstream/test_small_script.py": 44,
    "tests/layers/loss/test_cross_entropy.py": 38,
    "tests/launching/test_two_nodes.py": 38,
    "tests/training/architectures/test_experts_resume.py": 32,
    "tests/training/architectures/test_multi_token_prediction.py": 30,
    "tests/resume/test_kills.py": 30,
    "tests/models/test_layer_spec.py": 28,
    "tests/parity/test_random_shapes.py": 26,
    "tests/planning/test_memory.py": 24,
    "tests/resume/test_loading.py": 24,
    "tests/session/test_upstream.py": 23,
    "tests/backends/test_loader_workers.py": 23,
    "tests/patches/device/test_process_groups.py": 22,
    "tests/diverge/test_command.py": 21,
    "tests/training/architectures/test_context_parallel.py": 21,
    "tests/patching/test_engine.py": 19,
    "tests/backends/test_musa.py": 18,
    "tests/convert/hf/test_drawn_configs.py": 18,
    "tests/backends/test_redirection.py": 17,
    "tests/test_fork_server.py": 17,
    "tests/training/health/test_watchdog.py": 17,
    "tests/session/test_order.py": 17,
    "tests/patches/events/test_emitters.py": 16,
    "tests/patches/model/test_moe_model.py": 16,
    "tests/training/health/test_shared_error.py": 15,
    "tests/patching/test_rebind.py": 15,
    "tests/session/test_session.py": 15,
    "tests/training/test_stop_requests.py": 15,
    "tests/training/health/test_nan_watch.py": 15,
    "tests/cli/test_pretrain.py": 15,
    "tests/parity/test_huggingface.py": 14,
    "tests/convert/rank_files/test_optimizer.py": 13,
    "tests/training/test_fp16.py": 13,
    "tests/examples/test_emulated_musa.py": 13,
    "tests/patches/optimizer/test_fused_adam.py": 13,
    "tests/seams/test_taps_ranks.py": 30,
}
"""Files that take longer than the rest, with about what they take on two cores."""

TOGETHER = {
    "tests/coverage_gate/test_cases.py": _GATE,
    "tests/coverage_gate/test_fake_cuda.py": _GATE,
    "tests/coverage_gate/test_gate.py": _GATE,
    "tests/fake_cuda/test_forward.py": _GATE,
    "tests/parity/test_emulated_musa.py": _PARITY,
    "tests/parity/test_layouts.py": _PARITY,
    "tests/planning/test_flops.py": _PLAN,
    "tests/planning/test_memory.py": _PLAN,
}


class FilesScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Hands out whole files, the longest first; those of ``TOGETHER`` to the same worker."""

    def _split_scope(self, nodeid: str) -> Any:
        file = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)

    def _assign_work_unit(self, node: Any) -> None:
        # The next unit is the first: workers that end with short files end at the same time.
        longest = max(self.workqueue, key=lambda scope: (SECONDS.get(scope, 0), len(self.workqueue[scope])))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
