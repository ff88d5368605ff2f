"""The tests that `make test-fast` leaves out, with the reason; `make test` runs them all."""

from __future__ import annotations

RUNTIMES = "computes in llama.cpp or an emulator, which `make test` installs"
MODELS = "runs models in transformers, torchao or MLX"
PROCESSES = "starts processes that import large packages"
KILLS = "kills runs at hundreds of points"
CLUSTERS = "starts a Ray cluster, and kills its nodes"
HUB = "waits for a server on the loopback, and for retries"
EXHAUSTIVE = "tries many values or cases; others of its module try some"

# Modules, and test functions: MODULE::FUNCTION. Paths are relative to tests/.
SLOW = {
    "architectures/test_architectures.py": MODELS,
    "card/test_card_loading.py": PROCESSES,
    "checkpoint/test_adapters.py": MODELS,
    "cli/test_cli.py::test_help_imports_nothing_heavy": PROCESSES,
    "cli/test_hostile.py::test_bad_input_gives_one_clear_line_and_changes_nothing": EXHAUSTIVE,
    "cli/test_interrupts.py": PROCESSES,
    "formats/test_codec_commands.py::test_awq_scales_are_searched_and_applied_for_any_codec": MODELS,
    "distributed/test_ray.py": CLUSTERS,
    "evaluate/test_eval_caches.py": MODELS,
    "evaluate/test_eval_command.py": MODELS,
    "evaluate/test_evaluate.py": MODELS,
    "evaluate/test_llama_cpp.py": MODELS,
    "targets/test_added_target.py": MODELS,
    "targets/test_integer_errors.py": MODELS,
    "targets/test_integer_runs.py": KILLS,
    "targets/test_mlx_export.py": MODELS,
    "targets/test_mlx_settings_absent.py": MODELS,
    "targets/test_torchao_export.py": MODELS,
    "targets/test_vllm_runs.py": PROCESSES,
    "test_frozen_bytes.py::test_bytes_are_those_that_were_frozen": EXHAUSTIVE,
    "generation/test_generate.py": MODELS,
    "hub/test_hub.py": HUB,
    "hub/test_hub_hostile.py": HUB,
    "loading/test_packed.py": MODELS,
    "models/test_optional_parts.py": EXHAUSTIVE,
    "checkpoint/test_structure.py::test_mlx_does_without_what_transformers_ignores": MODELS,
    "architectures/test_packed_architectures.py": MODELS,
    "loading/test_transformers.py": MODELS,
    "kv/test_on_codes.py": MODELS,
    "evaluate/test_bos.py::test_llama_cpp_reads_the_same_windows": RUNTIMES,
    "targets/test_gguf_export.py::test_stacks_and_hybrids_compute_what_the_master_does": RUNTIMES,
    "gguf/test_gguf_added_tokens.py::test_the_file_has_the_tokens_of_transformers": RUNTIMES,
    "gguf/test_gguf_drafts.py::test_draft_layers_are_blocks_behind_the_last_one": RUNTIMES,
    "gguf/test_gguf_encoders.py": RUNTIMES,
    "targets/test_position_matrix.py": RUNTIMES,
    "gguf/test_gguf_alone_encoders.py::test_a_head_that_is_not_the_embeddings": RUNTIMES,
    "gguf/test_gguf_logits.py": RUNTIMES,
    "gguf/test_gguf_other_writers.py::test_merges_of_characters_make_the_tokens_of_llama_cpp": RUNTIMES,
    "gguf/test_gguf_other_writers.py::test_text_is_split_as_llama_cpp_splits_it_by_other_names": RUNTIMES,
    "gguf/test_gguf_wholes.py": MODELS,
    "gguf/test_imatrix.py": RUNTIMES,
    "gguf/test_gguf_sentences.py::test_vectors_are_pooled_as_sentence_transformers_pools_them": RUNTIMES,
    "gguf/test_gguf_sentences.py::test_dense_layers_follow_the_pooling_of_embedding_gemma": RUNTIMES,
    "gguf/test_gguf_sentences.py::test_models_that_predict_text_give_vectors_if_their_files_say_so": RUNTIMES,
    "gguf/test_gguf_sentences.py::test_the_model_of_the_demo_embeds_as_sentence_transformers_does": RUNTIMES,
    "gguf/test_gguf_sources.py::test_a_file_is_calibrated_and_exported_from_as_the_model": RUNTIMES,
    "gguf/test_gguf_towers.py::test_llama_cpp_makes_of_an_image_what_transformers_does": RUNTIMES,
    "gguf/test_gguf_vocabulary.py::test_llama_cpp_makes_the_tokens_that_transformers_makes": RUNTIMES,
    "gguf/test_gguf_vocabulary.py::test_text_that_is_not_normalized_makes_other_tokens_with_a_normalizer": RUNTIMES,
    "gguf/test_gguf_vocabulary.py::test_special_tokens_take_spaces_behind_them_by_the_name_of_the_model": RUNTIMES,
    "gguf/test_gguf_vocabulary.py::test_all_tokens_that_end_a_generation_are_named": RUNTIMES,
    "gguf/test_gguf_vocabulary.py::test_the_ends_of_llama_3_1_have_their_meanings": RUNTIMES,
    "gguf/test_gguf_vocabulary.py::test_llama_cpp_knows_the_ends_that_it_is_taken_to_know": RUNTIMES,
    "gguf/test_mixes.py::test_types_are_those_of_llama_cpp": RUNTIMES,
    "gguf/test_mixes.py::test_types_in_layers_of_several_kinds_are_those_of_llama_cpp": RUNTIMES,
    "kernels/test_gguf_blocks.py::test_blocks_are_decoded_as_by_llama_cpp": RUNTIMES,
    "kernels/test_gguf_blocks.py::test_error_is_below_that_of_llama_cpp": RUNTIMES,
    "kernels/test_native.py::test_an_emulated_aarch64_computes_the_golden_bytes": RUNTIMES,
    "kernels/test_groups.py::test_every_family_has_finite_numbers_and_true_errors": EXHAUSTIVE,
    "kernels/test_kernels.py::test_a_special_block_does_not_change_the_others_of_its_group": EXHAUSTIVE,
    "kernels/test_kernels.py::test_every_finite_norm_decodes_alike": EXHAUSTIVE,
    "kernels/test_kernels.py::test_every_threshold_is_exact_to_within_an_ulp": EXHAUSTIVE,
    "calibrate/test_calibrate.py": MODELS,
    "calibrate/test_sampled_inputs.py": MODELS,
    "calibrate/test_sensitivity.py": MODELS,
    "planning/test_knapsack.py::test_a_thousand_groups_are_solved_to_within_a_thousandth": EXHAUSTIVE,
    "results/test_verify.py::test_flipped_byte_in_any_file_is_found": EXHAUSTIVE,
    "convert/test_finished_folders.py::test_overwriting_run_killed_at_any_call_resumes": KILLS,
    "convert/test_resuming.py::test_run_killed_at_any_call_resumes_to_the_same_folder": KILLS,
    "convert/test_resuming.py::test_kills_cover_every_state": KILLS,
    "convert/test_resuming.py::test_run_killed_at_random_moments_leaves_only_listed_files_and_resumes": KILLS,
    "convert/test_remote_resuming.py::test_run_killed_at_any_change_of_the_storage_resumes": KILLS,
    "convert/test_remote_resuming.py::test_run_that_replaces_another_is_killed_and_resumes": KILLS,
    "remote/test_results_on_server.py::test_run_that_loses_the_storage_is_continued": KILLS,
}


def is_slow(test: str) -> bool:
    """Return whether a module, or a test by its node id, is listed. test: relative to tests/."""
    module, _, function = test.partition("::")
    return module in SLOW or f"{module}::{function.partition('[')[0]}" in SLOW
