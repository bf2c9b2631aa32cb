"""How several workers share the test files: the longest first, files with shared launches together."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

_GATE, _PARITY, _PLAN = "the coverage gate's launches", "the parity runs", "the planner's executed cases"
SECONDS: dict[str, int] = {
    _PARITY: 222,
    "tests/examples/test_launch.py": 208,
    "tests/training/test_loop.py": 138,
    "tests/fp8/test_training.py": 91,
    "tests/scope/control/test_runs.py": 73,
    "tests/resume/test_kills.py": 71,
    "tests/fp8/test_resume.py": 66,
    "tests/training/health/test_watchdog.py": 64,
    "tests/data/test_preprocess.py": 53,
    "tests/cli/test_run.py": 48,
    "tests/backends/test_musa.py": 47,
    "tests/layers/loss/test_cross_entropy.py": 46,
    "tests/upstream/test_small_script.py": 44,
    "tests/launching/test_two_nodes.py": 44,
    "tests/comm/ring/test_ring_model.py": 42,
    "tests/scan/diagnose/test_standstill.py": 38,
    _PLAN: 37,
    "tests/fp8/test_numerics.py": 36,
    "tests/parity/test_mixtures.py": 35,
    "tests/scope/lab/test_acting.py": 35,
    "tests/parallel/test_rank_layout.py": 34,
    "tests/examples/test_pipeline_schedule.py": 33,
    "tests/patches/model/test_moe_model.py": 31,
    "tests/training/health/test_divergence.py": 31,
    "tests/cli/test_doctor.py": 31,
    "tests/examples/test_model_folders.py": 30,
    "tests/planning/test_suggest.py": 30,
    "tests/convert/test_round_trip.py": 28,
    "tests/patches/model/test_linear.py": 28,
    "tests/models/test_layer_spec.py": 28,
    "tests/backends/test_loader_workers.py": 27,
    "tests/scope/lab/test_wires.py": 27,
    "tests/cli/test_pretrain.py": 27,
    "tests/scan/respond/test_confirm.py": 27,
    "tests/training/architectures/test_experts_resume.py": 27,
    "tests/training/test_fp16.py": 26,
    "tests/checkpoint/test_optimizer_state.py": 26,
    "tests/scan/record/test_events.py": 25,
    "tests/training/test_scope_session.py": 25,
    "tests/layers/mla/test_self_attention.py": 25,
    "tests/parity/test_random_shapes.py": 24,
    "tests/patches/model/test_experts.py": 24,
    "tests/planning/test_rank_parameters.py": 24,
    "tests/scan/diagnose/test_simulated_runs.py": 24,
    "tests/bad_input/test_processes.py": 24,
    "tests/training/health/test_shared_error.py": 24,
    "tests/checkpoint/test_run_lock.py": 24,
    "tests/patches/events/test_emitters.py": 23,
    "tests/parallel/test_context_parallel.py": 23,
    "tests/pipeline/execute/test_channels.py": 23,
    "tests/session/test_upstream.py": 23,
    "tests/backends/test_redirection.py": 22,
    "tests/fp8/test_output_layer.py": 22,
    "tests/session/test_order.py": 22,
    "tests/patching/test_rebind.py": 22,
    "tests/patches/device/test_process_groups.py": 22,
    "tests/scan/diagnose/test_links.py": 21,
    "tests/convert/rank_files/test_optimizer.py": 21,
    "tests/training/test_shared_embeddings.py": 21,
    "tests/scope/watch/test_oracle.py": 21,
    "tests/scope/web/test_fuzz.py": 21,
    "tests/patches/optimizer/test_fused_adam.py": 21,
    "tests/convert/hf/test_drawn_configs.py": 20,
    "tests/comm/shared_memory/test_shared_memory.py": 20,
    "tests/resume/test_loading.py": 20,
    "tests/patching/test_engine.py": 20,
    "tests/bad_input/test_generated.py": 20,
    "tests/pipeline/execute/test_executor.py": 19,
    "tests/layers/attention/test_packed.py": 19,
    "tests/planning/test_parameters.py": 19,
    "tests/planning/test_suggested_start.py": 14,
    "tests/comm/test_seam.py": 19,
    "tests/data/test_loading.py": 18,
    "tests/data/test_prepare.py": 18,
    "tests/scope/watch/test_identity.py": 18,
    "tests/seams/test_taps_ranks.py": 18,
    "tests/patches/optimizer/test_param_groups.py": 17,
    "tests/training/test_rampup.py": 17,
    "tests/data/test_index_cache.py": 16,
    "tests/layers/mtp/test_mtp.py": 16,
    "tests/training/health/test_nan_watch.py": 16,
    "tests/bad_input/test_command_line.py": 16,
    "tests/parity/test_huggingface.py": 16,
    "tests/cli/test_plan.py": 15,
    "tests/patches/errata/test_wrong_results.py": 15,
    "tests/layers/moe/test_router.py": 15,
    "tests/pipeline/execute/test_trainer.py": 15,
    "tests/scope/watch/test_sidecar.py": 15,
    "tests/test_fork_server.py": 15,
    "tests/scope/watch/test_cost.py": 15,
    "tests/training/architectures/test_context_parallel.py": 15,
    "tests/diverge/test_diverge.py": 14,
    "tests/fp8/test_state.py": 14,
    "tests/scope/sidecar/test_process.py": 14,
    "tests/scope/control/test_generate.py": 14,
    "tests/scope/web/test_security.py": 14,
    "tests/scope/lab/test_layouts.py": 14,
    "tests/fake_cuda/test_forward.py": 13,
    "tests/scan/record/test_device_spans.py": 13,
    "tests/convert/test_refusals.py": 13,
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
