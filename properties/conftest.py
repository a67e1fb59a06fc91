"""Whom the laws run on, and how hard: `pytest properties [--policy module:factory] [--hypothesis-profile ci]`."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from veloxfn.testing.subjects import Subject, load_subject, registry

_SLOW_DRAWS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("dev", max_examples=5, deadline=None, suppress_health_check=_SLOW_DRAWS)
# Not derandomised, which has no database: Hypothesis nests the settings of a parametrised test once per case, and looks
# for the database through all of them, over a thousand here. `--hypothesis-seed=0` is deterministic, too.
settings.register_profile("ci", max_examples=15, deadline=None, suppress_health_check=_SLOW_DRAWS)
settings.register_profile("deep", max_examples=400, deadline=None, suppress_health_check=_SLOW_DRAWS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_configure(config: pytest.Config) -> None:
    """Somebody's own policy gets the thorough profile, unless one was asked for."""
    asked = os.environ.get("HYPOTHESIS_PROFILE") or config.getoption("--hypothesis-profile", None)
    target = config.getoption("--policy")
    if not target:
        return
    if not asked:
        settings.load_profile("ci")
    try:
        load_subject(target)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise pytest.UsageError(
            f"--policy {target}: {error} (modules are looked for in this folder and in those of PYTHONPATH)"
        ) from error


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--policy",
        metavar="package.module:factory",
        help="run every universal and claimed law on this policy instead of the package's own methods",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        target = metafunc.config.getoption("--policy", default=None)
        subjects: list[Subject] = [load_subject(target)] if target else registry()
        metafunc.parametrize("subject", subjects, ids=repr)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --policy, laws about this package's own methods are left out."""
    if not config.getoption("--policy", default=None):
        return
    here = os.path.dirname(__file__)
    kept, others = [], []
    for item in items:
        own = str(item.path).startswith(here) and "subject" not in getattr(item, "fixturenames", ())
        (others if own else kept).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept
