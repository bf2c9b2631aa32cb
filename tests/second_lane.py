"""Tests that run with ``--all`` alone because they take long and the first lane keeps a smaller case.

By file, then by the beginning of a test's name; behind it: what of the same stays in the first lane. Tests
that prove the port and hardly ever fail carry the mark ``daily`` where they are.
"""

from __future__ import annotations

MOVED: dict[str, dict[str, str]] = {
    "tests/backends/test_flat_collectives.py": {
        "test_any_two_shapes_whose_elements_fit_over_emulated_mccl": "over Gloo",
    },
    "tests/backends/test_host_process.py": {
        "test_pages_of_freed_tensors_are_not_asked_for_again": "the process's other settings",
    },
    "tests/bad_input/test_mutations.py": {
        "test_every_check_is_needed": "the checks themselves, and the environment's",
        "test_the_control_itself_can_fail": "the checks themselves",
        "test_the_environment_checks_are_needed": "the checks themselves",
    },
    "tests/bad_input/test_processes.py": {
        "test_the_command_ends_with_one_message[--hidden-size 131072": "the other messages",
    },
    "tests/cli/test_plan.py": {
        "test_the_table_has_expert_parallelism_where_there_are_experts": "test_suggest's mixture",
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
        "test_drawn_configurations_are_converted_or_refused[qwen2]": "Llama, Qwen 3, DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[qwen3_moe]": "Llama, Qwen 3, DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[mixtral]": "Llama, Qwen 3, DeepSeek-V3",
        "test_drawn_configurations_are_converted_or_refused[deepseek_v2]": "Llama, Qwen 3, DeepSeek-V3",
    },
    "tests/convert/test_models.py": {
        "test_starts_from_the_published_folder[llama --tensor": "on one rank",
    },
    "tests/data/test_index_cache.py": {
        "test_what_a_killed_job_had_begun_is_made_anew": "jobs that take turns",
    },
    "tests/data/test_prepare.py": {
        "test_processes_that_start_together_prepare_once": "a preparation that is killed",
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
        "test_another_model_can_be_chosen[mixtral": "of DeepSeek and Qwen",
        "test_dry_run_shows_the_command_and_changes_nothing[mixtral": "DeepSeek's",
        "test_dry_run_shows_the_command_and_changes_nothing[qwen3": "DeepSeek's",
    },
    "tests/fp8/test_resume.py": {
        "test_a_resumed_run_continues_to_the_bit[delayed-by-samples]": "delayed, nvfp4, gathered",
        "test_another_layout_goes_on_with_the_same_scales[dp2-pp2]": "tp2 to dp2",
        "test_a_resumed_run_continues_to_the_bit[nvfp4]": "delayed and gathered",
        "test_between_bf16_and_recipes": "resumed runs",
    },
    "tests/fp8/test_state.py": {
        "test_operands_from_gathered_codes_are_casts_of_all_rows": "inputs gathered in training",
    },
    "tests/fp8/test_training.py": {
        "test_inputs_are_gathered_in_fp8[delayed]": "blockwise and nvfp4",
        "test_inputs_are_gathered_in_fp8[mxfp8]": "blockwise and nvfp4",
        "test_inputs_are_gathered_in_fp8[rowwise": "blockwise and nvfp4",
        "test_inputs_are_gathered_in_fp8[tensorwise]": "blockwise and nvfp4",
        "test_inputs_saved_in_fp8_are_gathered_alike[mxfp8]": "blockwise",
        "test_other_layouts_train": "the layouts of the other tests",
        "test_parameters_are_gathered_as_codes[tensorwise]": "delayed",
        "test_pipeline_stages_change_nothing": "a pipeline with recomputation",
        "test_ranks_with_other_samples_may_have_scales_of_their_own": "shared scales",
        "test_recomputation_changes_nothing_in_a_pipeline_of_experts[blockwise]": "delayed",
        "test_recomputation_changes_nothing_in_a_pipeline_of_experts[tensorwise]": "delayed",
        "test_shared_scales_are_equal_to_the_bit_on_all_ranks[delayed ep2]": "tp2 and dp2",
    },
    "tests/layers/loss/test_cross_entropy.py": {
        "test_losses_and_gradients_are_the_plain_paths[1-False": "two ranks",
        "test_losses_and_gradients_are_the_plain_paths[2-True": "two ranks",
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
    "tests/patches/model/test_experts_checkpoint.py": {
        "test_every_number_arrives_where_it_belongs": "resumed runs with experts",
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
    "tests/planning/test_rank_parameters.py": {
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
    "tests/scan/diagnose/test_simulated_runs.py": {
        "test_drawn_faults_fit_their_jobs_and_repeat[host contention": "the other faults",
    },
    "tests/scan/respond/test_musa.py": {
        "test_the_selftest_measures_every_rank_and_pair": "the self-test on the CPU",
    },
    "tests/scope/control/test_runs.py": {
        "test_random_pauses": "a run that is paused and stepped",
    },
    "tests/session/test_order.py": {
        "test_data_loader_workers[spawn": "workers that are forked",
        "test_all_is_applied_once_everything_is_imported[half": "nothing and everything imported",
    },
    "tests/session/test_upstream.py": {
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
    "tests/training/architectures/test_multi_token_prediction.py": {
        "test_a_checkpoint_continues_on_other_stages": "losses and gradients by layout",
    },
    "tests/training/logging/test_moe_metrics.py": {
        "test_layers_of_every_stage_are_in_the_records": "records of one stage",
    },
    "tests/training/logging/test_output.py": {
        "test_a_resumed_run_appends_and_its_reader_can_tell": "records of one run",
    },
    "tests/training/test_stop_requests.py": {
        "test_each_request_saves_the_last_finished_step": "SIGTERM, in test_loop",
    },
}


def is_moved(nodeid: str) -> bool:
    """Whether the test of this id runs in the second lane alone."""
    file, _, name = nodeid.partition("::")
    return any(name.startswith(beginning) for beginning in MOVED.get(file, ()))
