"""Tests that run with ``--all`` alone because they take long and the first lane keeps a smaller case.

By file, then by the beginning of a test's name; behind it: what of the same stays in the first lane. Tests
that prove the port and hardly ever fail carry the mark ``daily`` where they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
    "tests/cli/test_plan.py": {
        "test_suggestions_as_a_table": "suggestions as JSON",
        "test_the_table_has_expert_parallelism_where_there_are_experts": "test_suggest's mixture",
    },
    "tests/cli/test_pretrain.py": {
        "test_trains_under_torchrun_and_says_where_everything_is": "a launch script's run",
    },
    "tests/cli/test_run.py": {
        "test_a_test_suite_through_pytest": "scripts and modules",
    },
    "tests/comm/test_device.py": {
        "test_emulated_musa[no pinned": "with pinned memory",
    },
    "tests/config/test_field_kinds.py": {
        "test_options_of_the_function_change_logits": "every option is declared",
        "test_neutral_options_change_none": "every option is declared",
    },
    "tests/convert/hf/test_drawn_configs.py": {
        "test_drawn_configurations_are_converted_or_refused[qwen3]": "Llama, DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[qwen2]": "Llama, DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[qwen3_moe]": "Llama, DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[mixtral]": "Llama, DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[deepseek_v2]": "Llama, DeepSeek-V3",
    },
    "tests/convert/test_models.py": {
        "test_starts_from_the_published_folder[llama --tensor": "on one rank",
    },
    "tests/convert/test_round_trip.py": {
        "test_comes_back_to_the_bit[qwen3_moe": "Llama, Mixtral, DeepSeek-V3",
        "test_comes_back_to_the_bit[deepseek_v2": "Llama, Mixtral, DeepSeek-V3",
    },
    "tests/data/test_index_cache.py": {
        "test_what_a_killed_job_had_begun_is_made_anew": "jobs that take turns",
    },
    "tests/data/test_prepare.py": {
        "test_processes_that_start_together_prepare_once": "a preparation that is killed",
    },
    "tests/data/test_preprocess.py": {
        "test_a_tokenizer_is_trained_on_all_shards[.jsonl.gz": "plain shards",
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
        "test_wrong_use_ends_with_2_and_says_why[changes1": "the model's and Python's names",
        "test_wrong_use_ends_with_2_and_says_why[changes2": "the model's and Python's names",
        "test_wrong_use_ends_with_2_and_says_why[changes3": "the model's and Python's names",
        "test_precision_is_changed_on_one_node_alone": "commands of dry runs",
        "test_variables_reach_the_command": "commands of dry runs",
    },
    "tests/examples/test_model_folders.py": {
        "test_another_model_can_be_chosen[qwen3": "of DeepSeek",
        "test_another_model_can_be_chosen[mixtral": "of DeepSeek",
        "test_dry_run_shows_the_command_and_changes_nothing[mixtral": "DeepSeek's",
        "test_dry_run_shows_the_command_and_changes_nothing[qwen3": "DeepSeek's",
    },
    "tests/fp8/test_resume.py": {
        "test_a_resumed_run_continues_to_the_bit[delayed]": "delayed, gathered",
        "test_a_resumed_run_continues_to_the_bit[delayed-by-samples]": "delayed, gathered",
        "test_another_layout_goes_on_with_the_same_scales[dp2-pp2]": "tp2 to dp2",
        "test_a_resumed_run_continues_to_the_bit[nvfp4]": "delayed, gathered",
        "test_between_bf16_and_recipes": "resumed runs",
    },
    "tests/fp8/test_state.py": {
        "test_operands_from_gathered_codes_are_casts_of_all_rows": "inputs gathered in training",
    },
    "tests/fp8/test_training.py": {
        "test_what_changes_no_numbers[mixture recomputed": "recomputation in a pipeline of experts",
        "test_grouped_and_single_experts_agree": "tests/fp8/test_grouped",
        "test_inputs_are_gathered_in_fp8[nvfp4]": "blockwise",
        "test_shared_scales_are_equal_to_the_bit_on_all_ranks[delayed dp2]": "tp2",
        "test_inputs_are_gathered_in_fp8[delayed]": "blockwise",
        "test_inputs_are_gathered_in_fp8[mxfp8]": "blockwise",
        "test_inputs_are_gathered_in_fp8[rowwise": "blockwise",
        "test_inputs_are_gathered_in_fp8[tensorwise]": "blockwise",
        "test_inputs_saved_in_fp8_are_gathered_alike[mxfp8]": "blockwise",
        "test_other_layouts_train": "the layouts of the other tests",
        "test_parameters_are_gathered_as_codes[tensorwise]": "delayed",
        "test_pipeline_stages_change_nothing": "a pipeline with recomputation",
        "test_ranks_with_other_samples_may_have_scales_of_their_own": "shared scales",
        "test_recomputation_changes_nothing_in_a_pipeline_of_experts[blockwise]": "delayed",
        "test_recomputation_changes_nothing_in_a_pipeline_of_experts[tensorwise]": "delayed",
        "test_shared_scales_are_equal_to_the_bit_on_all_ranks[delayed ep2]": "tp2",
    },
    "tests/layers/loss/test_cross_entropy.py": {
        "test_padding_of_the_vocabulary_has_no_share[1-False": "two ranks",
        "test_losses_and_gradients_are_the_plain_paths[1-False": "two ranks",
        "test_losses_and_gradients_are_the_plain_paths[2-True": "two ranks",
    },
    "tests/parallel/test_rank_layout.py": {
        "test_initialize_makes_these_groups[sizes1": "another layout",
    },
    "tests/parity/test_layouts.py": {
        "test_layout_stays_close_in_bf16[1234-recompute": "the other layouts",
    },
    "tests/parity/test_mixtures.py": {
        "test_logits_and_gradients_are_hugging_faces[1234-qwen3_moe": "DeepSeek's",
        "test_logits_and_gradients_are_hugging_faces[1234-mixtral": "DeepSeek's",
    },
    "tests/parity/test_random_shapes.py": {
        "test_logits_and_gradients_are_hugging_faces[1234-tp1": "tp2",
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
    "tests/pipeline/policy/test_automatic.py": {
        "test_ranks_that_round_otherwise_go_on_without_adapting": "ranks with other options",
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
    },
    "tests/planning/test_rank_parameters.py": {
        "test_presets_agree_with_what_megatron_core_builds[deepseek_v2_lite": "the other presets",
        "test_presets_agree_with_what_megatron_core_builds[deepseek_v2]": "the other presets",
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
    "tests/scan/diagnose/test_links.py": {
        "test_a_ring_within_and_between_nodes_names_a_hop_only_if_it_is_one[sending": "late and busy",
        "test_a_ring_within_and_between_nodes_names_a_hop_only_if_it_is_one[eager": "late and busy",
    },
    "tests/scan/diagnose/test_simulated_runs.py": {
        "test_drawn_faults_fit_their_jobs_and_repeat[host contention": "the other faults",
    },
    "tests/scan/diagnose/test_standstill.py": {
        "test_a_process_that_is_done_with_its_steps_does_not_hang": "a machine that stood still",
    },
    "tests/scan/respond/test_musa.py": {
        "test_the_selftest_measures_every_rank_and_pair": "the self-test on the CPU",
    },
    "tests/scope/control/test_runs.py": {
        "test_random_pauses": "a run that is paused and stepped",
    },
    "tests/session/test_order.py": {
        "test_all_is_applied_once_everything_is_imported[nothing": "everything imported",
        "test_data_loader_workers[spawn": "workers that are forked",
        "test_all_is_applied_once_everything_is_imported[half": "everything imported",
    },
    "tests/session/test_upstream.py": {
        "test_the_environment_turns_drift_into_a_warning": "a changed token is an error",
        "test_comments_and_layout_are_no_drift": "a changed token",
        "test_a_tree_of_another_version_is_a_named_error_with_the_fix": "a changed token",
    },
    "tests/test_fork_server.py": {
        "test_a_fork_finds_what_a_cold_process_finds": "codes and outputs of commands",
        "test_forks_end_with_the_process_that_asked_for_them": "commands that take too long",
        "test_variables_that_imports_read_reach_them": "those that imports do not read",
    },
    "tests/test_soak.py": {
        "test_a_named_record_goes_on_where_it_stopped": "the record itself",
    },
    "tests/training/architectures/test_context_parallel.py": {
        "test_a_checkpoint_moves_between_context_and_other_parallelism": "a mask of documents",
    },
    "tests/training/architectures/test_multi_token_prediction.py": {
        "test_a_checkpoint_continues_on_other_stages": "losses and gradients by layout",
    },
    "tests/training/logging/test_moe_metrics.py": {
        "test_layers_of_every_stage_are_in_the_records": "records of one stage",
    },
    "tests/training/logging/test_output.py": {
        "test_a_resumed_run_appends_and_its_reader_can_tell": "records of one run",
    },
    "tests/training/test_loop.py": {
        "test_sigterm_saves_and_exits_with_0": "a launch script's SIGTERM",
        "test_a_checkpoint_continues_with_another_padding_of_the_vocabulary": "what is refused of it",
    },
    "tests/training/test_stop_requests.py": {
        "test_each_request_saves_the_last_finished_step": "a launch script's SIGTERM",
    },
}


def is_moved(nodeid: str) -> bool:
    """Whether the test of this id runs in the second lane alone."""
    file, _, name = nodeid.partition("::")
    return any(name.startswith(beginning) for beginning in MOVED.get(file, ()))
