"""Laws of noise: what it may depend on, and how it is distributed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from veloxfn import keyformer
from veloxfn.testing.claims import claims_for
from veloxfn.testing.drive import AnyPolicy, live_positions, run
from veloxfn.testing.oracle import softmax
from veloxfn.testing.streams import Stream, normal_stream

__all__ = [
    "law_noise_differs_between_streams",
    "law_noisy_weights_average_to_softmax",
    "law_seeds_and_streams_do_not_mix",
    "law_temperature_flattens",
]


def _alike(tokens: int, names: list[int], seed: int = 0) -> Stream:
    """The same keys and queries in rows of other names."""
    stream = normal_stream(seed, rows=1, tokens=tokens).only([0] * len(names))
    return replace(stream, names=np.array(names, dtype=np.uint32))


def law_noise_differs_between_streams(policy: AnyPolicy, *, names: tuple[int, ...] = (0, 1, 65536, 131073)) -> None:
    """Rows with the same keys keep other positions under every other name, and the same under the same.

    Lesson 6 (noise shared between heads, layers or batch places).
    """
    stream = _alike(12 * policy.config.budget, [*names, names[0]])
    *found, again = [row.tolist() for row in live_positions(run(policy, stream, claims_for(policy.config)))]
    assert found[0] == again, f"two rows of stream {names[0]} must keep the same, found {found[0]} and {again}"
    for first in range(len(names)):
        for second in range(first):
            assert found[first] != found[second], (
                f"streams {names[second]} and {names[first]} share their noise: both keep {found[first]}"
            )


def law_seeds_and_streams_do_not_mix(config: keyformer.Config) -> None:
    """(seed 0, stream 1) is other noise than (seed 1, stream 0), and every seed is other noise than the next.

    Lesson 6.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for seed in (0, 1):
        stream = _alike(12 * config.budget, [0, 1])
        rows = live_positions(run(keyformer.policy(replace(config, seed=seed)), stream))
        found |= {(seed, name): row.tolist() for name, row in enumerate(rows)}
    for one in found:
        for other in found:
            assert one == other or found[one] != found[other], (
                f"(seed, stream) {one} and {other} have the same noise: both keep {found[one]}"
            )


def _last_weights(config: keyformer.Config, stream: Stream) -> npt.NDArray[np.float64]:
    """What the last query of each row adds to the masses: [N, T]; nothing may be lost."""
    assert stream.tokens <= config.budget
    policy = keyformer.policy(config)
    before = run(policy, stream.head(1))
    after = run(policy, stream.tail(1), state=before)
    old = np.concatenate([np.array(before.mass), np.zeros((stream.rows, 1))], axis=1).astype(np.float64)
    added: npt.NDArray[np.float64] = np.array(after.mass) - old
    return added


def _asked(keys: npt.NDArray[np.float32], query: npt.NDArray[np.float32], rows: int) -> Stream:
    """Rows of keys [T, D], whose last token asks with `query` [D], under the names 0 .. rows - 1."""
    tokens = len(keys)
    queries = np.zeros((rows, 1, tokens, keys.shape[1]), dtype=np.float32)
    queries[:, 0, -1] = query
    return Stream(
        keys=np.repeat(keys[None], rows, axis=0),
        values=np.zeros((rows, tokens, 1), dtype=np.float32),
        queries=queries,
        valid=np.ones((rows, tokens), dtype=np.bool_),
        blocks=(tokens - 1, 1),
    )


def law_noisy_weights_average_to_softmax(
    keys: npt.NDArray[np.float32], query: npt.NDArray[np.float32], *, rows: int = 4000
) -> None:
    """At tau -> 0 a noisy row is 1 at one slot, and its mean over noise is the softmax row (Gumbel-max).

    Each frequency may be off by five standard deviations.
    """
    config = keyformer.Config(budget=len(keys), sink=0, recent=0, noise="logit", tau=1e-3)
    weights = _last_weights(config, _asked(keys, query, rows))
    sharp = float((weights.max(axis=1) > 0.99).mean())
    assert sharp > 0.95, f"at tau = 0.001 nearly every row is 1 at one slot, only {sharp:.3f} are"
    expected = softmax(keys.astype(np.float64) @ query / np.sqrt(keys.shape[1]))
    found, allowed = weights.mean(axis=0), 5 * np.sqrt(expected * (1 - expected) / rows) + 1e-4
    assert (np.abs(found - expected) <= allowed).all(), (
        f"over {rows} streams the mean row must be the softmax {expected.round(4)}, found {found.round(4)}"
    )


def law_temperature_flattens(keys: npt.NDArray[np.float32], query: npt.NDArray[np.float32], *, rows: int = 500) -> None:
    """The entropy of noisy rows rises with tau, up to that of the uniform row."""
    stream = _asked(keys, query, rows)
    entropies = []
    for tau in (0.01, 0.3, 1.0, 3.0, 100.0):
        config = keyformer.Config(budget=len(keys), sink=0, recent=0, noise="logit", tau=tau)
        weights = np.maximum(_last_weights(config, stream), 1e-12)
        entropies.append(float(-(weights * np.log(weights)).sum(axis=1).mean()))
    assert entropies == sorted(entropies), f"entropy must rise with tau, found {entropies}"
    assert entropies[0] < 0.1 * np.log(len(keys)), f"tau = 0.01 leaves one slot, found entropy {entropies[0]:.3f}"
    assert entropies[-1] > 0.99 * np.log(len(keys)), f"tau = 100 is all but uniform, found entropy {entropies[-1]:.3f}"
