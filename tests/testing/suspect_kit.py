"""What the suspects are made with: real policies, and ways to alter them."""

from collections.abc import Callable
from functools import wraps

from veloxfn import knorm, streaming_llm
from veloxfn.base import Policy
from veloxfn.retention import retire
from veloxfn.testing import claims_for

SUSPECTS: dict[str, tuple[Callable[[int], Policy], str]] = {}


def caught_by(law: str, claims=claims_for):
    """Enter a factory into `SUSPECTS`, with the claims of the policy it pretends to be."""

    def enter(factory):
        factory.claims = claims
        SUSPECTS[factory.__name__] = (factory, law)
        return factory

    return enter


def low_norm(budget: int, **settings) -> Policy:
    return knorm.policy(knorm.Config(**({"budget": budget, "sink": min(1, budget - 1)} | settings)))


def window(budget: int, sink: int = 1) -> Policy:
    return streaming_llm.policy(streaming_llm.Config(budget=budget, sink=min(sink, budget - 1)))


def altered(policy: Policy, *, absorb=None, evict=None, **others) -> Policy:
    """The policy with `absorb` or `evict` replaced, and `update_batched` made of them."""
    absorb, evict = absorb or policy.absorb, evict or policy.evict

    def update_batched(state, keys, values, *, queries=None, attention=None, valid=None):
        return evict(absorb(state, keys, values, valid=valid), queries=queries, attention=attention)

    return policy._replace(absorb=absorb, evict=evict, update_batched=update_batched, **others)


def after_evict(policy: Policy, change) -> Policy:
    """The policy with `change(state)` applied to what a non-empty `evict` returns."""

    @wraps(policy.evict)
    def evict(state, *, queries=None, attention=None):
        done = policy.evict(state, queries=queries, attention=attention)
        return done if state.slots.arrived.shape[1] == 0 else change(done)

    return altered(policy, evict=evict)


def ranked_by(policy: Policy, importance) -> Policy:
    """The policy with another importance."""

    @wraps(policy.evict)
    def evict(state, *, queries=None, attention=None):
        policy.evict(state, queries=queries, attention=attention)  # its errors
        return state if state.slots.arrived.shape[1] == 0 else retire(state, importance(state), policy.config)

    return altered(policy, evict=evict)


def with_slots(state, **leaves):
    return state._replace(slots=state.slots._replace(**leaves))
