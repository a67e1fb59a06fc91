"""The laws of eviction: plain functions that raise AssertionError and say what was expected and what was found.

    law_budget_holds(policy, stream)          # one policy on one stream
    law_rows_may_be_reordered(policy, stream, claims)

`claims` may be left out for methods of this package. `UNIVERSAL` lists the laws every policy must obey on any stream,
`STANDALONE` those that bring their own stream; the laws in `claimed` check themselves whether they are claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from veloxfn.testing.laws.attention import law_attend_equals_evict, law_compiled_attend_equals_eager
from veloxfn.testing.laws.blocks import (
    law_candidate_mask,
    law_candidates,
    law_causal_attention,
    law_masked_attention,
    law_queries_see_all_before_them,
)
from veloxfn.testing.laws.budget import (
    law_budget_holds,
    law_does_not_freeze,
    law_kept_rows_are_bit_copies,
    law_nothing_lost_below_budget,
    law_protected_survive,
    law_state_over_budget_shrinks,
)
from veloxfn.testing.laws.claimed import (
    law_budgets_nest,
    law_content_does_not_matter,
    law_global_best,
    law_grouping_does_not_matter,
    law_path_independent,
)
from veloxfn.testing.laws.collapse import (
    law_collapses,
    law_grouping_before_eviction_does_not_matter,
    law_keeps_the_positions_of,
    law_pyramid,
)
from veloxfn.testing.laws.graph import (
    law_block_has_no_loop,
    law_graph_does_not_grow_with_rows,
    law_memory_is_flat,
    law_no_selection_below_budget,
    law_step_moves_no_rows,
)
from veloxfn.testing.laws.lattice import (
    law_attention_equals_queries,
    law_common_key_shift_changes_nothing,
    law_equal_keys_keep_the_newest,
    law_h2o_keeps_streaming_rows_plus_one,
    law_mass_counts_queries,
    law_mass_ignores_grouping_below_budget,
    law_retire_by_position_is_streaming_llm,
    law_retire_ranks_like_the_oracle,
)
from veloxfn.testing.laws.layout import (
    law_counts,
    law_get_kv_is_temporal,
    law_positions_name_arrivals,
    law_shapes_and_dtypes,
)
from veloxfn.testing.laws.merging import (
    law_gate_opens_as_often_as_it_says,
    law_mass_is_handed_over,
    law_merging_changes_values,
    law_value_mass_is_conserved,
)
from veloxfn.testing.laws.noise import (
    law_noise_differs_between_streams,
    law_noisy_weights_average_to_softmax,
    law_seeds_and_streams_do_not_mix,
    law_temperature_flattens,
)
from veloxfn.testing.laws.placement import (
    law_decoder_sees_no_gaps,
    law_eviction_closes_the_gap,
    law_placement_does_not_choose,
    law_rotated_blocks_may_be_regrouped,
    law_rotation_equals_the_model,
    law_rotations_compose,
    law_rounding_does_not_accumulate,
    law_unrotating_recovers_arrivals,
)
from veloxfn.testing.laws.poison import law_nan_never_saves_a_slot, law_poison_stays_in_its_row
from veloxfn.testing.laws.purity import (
    law_empty_block_is_a_no_op,
    law_errors_change_nothing,
    law_evict_is_idempotent,
    law_global_randomness_is_left_alone,
    law_inputs_are_untouched,
)
from veloxfn.testing.laws.reference import law_follows_the_oracle
from veloxfn.testing.laws.rows import (
    law_batch_equals_rows,
    law_concat_rows_round_trip,
    law_padding_is_invisible,
    law_rows_may_be_reordered,
)
from veloxfn.testing.laws.transforms import law_compiled_equals_eager, law_mapped_equals_looped

__all__ = [
    "STANDALONE",
    "UNIVERSAL",
    "law_attend_equals_evict",
    "law_attention_equals_queries",
    "law_batch_equals_rows",
    "law_block_has_no_loop",
    "law_budget_holds",
    "law_budgets_nest",
    "law_candidate_mask",
    "law_candidates",
    "law_causal_attention",
    "law_collapses",
    "law_common_key_shift_changes_nothing",
    "law_compiled_attend_equals_eager",
    "law_compiled_equals_eager",
    "law_concat_rows_round_trip",
    "law_content_does_not_matter",
    "law_counts",
    "law_decoder_sees_no_gaps",
    "law_does_not_freeze",
    "law_empty_block_is_a_no_op",
    "law_equal_keys_keep_the_newest",
    "law_errors_change_nothing",
    "law_evict_is_idempotent",
    "law_eviction_closes_the_gap",
    "law_follows_the_oracle",
    "law_gate_opens_as_often_as_it_says",
    "law_get_kv_is_temporal",
    "law_global_best",
    "law_global_randomness_is_left_alone",
    "law_graph_does_not_grow_with_rows",
    "law_grouping_before_eviction_does_not_matter",
    "law_grouping_does_not_matter",
    "law_h2o_keeps_streaming_rows_plus_one",
    "law_inputs_are_untouched",
    "law_keeps_the_positions_of",
    "law_kept_rows_are_bit_copies",
    "law_mapped_equals_looped",
    "law_masked_attention",
    "law_mass_counts_queries",
    "law_mass_ignores_grouping_below_budget",
    "law_mass_is_handed_over",
    "law_memory_is_flat",
    "law_merging_changes_values",
    "law_nan_never_saves_a_slot",
    "law_no_selection_below_budget",
    "law_noise_differs_between_streams",
    "law_noisy_weights_average_to_softmax",
    "law_nothing_lost_below_budget",
    "law_padding_is_invisible",
    "law_path_independent",
    "law_placement_does_not_choose",
    "law_poison_stays_in_its_row",
    "law_positions_name_arrivals",
    "law_protected_survive",
    "law_pyramid",
    "law_queries_see_all_before_them",
    "law_retire_by_position_is_streaming_llm",
    "law_retire_ranks_like_the_oracle",
    "law_rotated_blocks_may_be_regrouped",
    "law_rotation_equals_the_model",
    "law_rotations_compose",
    "law_rounding_does_not_accumulate",
    "law_rows_may_be_reordered",
    "law_seeds_and_streams_do_not_mix",
    "law_shapes_and_dtypes",
    "law_state_over_budget_shrinks",
    "law_step_moves_no_rows",
    "law_temperature_flattens",
    "law_unrotating_recovers_arrivals",
    "law_value_mass_is_conserved",
]

Law = Callable[..., Any]

UNIVERSAL: tuple[Law, ...] = (
    law_budget_holds,
    law_nothing_lost_below_budget,
    law_protected_survive,
    law_kept_rows_are_bit_copies,
    law_positions_name_arrivals,
    law_get_kv_is_temporal,
    law_counts,
    law_shapes_and_dtypes,
    law_batch_equals_rows,
    law_rows_may_be_reordered,
    law_concat_rows_round_trip,
    law_padding_is_invisible,
    law_inputs_are_untouched,
    law_evict_is_idempotent,
    law_empty_block_is_a_no_op,
    law_errors_change_nothing,
    law_global_randomness_is_left_alone,
    law_candidates,
    law_candidate_mask,
    law_queries_see_all_before_them,
    law_causal_attention,
    law_masked_attention,
    law_global_best,
    law_content_does_not_matter,
    law_follows_the_oracle,
    law_attend_equals_evict,
)
"""Called as law(policy, stream, claims)."""

STANDALONE: tuple[Law, ...] = (
    law_does_not_freeze,
    law_nan_never_saves_a_slot,
    law_step_moves_no_rows,
    law_no_selection_below_budget,
    law_block_has_no_loop,
    law_graph_does_not_grow_with_rows,
    law_compiled_equals_eager,
    law_compiled_attend_equals_eager,
    law_mapped_equals_looped,
    law_memory_is_flat,
)
"""Called as law(policy, claims=claims)."""
