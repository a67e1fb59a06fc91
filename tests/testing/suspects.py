"""Policies with one fault each, built around real ones; every factory maps a budget to a policy.

`SUSPECTS` names, for each, the law that must catch it; `suspects:NAME` is what `--policy` takes.
"""

import suspects_kept
import suspects_methods
import suspects_states
from suspect_kit import SUSPECTS

from veloxfn.testing import laws, normal_stream
from veloxfn.testing.streams import split

__all__ = ["ARGUMENTS", "OWN_STREAMS", "SUSPECTS", "suspects_kept", "suspects_methods", "suspects_states"]

ARGUMENTS = {
    laws.law_grouping_does_not_matter.__name__: lambda stream: ((stream.tokens,),),
    laws.law_poison_stays_in_its_row.__name__: lambda stream: (0, stream.tokens // 2, float("nan")),
}


def _in_chunks(policy) -> None:
    tokens = policy.config.budget + 1
    stream = normal_stream(0, tokens=tokens, groups=2, blocks=(tokens,))
    laws.law_grouping_before_eviction_does_not_matter(policy, stream, (*split(tokens - 1, 2), 1))


def _below_budget(policy) -> None:
    stream = normal_stream(0, tokens=policy.config.budget)
    laws.law_mass_ignores_grouping_below_budget(policy, stream, [stream.tokens])


def _gate(policy) -> None:
    stream = normal_stream(0, rows=1, tokens=policy.config.budget + 1)
    laws.law_gate_opens_as_often_as_it_says(stream.keys[0], stream.queries[0, 0], policy, rows=500)


OWN_STREAMS = {
    "law_gate_opens_as_often_as_it_says": _gate,
    "law_grouping_before_eviction_does_not_matter": _in_chunks,
    "law_mass_ignores_grouping_below_budget": _below_budget,
    "law_mass_is_handed_over": lambda policy: laws.law_mass_is_handed_over(policy, normal_stream(0, tokens=40)),
    "law_merging_changes_values": laws.law_merging_changes_values,
    "law_noise_differs_between_streams": laws.law_noise_differs_between_streams,
}
"""Laws of some methods alone, on streams that suit them."""

globals().update({name: factory for name, (factory, _) in SUSPECTS.items()})
