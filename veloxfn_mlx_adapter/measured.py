"""Say so, with numbers, where a method is used in a way that was measured to lose more than random eviction."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from veloxfn import Retention, cam, h2o

__all__ = ["MeasuredWorse", "measured_worse", "warn_of"]


class MeasuredWorse(UserWarning):
    """A method is used in a way that was measured to lose more than random eviction."""


_told: set[str] = set()  # once in a process is enough

_PROXY = (
    'h2o with query_source="key_proxy" ranks by keys in place of queries, which was measured worse than evicting at '
    "random with the same sinks and recent window: KL to the full cache 0.131 against 0.096 nats (two texts), 0.121 "
    "against 0.089 (six texts), 0.042 against 0.034 (3000 tokens cut to 750 rows). With the model's queries h2o loses "
    "0.073, 0.052 and 0.015, age-normalised 0.051, 0.043 and 0.012"
)
_WINDOW = (
    'cam with targets="window", merge="{merge}" was measured worse than evicting at random with the same sinks and '
    "recent window: KL to the full cache 0.137 against 0.096 nats (two texts), 0.124 against 0.034 (3000 tokens cut to "
    '750 rows). h2o, which merges nothing, loses 0.073 and 0.015; targets="nearest", merge="similarity" 0.072 and 0.023'
)
_ONE_TEXT = {  # (normalise, gate): what ablations.py measured
    (True, True): "",
    (True, False): "; without the gate it loses 0.2817, with it 0.0598 (one text)",
    (False, True): "; with normalise=False it loses 0.4560, normalised 0.0598 (one text)",
    (False, False): "; with normalise=False and no gate it loses 4.1563, with both 0.0598 (one text)",
}
_SETTING = (
    " (SmolLM2-135M, 1024 tokens cut to 256 rows unless said otherwise: benchmarks/README.md). To silence: "
    'warnings.simplefilter("ignore", veloxfn_mlx_adapter.MeasuredWorse)'
)


def measured_worse(config: Retention) -> str | None:
    """What was measured against a method as it is configured.

    Args:
        config: of a method; that of a pyramid counts as its scorer's.

    Returns:
        One sentence with the figures where the method lost more than random eviction with the same protection on a real
        model; None where it did not, or was not measured.

    >>> measured_worse(h2o.Config()) is None
    True
    >>> measured_worse(h2o.Config(query_source="key_proxy"))[:35]
    'h2o with query_source="key_proxy" r'
    """
    config = getattr(config, "scorer", config)
    if isinstance(config, cam.Config) and config.merge in ("sum", "mean"):
        if config.targets != "window" or config.query_source != "true":
            return None
        return _WINDOW.format(merge=config.merge) + _ONE_TEXT[config.normalise, config.gate] + _SETTING
    merges = isinstance(config, cam.Config) and config.merge != "off"  # merging nothing, cam is h2o
    if isinstance(config, h2o.Config) and config.query_source == "key_proxy" and not merges:
        return _PROXY + _SETTING
    return None


def warn_of(configs: Iterable[Retention]) -> None:
    """Issue `MeasuredWorse` for those that were measured worse, once in a process for each way of use.

    It points to the code that called this package.
    """
    for text in {measured_worse(config): None for config in configs}:
        if text is not None and text not in _told:
            warnings.warn(text, MeasuredWorse, stacklevel=_outside())
            _told.add(text)


def _outside() -> int:
    """The `stacklevel` in `warn_of` of the first caller outside of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    return level
