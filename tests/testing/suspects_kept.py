"""Policies that keep the wrong rows, or let rows look at each other; one fault each."""

from dataclasses import replace

import mlx.core as mx
from suspect_kit import altered, caught_by, low_norm, ranked_by, window

from veloxfn import h2o
from veloxfn.base import Policy
from veloxfn.testing import claims_for


@caught_by("law_protected_survive")
def sink_ignored(budget: int) -> Policy:
    claimed = low_norm(budget, sink=min(2, budget - 1))
    return low_norm(budget, sink=0)._replace(config=claimed.config)


@caught_by("law_protected_survive")
def recent_ignored(budget: int) -> Policy:
    claimed = low_norm(budget, sink=0, recent=budget // 2)
    return low_norm(budget, sink=0)._replace(config=claimed.config)


@caught_by("law_global_best")
def tie_flipped(budget: int) -> Policy:
    """Equal norms lose the newest."""
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: -state.norms - 1e-4 * state.slots.positions)


@caught_by("law_budget_holds")
def one_row_too_many(budget: int) -> Policy:
    return low_norm(budget + 1)._replace(config=low_norm(budget).config)


@caught_by("law_nothing_lost_below_budget")
def one_row_too_few(budget: int) -> Policy:
    return low_norm(max(1, budget - 1), sink=0)._replace(config=low_norm(budget, sink=0).config)


@caught_by("law_does_not_freeze")
def frozen(budget: int) -> Policy:
    """Every arrival is the weakest."""
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: -state.slots.positions.astype(mx.float32))


@caught_by("law_follows_the_oracle")
def strongest_head(budget: int) -> Policy:
    """Heads are combined by their sum, not their mean: the same order here, other masses."""
    policy = h2o.policy(h2o.Config(budget=budget, sink=min(1, budget - 1)))

    def evict(state, *, queries=None, attention=None):
        done = policy.evict(state, queries=queries, attention=attention)
        if queries is None or queries.shape[2] == 0:
            return done
        return done._replace(mass=done.mass * queries.shape[1])

    return altered(policy, evict=evict)


@caught_by("law_grouping_does_not_matter", lambda config: replace(claims_for(config), split_invariant=True))
def claims_too_much(budget: int) -> Policy:
    return h2o.policy(h2o.Config(budget=budget, sink=0))


@caught_by("law_content_does_not_matter", lambda config: replace(claims_for(config), content_independent=True))
def secretly_looks_at_keys(budget: int) -> Policy:
    return low_norm(budget)


@caught_by("law_nan_never_saves_a_slot")
def nan_saves_a_slot(budget: int) -> Policy:
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: mx.where(mx.isnan(state.norms), mx.inf, -state.norms))


# Rows


@caught_by("law_batch_equals_rows")
def rows_leak(budget: int) -> Policy:
    """Norms are centred over the batch."""
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: state.norms.mean(axis=0, keepdims=True) - 2 * state.norms)


@caught_by("law_poison_stays_in_its_row")
def poison_spreads(budget: int) -> Policy:
    """Norms are divided by the largest of the batch."""
    policy = low_norm(budget)
    return ranked_by(policy, lambda state: -state.norms / mx.maximum(state.norms.max(), 1e-6))


@caught_by("law_counts")
def padding_counts(budget: int) -> Policy:
    policy = window(budget)
    return altered(policy, absorb=lambda state, keys, values, *, valid=None: policy.absorb(state, keys, values))
