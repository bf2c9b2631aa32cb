"""Tests that run with ``--all`` alone because they take long and the first lane keeps a smaller case.

By file, then by the beginning of a test's name; behind it: what of the same stays in the first lane. Tests
that prove the port and hardly ever fail carry the mark ``daily`` where they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TypeVar

_Case = TypeVar("_Case")

DAILY = os.environ.get("MT_MEGATRON_DAILY") == "1"
"""True when the second lane runs too."""


def of_lane(cases: Mapping[str, _Case], *first: str) -> dict[str, _Case]:
    """``cases`` of a table that share a launch: all with ``--all``, otherwise those named ``first``.
    Raises ``KeyError`` for a name that the table does not have."""
    for name in first:
        cases[name]
    return {name: cases[name] for name in cases if DAILY or name in first}


def lines_of_lane(cases: list[str], *first: str) -> list[str]:
    """Cases that have no name but their flags, as ``of_lane`` takes others: ``first`` are beginnings of some.
    Raises ``KeyError`` for a beginning that none has."""
    for each in first:
        if not any(_begins(case, each) for case in cases):
            raise KeyError(each)
    return [case for case in cases if DAILY or any(_begins(case, each) for each in first)]


def _begins(case: str, beginning: str) -> bool:
    # Without flags there is one case alone; every other begins with nothing too.
    return case.startswith(beginning) if beginning else not case


MOVED: dict[str, dict[str, str]] = {
    "tests/backends/test_flat_collectives.py": {
        "test_any_two_shapes_whose_elements_fit_over_emulated_mccl": "over Gloo",
    },
    "tests/backends/test_host_process.py": {
        "test_pages_of_freed_tensors_are_not_asked_for_again": "the process's other settings",
    },
    "tests/backends/test_loader_workers.py": {
        "test_without_the_patch_the_signal_ends_the_worker[USR1": "TERM",
        "test_workers_of_a_parent_that_died_early_end[fork": "signals and the end of forked workers",
    },
    "tests/backends/test_musa.py": {
        "test_the_visible_devices_of_musa": "a process without a device",
        "test_initialising_from_megatron": "one vendor's settings and the other's library",
    },
    "tests/backends/test_musa_refusals.py": {
        "test_each_refusal_names": "collectives of unequal sizes",
    },
    "tests/backends/test_musa_surface.py": {
        "test_the_emulator": "the backend's names are listed ones",
    },
    "tests/backends/test_redirection.py": {
        "test_every_factory_takes_every_spelling_of_the_device[patch": "imported first",
    },
    "tests/bad_input/test_mutations.py": {
        "test_every_check_is_needed": "the checks themselves, and the environment's",
        "test_the_control_itself_can_fail": "the checks themselves",
        "test_the_environment_checks_are_needed": "the checks themselves",
    },
    "tests/bad_input/test_processes.py": {
        "test_the_command_ends_with_one_message[--hidden-size 131072": "the other messages",
    },
    "tests/checkpoint/test_run_lock.py": {
        "test_on_nfs_too": "the lock on a local file system",
        "test_without_locks_a_number_that_another_process_has": "without locks the process is looked for",
    },
    "tests/cli/test_doctor.py": {
        "test_parts_are_named": "this machine, and installations that are broken",
        "test_another_megatron_core": "this machine, and installations that are broken",
    },
    "tests/cli/test_plan.py": {
        "test_suggestions_as_a_table": "suggestions as JSON",
        "test_the_table_has_expert_parallelism_where_there_are_experts": "test_suggest's mixture",
    },
    "tests/cli/test_pretrain.py": {
        "test_trains_under_torchrun_and_says_where_everything_is": "a launch script's run",
    },
    "tests/cli/test_run.py": {
        "test_a_test_suite_through_pytest": "scripts and modules",
        "test_the_scope_sees_the_backend": "a script without torchrun",
        "test_torch_may_be_there_before_us": "tests/session/test_order",
    },
    "tests/comm/test_device.py": {
        "test_emulated_musa[no pinned": "with pinned memory",
        "test_emulated_musa": "transports on the CPU",
    },
    "tests/config/test_field_kinds.py": {
        "test_options_of_the_function_change_logits": "every option is declared",
        "test_neutral_options_change_none": "every option is declared",
    },
    "tests/convert/hf/test_drawn_configs.py": {
        "test_drawn_configurations_are_converted_or_refused[qwen3]": "DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[qwen2]": "DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[qwen3_moe]": "DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[mixtral]": "DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[deepseek_v2]": "DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[llama": "DeepSeek-V3",
    },
    "tests/convert/test_models.py": {
        "test_starts_from_the_published_folder[llama --tensor": "on one rank",
    },
    "tests/convert/test_round_trip.py": {
        "test_comes_back_to_the_bit[qwen3_moe": "Llama, DeepSeek-V3",
        "test_comes_back_to_the_bit[deepseek_v2": "Llama, DeepSeek-V3",
        "test_comes_back_to_the_bit[mixtral": "Llama, DeepSeek-V3",
    },
    "tests/coverage_gate/test_cases.py": {
        "test_case": "the gate's tracer and points",
    },
    "tests/data/test_index_cache.py": {
        "test_what_a_killed_job_had_begun_is_made_anew": "jobs that take turns",
    },
    "tests/data/test_prepare.py": {
        "test_processes_that_start_together_prepare_once": "a preparation that is killed",
    },
    "tests/data/test_preprocess.py": {
        "test_a_tokenizer_is_trained_on_all_shards[.jsonl.gz": "plain shards",
        "test_memory_does_not_grow": "the bytes of several pieces",
        "test_the_bytes_are_megatrons[.jsonl.zst": "plain and gzip",
        "test_a_shard_that_was_damaged": "a run killed at any moment",
        "test_a_disk_that_is_really_full": "a full disk that is told",
        "test_an_interrupted_run_says_how_to_continue[15": "the other signal",
    },
    "tests/device/test_report.py": {
        "test_wrong_use_and_a_missing_device": "a dry run",
    },
    "tests/diverge/test_command.py": {
        "test_a_fault_in_imported_code_is_named": "the command's other faults",
    },
    "tests/diverge/test_diverge.py": {
        "test_the_same_run_twice_is_equal_to_the_bit": "the runs that part",
        "test_a_healthy_pair_has_no_finding[recompute": "the other pairs",
    },
    "tests/examples/test_emulated_musa.py": {
        "test_a_step_has_nothing_that_cards_refuse": "tests/backends/test_musa_refusals",
    },
    "tests/examples/test_launch.py": {
        "test_precision_is_changed_on_one_node_alone": "commands of dry runs",
        "test_variables_reach_the_command": "commands of dry runs",
        "test_wrong_use_ends_with_2_and_says_why[-changes1": "the model's name and the files'",
        "test_wrong_use_ends_with_2_and_says_why[-changes2": "the model's name and the files'",
        "test_wrong_use_ends_with_2_and_says_why[-changes3": "the model's name and the files'",
        "test_named_data_and_folders": "a file of one's own",
        "test_a_file_without_data": "a file of one's own",
        "test_a_printed_configuration": "a file of one's own",
    },
    "tests/examples/test_model_folders.py": {
        "test_another_model_can_be_chosen[qwen3": "of DeepSeek",
        "test_another_model_can_be_chosen[mixtral": "of DeepSeek",
        "test_dry_run_shows_the_command_and_changes_nothing[mixtral": "another model of DeepSeek",
        "test_dry_run_shows_the_command_and_changes_nothing[qwen3": "another model of DeepSeek",
        "test_a_model_of_another_folder": "llama3's wrong use",
        "test_dry_run_shows_the_command_and_changes_nothing[deepseekv3": "another model of DeepSeek",
    },
    "tests/fp8/test_numerics.py": {
        "test_the_plans_total_counts": "the operations that the plan counts",
    },
    "tests/fp8/test_output_layer.py": {
        "test_two_tensor_parallel_ranks": "one process",
        "test_a_tied_embedding_is_read": "an output layer of its own",
    },
    "tests/fp8/test_resume.py": {
        "test_a_resumed_run_continues_to_the_bit[delayed]": "delayed, gathered",
        "test_a_resumed_run_continues_to_the_bit[delayed-by-samples]": "delayed, gathered",
        "test_a_resumed_run_continues_to_the_bit[nvfp4]": "delayed, gathered",
        "test_between_bf16_and_recipes": "resumed runs",
        "test_another_layout_goes_on": "the same layout",
        "test_checkpoints_of_scripts": "runs of the trainer",
    },
    "tests/fp8/test_state.py": {
        "test_operands_from_gathered_codes_are_casts_of_all_rows": "inputs gathered in training",
    },
    "tests/fp8/test_training.py": {
        "test_what_changes_no_numbers[mixture recomputed": "a recomputed dense model",
        "test_grouped_and_single_experts_agree": "tests/fp8/test_grouped",
        "test_inputs_are_gathered_in_fp8[nvfp4]": "blockwise",
        "test_shared_scales_are_equal_to_the_bit_on_all_ranks[delayed dp2]": "tp2",
        "test_inputs_are_gathered_in_fp8[delayed]": "blockwise",
        "test_inputs_are_gathered_in_fp8[mxfp8]": "blockwise",
        "test_inputs_are_gathered_in_fp8[rowwise": "blockwise",
        "test_inputs_are_gathered_in_fp8[tensorwise]": "blockwise",
        "test_inputs_saved_in_fp8_are_gathered_alike[mxfp8]": "blockwise",
        "test_other_layouts_train[zero1": "a recomputed pipeline that trains",
        "test_parameters_are_gathered_as_codes[tensorwise]": "delayed",
        "test_pipeline_stages_change_nothing": "a recomputed pipeline that trains",
        "test_ranks_with_other_samples_may_have_scales_of_their_own": "shared scales",
        "test_recomputation_changes_nothing_in_a_pipeline_of_experts": "a recomputed pipeline that trains",
        "test_shared_scales_are_equal_to_the_bit_on_all_ranks[delayed ep2]": "tp2",
    },
    "tests/launching/test_two_nodes.py": {
        "test_two_hosts_train_together": "the commands of two nodes",
    },
    "tests/layers/loss/test_cross_entropy.py": {
        "test_padding_of_the_vocabulary_has_no_share[1-False": "two ranks",
        "test_losses_and_gradients_are_the_plain_paths[1-False": "two ranks",
        "test_losses_and_gradients_are_the_plain_paths[2-True": "two ranks",
        "test_memory_beside_weights": "losses and gradients",
        "test_padding_of_the_vocabulary_has_no_share[2-True": "two ranks with whole sequences",
    },
    "tests/layers/mla/test_self_attention.py": {
        "test_two_tensor_parallel_ranks_equal": "one process; DeepSeek-V3 over two (tests/parity)",
        "test_replicated_parameters_stay": "one process; DeepSeek-V3 over two (tests/parity)",
        "test_a_down_projection": "one process; DeepSeek-V3 over two (tests/parity)",
        "test_upstreams_sum_of_query": "one process; DeepSeek-V3 over two (tests/parity)",
        "test_replicated_parameters_begin": "one process; DeepSeek-V3 over two (tests/parity)",
        "test_checkpoints_load_at_another": "one process; DeepSeek-V3 over two (tests/parity)",
        "test_a_sequence_over_two": "one process; DeepSeek-V3 over two (tests/parity)",
    },
    "tests/models/test_layer_spec.py": {
        "test_local_means_local": "where it is installed",
        "test_an_obstacle_is_named": "where it is installed",
    },
    "tests/parallel/test_rank_layout.py": {
        "test_initialize_makes_these_groups": "the groups of Megatron's rank generator",
    },
    "tests/parity/test_huggingface.py": {
        "test_floating_point_operations": "counts by hand and of published models",
    },
    "tests/parity/test_layouts.py": {
        "test_layout_stays_close_in_bf16": "layouts in fp32",
        "test_bf16_learns": "layouts in fp32",
    },
    "tests/parity/test_mixtures.py": {
        "test_logits_and_gradients_are_hugging_faces[1234-qwen3_moe": "DeepSeek's",
        "test_logits_and_gradients_are_hugging_faces[1234-mixtral": "DeepSeek's",
        "test_logits_and_gradients_are_hugging_faces[1234-deepseek_v2": "DeepSeek-V3's",
    },
    "tests/parity/test_random_shapes.py": {
        "test_logits_and_gradients_are_hugging_faces[1234-tp1": "tp2",
    },
    "tests/patches/compat/test_checkpoint_compat.py": {
        "test_round_trip[zarr-bfloat16": "fp32",
    },
    "tests/patches/device/test_process_groups.py": {
        "test_no_group_is_left_to_the_interpreters_end[dist": "the end that destroys nothing",
        "test_no_group_is_left_to_the_interpreters_end[atexit": "the end that destroys nothing",
    },
    "tests/patches/model/test_experts.py": {
        "test_every_layout_is_one_rank_with_all_tokens[4": "two ranks",
    },
    "tests/patches/model/test_experts_checkpoint.py": {
        "test_every_number_arrives_where_it_belongs": "resumed runs with experts",
    },
    "tests/patches/model/test_moe_dispatch.py": {
        "test_dispatchers_agree_with_one_process[4": "two ranks",
    },
    "tests/patches/model/test_moe_model.py": {
        "test_a_shared_expert_computes_on_a_stream": "overlapped shared experts on the CPU",
        "test_dense_layers_stand_where_the_list_says[2": "one stage",
    },
    "tests/pipeline/policy/test_automatic.py": {
        "test_ranks_that_round_otherwise_go_on_without_adapting": "ranks with other options",
    },
    "tests/pipeline/policy/test_gain.py": {
        "test_it_gains_nothing_where": "the other histories",
    },
    "tests/planning/test_flops.py": {
        "test_torch_counts_the_same": "counts by hand and of published models",
    },
    "tests/planning/test_memory.py": {
        "test_the_worst_moment_is_predicted_to_four_percent": "what ranks hold",
        "test_the_worst_moment_with_experts_and_latents_is_predicted_to_a_tenth": "what ranks hold",
    },
    "tests/planning/test_parameters.py": {
        "test_closed_form_agrees_with_built_models[cpu": "on the meta device",
        "test_presets_agree_with_the_model": "closed forms of small models, published totals",
    },
    "tests/planning/test_rank_parameters.py": {
        "test_presets_agree_with_what_megatron_core_builds[deepseek_v2_lite": "the other presets",
        "test_presets_agree_with_what_megatron_core_builds[deepseek_v2]": "the other presets",
        "test_presets_agree_with_what_megatron_core_builds[deepseek_v3": "random models, ranks that add up",
    },
    "tests/planning/test_suggest.py": {
        "test_faster_machines_never_take_longer": "costs by hand",
        "test_more_memory_never_takes_a_layout_away": "the published clusters",
        "test_when_nothing_fits_it_says_what_would": "impossible questions",
        "test_mixtral_8x7b_has_its_experts_in_the_search": "Llama 3 70B",
        "test_what_is_suggested_for_experts_passes_validation": "Llama 3 70B",
        "test_a_busier_rank_needs_more_memory_and_time": "costs by hand",
    },
    "tests/resume/test_loading.py": {
        "test_what_lies_beside_a_checkpoint": "a byte that flipped, a rank that cannot write",
    },
    "tests/scan/diagnose/test_late_arrival.py": {
        "test_says_nothing_of_ten_thousand_steps": "shorter runs",
    },
    "tests/scan/diagnose/test_links.py": {
        "test_a_ring_within_and_between_nodes_names_a_hop_only_if_it_is_one[sending": "late and busy",
        "test_a_ring_within_and_between_nodes_names_a_hop_only_if_it_is_one[eager": "late and busy",
    },
    "tests/scan/diagnose/test_simulated_runs.py": {
        "test_drawn_faults_fit_their_jobs_and_repeat[host contention": "the other faults",
        "test_one_fault_is_found_and_no_other_claimed[slow_compute:rank=6": "a rank that slows down later",
        "test_one_fault_is_found_and_no_other_claimed[slow_link:ranks=2-3": "links that are late",
        "test_one_fault_is_found_and_no_other_claimed[slow_link:ranks=0-2": "a link between stages",
        "test_a_link_of_a_ring_that_nothing_is_like_is_found_though_it_was_always_slow[3-4": "the link 1-2",
        "test_a_slow_link_is_told_beside_a_member_that_its_host_hinders[True-load": "a quota",
        "test_a_slow_link_is_told_beside_a_member_that_its_host_hinders[False-load": "a quota",
    },
    "tests/scan/diagnose/test_standstill.py": {
        "test_a_process_that_is_done_with_its_steps_does_not_hang": "a machine that stood still",
    },
    "tests/scan/record/test_cost.py": {
        "test_times_with_a_long_tail": "the other judgements",
    },
    "tests/scan/record/test_device_spans.py": {
        "test_emulated_musa": "a device that stands in",
    },
    "tests/scan/respond/test_musa.py": {
        "test_the_selftest_measures_every_rank_and_pair": "the self-test on the CPU",
        "test_a_slow_rank_and_a_slow_link": "the rank with more work on the CPU",
    },
    "tests/scope/control/test_runs.py": {
        "test_random_pauses": "a run that is paused and stepped",
    },
    "tests/scope/lab/test_acting.py": {
        "test_acts_when_and_where": "from the next step on",
        "test_an_undo_concerns": "tests/scope/lab/test_undo",
    },
    "tests/scope/watch/test_cost.py": {
        "test_more_is_missed": "a restless machine",
        "test_a_collective_more": "a restless machine",
        "test_sidecars_are_judged": "a restless machine",
    },
    "tests/session/test_order.py": {
        "test_data_loader_workers[spawn": "workers that are forked",
        "test_all_is_applied_once_everything_is_imported[nothing": "everything imported",
        "test_no_holder_keeps_an_original[nothing": "everything imported",
        "test_patch_changes_something[nothing": "everything imported",
        "test_the_same_again_changes_nothing[nothing": "everything imported",
        "test_another_plan_on_top_is_refused[nothing": "everything imported",
        "test_every_attribute_is_what_it_was[nothing": "everything imported",
        "test_nothing_of_ours_is_left_behind[nothing": "everything imported",
        "test_no_target_is_taken_for_changed_by_others[nothing": "everything imported",
        "test_all_is_applied_once_everything_is_imported[half": "everything imported",
        "test_no_holder_keeps_an_original[half": "everything imported",
        "test_patch_changes_something[half": "everything imported",
        "test_the_same_again_changes_nothing[half": "everything imported",
        "test_another_plan_on_top_is_refused[half": "everything imported",
        "test_every_attribute_is_what_it_was[half": "everything imported",
        "test_nothing_of_ours_is_left_behind[half": "everything imported",
        "test_no_target_is_taken_for_changed_by_others[half": "everything imported",
    },
    "tests/session/test_patches_command.py": {
        "test_record_rewrites": "recorded lines are those of the digests",
    },
    "tests/session/test_upstream.py": {
        "test_the_environment_turns_drift_into_a_warning": "a changed token is an error",
        "test_comments_and_layout_are_no_drift": "a changed token",
        "test_a_tree_of_another_version_is_a_named_error_with_the_fix": "a changed token",
    },
    "tests/test_fork_server.py": {
        "test_a_fork_finds_what_a_cold_process_finds": "codes and outputs of commands",
        "test_forks_end_with_the_process_that_asked_for_them[servers of its own": "shared servers",
        "test_variables_that_imports_read_reach_them": "those that imports do not read",
    },
    "tests/test_soak.py": {
        "test_a_named_record_goes_on_where_it_stopped": "the record itself",
        "test_acceptance_volumes": "the record itself",
        "test_a_backend_selects": "the record itself",
    },
    "tests/training/architectures/test_context_parallel.py": {
        "test_a_checkpoint_moves_between_context_and_other_parallelism": "a mask of documents",
    },
    "tests/training/architectures/test_experts_resume.py": {
        "test_sizes_on_either_side": "a resumed run with experts",
    },
    "tests/training/architectures/test_multi_token_prediction.py": {
        "test_a_checkpoint_continues_on_other_stages": "losses and gradients by layout",
    },
    "tests/training/health/test_divergence.py": {
        "test_a_step_left_out_leaves_no_trace_in_fp8[skip": "a rollback",
    },
    "tests/training/health/test_nan_watch.py": {
        "test_one_process_names": "two ranks",
        "test_the_repeated_step_drops": "two ranks",
    },
    "tests/training/logging/test_moe_metrics.py": {
        "test_layers_of_every_stage_are_in_the_records": "records of one stage",
    },
    "tests/training/logging/test_output.py": {
        "test_a_resumed_run_appends_and_its_reader_can_tell": "records of one run",
    },
    "tests/training/test_loop.py": {
        "test_sigterm_saves_and_exits_with_0": "a launch script's SIGTERM",
        "test_a_checkpoint_continues_with_another_padding_of_the_vocabulary": "under other layouts",
        "test_a_save_that_fails": "a rank that cannot write (tests/resume)",
        "test_another_padding_under": "a checkpoint under other layouts",
    },
    "tests/training/test_stop_requests.py": {
        "test_each_request_saves_the_last_finished_step": "a launch script's SIGTERM",
    },
}


def unknown(nodeids: Iterable[str]) -> list[str]:
    """Entries of ``MOVED`` that none of ``nodeids`` begins with, of the files that some are of."""
    names: dict[str, list[str]] = {}
    for nodeid in nodeids:
        file, _, name = nodeid.partition("::")
        names.setdefault(file, []).append(name)
    return [
        f"{file}::{beginning}"
        for file, beginnings in MOVED.items()
        if file in names
        for beginning in beginnings
        if not any(name.startswith(beginning) for name in names[file])
    ]


def is_moved(nodeid: str) -> bool:
    """Whether the test of this id runs in the second lane alone."""
    file, _, name = nodeid.partition("::")
    return any(name.startswith(beginning) for beginning in MOVED.get(file, ()))
