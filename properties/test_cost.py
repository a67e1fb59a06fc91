"""Laws that bring their own stream: freezing, NaN, and what a step costs."""

from collections.abc import Callable

import pytest

from veloxfn.testing import laws
from veloxfn.testing.subjects import Subject


@pytest.mark.parametrize("law", laws.STANDALONE, ids=lambda law: law.__name__)
def test_standalone_law(law: Callable[..., None], subject: Subject) -> None:
    policy = subject.make(subject.roomy)
    law(policy, claims=subject.claims(policy))
