"""Verify an eviction method: streams, a float64 reference, claims and laws.

    from veloxfn.testing import Claims, check, laws, normal_stream

    check(my_policy, claims=Claims(needs_queries=True))     # every law, on a handful of fixed streams
    laws.law_budget_holds(my_policy, normal_stream(tokens=64), my_claims)

`veloxfn.testing.strategies` draws streams with Hypothesis; `pytest properties --policy package.module:factory` runs
everything on a policy of yours. Nothing in `veloxfn` itself imports this package.
"""

from veloxfn.testing import laws
from veloxfn.testing.checking import check
from veloxfn.testing.claims import CLAIMS, Claims, claims_for
from veloxfn.testing.oracle import MARGIN, Oracle, replay
from veloxfn.testing.streams import Block, Stream, fingerprint, normal_stream, uniform_stream

__all__ = [
    "CLAIMS",
    "MARGIN",
    "Block",
    "Claims",
    "Oracle",
    "Stream",
    "check",
    "claims_for",
    "fingerprint",
    "laws",
    "normal_stream",
    "replay",
    "uniform_stream",
]
