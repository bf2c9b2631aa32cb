"""Tests that run with ``--all`` alone because they take long and the first lane keeps a smaller case.

By file, then by the beginning of a test's name; behind it: what of the same stays in the first lane. Tests
that prove the port and hardly ever fail carry the mark ``daily`` where they are.
"""

from __future__ import annotations

MOVED: dict[str, dict[str, str]] = {
    "tests/backends/test_flat_collectives.py": {
        "test_any_two_shapes_whose_elements_fit_over_emulated_mccl": "over Gloo",
    },
    "tests/bad_input/test_mutations.py": {
        "test_every_check_is_needed": "the checks themselves, and the environment's",
    },
    "tests/cli/test_plan.py": {
        "test_the_table_has_expert_parallelism_where_there_are_experts": "test_suggest's mixture",
    },
    "tests/config/test_field_kinds.py": {
        "test_options_of_the_function_change_logits": "every option is declared",
        "test_neutral_options_change_none": "every option is declared",
    },
    "tests/diverge/test_diverge.py": {
        "test_the_same_run_twice_is_equal_to_the_bit": "the runs that part",
    },
    "tests/examples/test_launch.py": {
        "test_wrong_use_ends_with_2_and_says_why[changes1": "the model's and Python's names",
        "test_wrong_use_ends_with_2_and_says_why[changes2": "the model's and Python's names",
        "test_wrong_use_ends_with_2_and_says_why[changes3": "the model's and Python's names",
    },
    "tests/examples/test_model_folders.py": {
        "test_another_model_can_be_chosen[mixtral": "of DeepSeek and Qwen",
        "test_dry_run_shows_the_command_and_changes_nothing[mixtral": "DeepSeek's",
        "test_dry_run_shows_the_command_and_changes_nothing[qwen3": "DeepSeek's",
    },
    "tests/fp8/test_resume.py": {
        "test_a_resumed_run_continues_to_the_bit[delayed-by-samples]": "delayed, nvfp4, gathered",
        "test_another_layout_goes_on_with_the_same_scales[dp2-pp2]": "tp2 to dp2",
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
    "tests/planning/test_suggest.py": {
        "test_faster_machines_never_take_longer": "costs by hand",
        "test_more_memory_never_takes_a_layout_away": "the published clusters",
        "test_when_nothing_fits_it_says_what_would": "impossible questions",
    },
    "tests/scope/control/test_runs.py": {
        "test_random_pauses": "a run that is paused and stepped",
    },
    "tests/session/test_order.py": {
        "test_data_loader_workers[spawn": "workers that are forked",
    },
    "tests/test_fork_server.py": {
        "test_a_fork_finds_what_a_cold_process_finds": "codes and outputs of commands",
        "test_forks_end_with_the_process_that_asked_for_them": "commands that take too long",
        "test_variables_that_imports_read_reach_them": "those that imports do not read",
    },
}


def is_moved(nodeid: str) -> bool:
    """Whether the test of this id runs in the second lane alone."""
    file, _, name = nodeid.partition("::")
    return any(name.startswith(beginning) for beginning in MOVED.get(file, ()))
