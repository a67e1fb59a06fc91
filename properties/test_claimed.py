"""Laws that hold where a method claims them."""

from hypothesis import given
from hypothesis import strategies as st

from veloxfn.testing import laws, normal_stream
from veloxfn.testing.strategies import groupings, key_dims, streams
from veloxfn.testing.subjects import Subject


def _draw_two_groupings(data: st.DataObject, subject: Subject, *, padded: bool):
    budget = data.draw(st.sampled_from(subject.budgets), label="budget")
    policy = subject.make(budget)
    drawn = streams(
        budget=budget,
        row_multiple=policy.config.shared_heads,
        padded=padded,
        min_tokens=1,
        dims=key_dims(policy.config),
    )
    stream = data.draw(drawn, label="stream")
    return policy, stream, data.draw(groupings(stream.tokens, budget=budget), label="other blocks")


@given(data=st.data())
def test_grouping_does_not_matter(subject: Subject, data: st.DataObject) -> None:
    policy, stream, blocks = _draw_two_groupings(data, subject, padded=data.draw(st.booleans()))
    laws.law_grouping_does_not_matter(policy, stream, blocks, subject.claims(policy))


@given(data=st.data())
def test_grouping_does_not_matter_on_normal_streams(subject: Subject, data: st.DataObject) -> None:
    budget = data.draw(st.sampled_from(subject.budgets), label="budget")
    policy = subject.make(budget)
    tokens = data.draw(st.integers(1, 4 * budget + 6), label="tokens")
    one, other = (data.draw(groupings(tokens, budget=budget), label="blocks") for _ in range(2))
    seed = data.draw(st.integers(0, 2**32 - 1), label="seed")
    stream = normal_stream(seed, rows=policy.config.shared_heads, tokens=tokens, blocks=one)
    laws.law_grouping_does_not_matter(policy, stream, other, subject.claims(policy))


@given(data=st.data())
def test_path_independence(subject: Subject, data: st.DataObject) -> None:
    policy, stream, blocks = _draw_two_groupings(data, subject, padded=data.draw(st.booleans()))
    laws.law_path_independent(policy, stream, blocks, subject.claims(policy))


@given(data=st.data())
def test_budgets_nest(subject: Subject, data: st.DataObject) -> None:
    if subject.fixed is not None:
        return
    policy, stream, _ = _draw_two_groupings(data, subject, padded=False)
    budget = policy.config.budget
    if subject.accepts(budget + 1):
        laws.law_budgets_nest(subject.make, stream, budget, subject.claims(policy))
