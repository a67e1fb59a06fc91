"""The reference: what each method keeps, in float64 NumPy, one row and one token at a time.

Four stages: score (how important is each candidate), select (which are lost), dispose (they are dropped, or merged into
survivors), place (the others keep their position, and are seen where the placement says). It is written from the
methods' definitions and shares no code with them; noise alone is taken from `veloxfn.draws`, as given data.

Matrix products round differently by block shape, so a library's choice is accepted when what it lost is within
`MARGIN`, relative, of what it could have lost instead; the oracle then follows it.
"""

from veloxfn.testing.oracle.budgets import dealt
from veloxfn.testing.oracle.rows import MARGIN, Row, Token, Vector, softmax, turned
from veloxfn.testing.oracle.scores import (
    SCORES,
    Score,
    score_h2o,
    score_keyformer,
    score_knorm,
    score_pyramidkv,
    score_snapkv,
    score_streaming_llm,
    score_tova,
    temperature,
)
from veloxfn.testing.oracle.stages import Oracle, Verdict, choose, replay

__all__ = [
    "MARGIN",
    "SCORES",
    "Oracle",
    "Row",
    "Score",
    "Token",
    "Vector",
    "Verdict",
    "choose",
    "dealt",
    "replay",
    "score_h2o",
    "score_keyformer",
    "score_knorm",
    "score_pyramidkv",
    "score_snapkv",
    "score_streaming_llm",
    "score_tova",
    "softmax",
    "temperature",
    "turned",
]
