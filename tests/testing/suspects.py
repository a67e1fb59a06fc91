"""Policies with one fault each, built around real ones; every factory maps a budget to a policy.

`SUSPECTS` names, for each, the law that must catch it; `suspects:NAME` is what `--policy` takes.
"""

import suspects_kept
import suspects_states
from suspect_kit import SUSPECTS

from veloxfn.testing.laws import law_grouping_does_not_matter, law_poison_stays_in_its_row

__all__ = ["ARGUMENTS", "SUSPECTS", "suspects_kept", "suspects_states"]

ARGUMENTS = {
    law_grouping_does_not_matter.__name__: lambda stream: ((stream.tokens,),),
    law_poison_stays_in_its_row.__name__: lambda stream: (0, stream.tokens // 2, float("nan")),
}

globals().update({name: factory for name, (factory, _) in SUSPECTS.items()})
