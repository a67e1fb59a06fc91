"""Every universal law on every policy, over streams on an exact grid."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veloxfn.testing import laws, normal_stream
from veloxfn.testing.strategies import groupings, key_dims, poisons, streams
from veloxfn.testing.subjects import Subject


@pytest.mark.parametrize("law", laws.UNIVERSAL, ids=lambda law: law.__name__)
@given(data=st.data())
def test_law_on_grid_streams(law: Callable[..., None], subject: Subject, data: st.DataObject) -> None:
    budget = data.draw(st.sampled_from(subject.budgets), label="budget")
    policy = subject.make(budget)
    shared = policy.config.shared_heads
    padded = data.draw(st.booleans(), label="padded")
    drawn = streams(budget=budget, row_multiple=shared, padded=padded, dims=key_dims(policy.config))
    stream = data.draw(drawn, label="stream")
    law(policy, stream, subject.claims(policy))


@given(data=st.data())
def test_oracle_on_normal_streams(subject: Subject, data: st.DataObject) -> None:
    budget = data.draw(st.sampled_from(subject.budgets), label="budget")
    policy = subject.make(budget)
    rows, tokens = 2 * policy.config.shared_heads, data.draw(st.integers(1, 4 * budget + 6), label="tokens")
    stream = normal_stream(
        data.draw(st.integers(0, 2**32 - 1), label="seed"),
        rows=rows,
        tokens=tokens,
        groups=data.draw(st.integers(1, 3), label="groups"),
        blocks=data.draw(groupings(tokens, budget=budget), label="blocks"),
    )
    laws.law_follows_the_oracle(policy, stream, subject.claims(policy))


@given(data=st.data())
def test_poison_stays_in_its_row(subject: Subject, data: st.DataObject) -> None:
    """Lesson 12."""
    budget = data.draw(st.sampled_from(subject.budgets), label="budget")
    policy = subject.make(budget)
    drawn = streams(
        budget=budget,
        row_multiple=policy.config.shared_heads,
        min_rows=2,
        min_tokens=1,
        dims=key_dims(policy.config),
    )
    stream = data.draw(drawn, label="stream")
    row = data.draw(st.integers(0, stream.rows - 1), label="row")
    column = data.draw(st.integers(0, stream.tokens - 1), label="column")
    number = data.draw(poisons(), label="number")
    laws.law_poison_stays_in_its_row(policy, stream, row, column, number, subject.claims(policy))
