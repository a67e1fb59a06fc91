"""Policies of Keyformer, CaM and SnapKV with one fault each: noise, temperature, merging, the observation window."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
from suspect_kit import altered, caught_by, with_slots

from veloxfn import cam, draws, keyformer, snapkv
from veloxfn.base import Policy
from veloxfn.retention import retire

# Noise


@caught_by("law_mass_ignores_grouping_below_budget")
def noise_by_call_order(budget: int) -> Policy:
    """The draw of a token is that of its place in the block."""
    config = keyformer.Config(budget=budget, sink=min(1, budget - 1), noise="additive", tau=2.0)
    policy = keyformer.policy(config)

    def absorb(state, keys, values, *, valid=None):
        absorbed = policy.absorb(state, keys, values, valid=valid)
        count = keys.shape[1]
        if count == 0:
            return absorbed
        places = mx.broadcast_to(mx.arange(count, dtype=mx.int32), (keys.shape[0], count))
        noise, fresh = np.array(absorbed.noise), np.array(draws.gumbel(config.seed, state.slots.streams, places))
        for row, slots in enumerate(np.array(absorbed.slots.arrived)):
            noise[row, slots[slots >= 0]] = fresh[row, slots >= 0]
        return absorbed._replace(noise=mx.array(noise))

    return altered(policy, absorb=absorb)


@caught_by("law_noise_differs_between_streams")
def noise_shared_between_rows(budget: int) -> Policy:
    policy = keyformer.policy(keyformer.Config(budget=budget, sink=min(1, budget - 1)))

    def evict(state, *, queries=None, attention=None):
        names = state.slots.streams
        done = policy.evict(with_slots(state, streams=mx.zeros_like(names)), queries=queries, attention=attention)
        return with_slots(done, streams=names)

    return altered(policy, evict=evict)


@caught_by("law_follows_the_oracle")
def noise_shared_between_seeds(budget: int) -> Policy:
    claimed = keyformer.Config(budget=budget, sink=min(1, budget - 1), seed=2**32 + 1)
    return keyformer.policy(replace(claimed, seed=1))._replace(config=claimed)


@caught_by("law_follows_the_oracle")
def temperature_frozen(budget: int) -> Policy:
    """A schedule is configured and tau_init used."""
    claimed = keyformer.Config(
        budget=budget, sink=min(1, budget - 1), tau_init=0.5, tau_end=4.0, anneal_steps=budget, noise="none"
    )
    return keyformer.policy(replace(claimed, tau_end=0.5))._replace(config=claimed)


@caught_by("law_follows_the_oracle")
def temperature_by_rank(budget: int) -> Policy:
    """The schedule starts again with every block: time is counted from the rows kept."""
    policy = keyformer.policy(
        keyformer.Config(budget=budget, sink=0, recent=0, noise="additive", tau_init=0.0, tau_end=8.0, anneal_steps=99)
    )

    def evict(state, *, queries=None, attention=None):
        done = policy.evict(state, queries=queries, attention=attention)
        if state.slots.arrived.shape[1] == 0:
            return done
        roomy = replace(policy.config, budget=10**4)
        scored = keyformer.evict(roomy, state, queries=queries)
        live = (scored.slots.positions >= 0).sum(axis=1, keepdims=True) - 1
        importance = scored.mass + keyformer.temperature(policy.config, live) * scored.noise
        return retire(scored, importance, policy.config)

    return altered(policy, evict=evict)


# Merging


def merging(budget: int, **settings) -> cam.Config:
    return cam.Config(**({"budget": budget, "sink": min(1, budget - 1), "target_count": 2} | settings))


@caught_by("law_merging_changes_values")
def gate_never_opens(budget: int) -> Policy:
    claimed = merging(budget)
    return cam.policy(replace(claimed, merge="off"))._replace(config=claimed)


@caught_by("law_gate_opens_as_often_as_it_says")
def gate_always_open(budget: int) -> Policy:
    claimed = merging(budget)
    return cam.policy(replace(claimed, gate=False))._replace(config=claimed)


def merged_by_hand(budget: int, choose) -> Policy:
    """CaM's window without a gate, in NumPy; `choose(loser, candidates, survivors)` names the target positions."""
    config = merging(budget, gate=False)
    off = cam.policy(replace(config, merge="off"))

    def evict(state, *, queries=None, attention=None):
        done = off.evict(state, queries=queries, attention=attention)
        if state.slots.arrived.shape[1] == 0:
            return done
        before, after = np.array(state.slots.positions), np.array(done.slots.positions)
        old, new = (np.array(each.slots.values.astype(mx.float32)) for each in (state, done))
        for row in range(len(before)):
            candidates = {int(p): old[row, slot] for slot, p in enumerate(before[row]) if p >= 0}
            slots = {int(p): slot for slot, p in enumerate(after[row]) if p >= 0}
            added, total = {p: np.zeros_like(old[row, 0]) for p in slots}, dict.fromkeys(slots, 1.0)
            for loser in sorted(set(candidates) - set(slots)):
                targets = choose(loser, sorted(candidates), sorted(slots))[: config.target_count]
                for target in targets:
                    if target in slots:
                        added[target] += candidates[loser] / len(targets)
                        total[target] += 1 / len(targets)
            for position, slot in slots.items():
                new[row, slot] = (new[row, slot] + added[position]) / total[position]
        return with_slots(done, values=mx.array(new).astype(state.slots.values.dtype))

    return altered(off._replace(config=config), evict=evict)


@caught_by("law_follows_the_oracle")
def merges_into_losers(budget: int) -> Policy:
    """What follows in time takes the loser, whether it stays or is lost by the same eviction."""
    return merged_by_hand(budget, lambda loser, candidates, survivors: [p for p in candidates if p > loser])


@caught_by("law_follows_the_oracle")
def merges_into_the_past(budget: int) -> Policy:
    """The sinks and other older survivors take the loser."""
    return merged_by_hand(budget, lambda loser, candidates, survivors: [p for p in survivors if p < loser])


def merges_rightly(budget: int) -> Policy:
    """The same code without a fault, so that the suspects above are caught for theirs."""
    return merged_by_hand(budget, lambda loser, candidates, survivors: [p for p in survivors if p > loser])


@caught_by("law_mass_is_handed_over")
def hand_over_missing(budget: int) -> Policy:
    config = merging(budget, targets="nearest", merge="mean", gate=False)
    policy, off = cam.policy(config), cam.policy(replace(config, merge="off"))

    def evict(state, *, queries=None, attention=None):
        done = policy.evict(state, queries=queries, attention=attention)
        return done._replace(mass=off.evict(state, queries=queries, attention=attention).mass)

    return altered(policy, evict=evict)


# The observation window


def observing(budget: int, importance) -> Policy:
    """SnapKV with `importance(means)` of the past slots' mean attention [m], in temporal order, in place of pooling."""
    config = snapkv.Config(budget=budget, sink=0, window=2, kernel=3)
    policy = snapkv.policy(config)

    def evict(state, *, queries=None, attention=None):
        policy.evict(state, queries=queries, attention=attention)  # its errors
        if state.slots.arrived.shape[1] == 0:
            return state
        scored = snapkv.evict(replace(config, budget=10**4), state, queries=queries)
        positions, means = np.array(scored.slots.positions), np.array(scored.window).mean(axis=1)
        worth = np.zeros_like(means)
        for row, seen in enumerate(np.array(scored.slots.seen)):
            past = np.flatnonzero((positions[row] >= 0) & (positions[row] < seen - config.window))
            past = past[np.argsort(positions[row, past])]
            worth[row, past] = importance(means[row, past])
        return retire(scored, mx.array(worth.astype(np.float32)), config)

    return altered(policy, evict=evict)


def pooled(means: np.ndarray, *, penalty: bool) -> np.ndarray:
    padded = np.pad(means, 1)
    real = np.pad(np.ones_like(means), 1)
    sums, counts = (x[:-2] + x[1:-1] + x[2:] for x in (padded, real))
    return sums / 3 if penalty else sums / counts


@caught_by("law_follows_the_oracle")
def edges_penalised(budget: int) -> Policy:
    """The kernel's slots beyond the first and the last token count as zeros."""
    return observing(budget, lambda means: pooled(means, penalty=True))


def pools_rightly(budget: int) -> Policy:
    """The same code without a fault."""
    return observing(budget, lambda means: pooled(means, penalty=False))


@caught_by("law_grouping_before_eviction_does_not_matter")
def window_of_the_chunk(budget: int) -> Policy:
    """Only queries of the last chunk are observed."""
    policy = snapkv.policy(snapkv.Config(budget=budget, sink=0, window=3, kernel=1))

    def evict(state, *, queries=None, attention=None):
        if state.slots.arrived.shape[1]:
            state = state._replace(window=mx.zeros_like(state.window))
        return policy.evict(state, queries=queries, attention=attention)

    return altered(policy, evict=evict)
