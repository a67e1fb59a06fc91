"""One choice at a time on a real model: merging, layer budgets, annealing.

    python benchmarks/ablations.py GROUP [--quick] [--texts N] [--seeds N] [--json FILE] [--plot FILE]

GROUP is one of
    merging     CaM's rules with the gate on and off, beside h2o, which drops the same losers
    layers      pyramids against uniform budgets of the same total rows
    squeeze     fewer rows for the layers that attention changes least, against uniform budgets of the same total rows
    annealing   Keyformer's temperature rising over the answer against constant ones, over seeds of the noise

Model, texts and KL are those of quality.py: 1024 tokens cut to 256 rows, then 64 one by one; two texts as one batch.
Every variant protects 4 sinks; half the budget is recent, or SnapKV's window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine
import merging
import quality
import reporting
from quality import Plan, Policies, Result

from veloxfn import budgets, cam, h2o, keyformer, pyramidkv, snapkv

FULL = Plan(continuation=64)
QUICK = quality.QUICK
ALL_BUT_ONE = "all but one recent"
# What `veloxfn_mlx_adapter.layer_cosines` measures over the first 1024 tokens of alice.
COSINES = (
    *(0.649, 0.842, 0.983, 0.989, 0.991, 0.990, 0.991, 0.990, 0.984, 0.989),
    *(0.986, 0.984, 0.988, 0.987, 0.987, 0.984, 0.978, 0.989, 0.985, 0.978),
    *(0.988, 0.974, 0.989, 0.983, 0.900, 0.992, 0.992, 0.989, 0.993, 0.992),
)
COLUMNS = ("variant", "KL to the full cache, nats", "same top token", "against", "difference in KL (95 %)")


class Variant(NamedTuple):
    """One line of a group: a cache for each seed, and the variant it is compared with."""

    name: str
    policies: list[Policies]
    against: str | None


def merging_group(plan: Plan, seeds: int) -> list[Variant]:
    """h2o, then every rule with the gate on and off; a plain sum takes one loser at a time, so its cadence is token."""
    shared = {"budget": plan.budget, "sink": plan.sink, "recent": plan.recent}
    variants = [Variant(merging.OFF, [quality.bound(h2o.Config(**shared))], None)]
    for rule, settings in merging.RULES.items():
        cadence = "block" if settings.get("normalise", True) else "token"
        for gate in (True, False):
            config = cam.Config(**shared, **settings, gate=gate, cadence=cadence)
            variants.append(Variant(f"{rule}, gate {'on' if gate else 'off'}", [quality.bound(config)], merging.OFF))
    # The authors' own setting: all rows but one are sinks and recent, one loser at a time, sums.
    shared["recent"] = plan.budget - plan.sink - 1
    own = cam.Config(**shared, normalise=False, cadence="token")
    return [
        *variants,
        Variant(ALL_BUT_ONE, [quality.bound(h2o.Config(**shared))], None),
        Variant(f"{ALL_BUT_ONE}, window, plain sum, gate on", [quality.bound(own)], ALL_BUT_ONE),
    ]


def layers_group(plan: Plan, seeds: int) -> list[Variant]:
    """SnapKV and h2o with the same rows in every layer, then as pyramids."""
    snap = snapkv.Config(budget=plan.budget, sink=plan.sink, window=plan.window)
    heavy = h2o.Config(budget=plan.budget, sink=plan.sink)  # half of each layer's budget is recent
    variants = [Variant("snapkv, uniform", [quality.bound(snap)], None)]
    for beta in (2.0, 5.0, 20.0):
        policies = quality.per_layer(pyramidkv.Config(layers=plan.layers, scorer=snap, beta=beta))
        variants.append(Variant(f"snapkv, beta {beta:g}", [policies], "snapkv, uniform"))
    variants.append(Variant("h2o, uniform", [quality.bound(heavy)], None))
    for taper in (1.25, 1.5, 1.9):
        policies = quality.per_layer(pyramidkv.Config(layers=plan.layers, scorer=heavy, taper=taper))
        variants.append(Variant(f"h2o, taper {taper:g}", [policies], "h2o, uniform"))
    return variants


def squeeze_group(plan: Plan, seeds: int) -> list[Variant]:
    """h2o with the same rows in every layer, then squeezed by the cosines of the model."""
    heavy = h2o.Config(budget=plan.budget, sink=plan.sink)  # half of each layer's budget is recent
    variants = [Variant("h2o, uniform", [quality.bound(heavy)], None)]
    for p in (0.8, 0.4):
        rows = budgets.squeeze(COSINES, plan.budget, p, floor=pyramidkv.least_budget(heavy))
        policies = [quality.bound(dataclasses.replace(heavy, budget=budget)) for budget in rows]
        variants.append(Variant(f"h2o, squeeze p {p:g}", [policies], "h2o, uniform"))
    return variants


def annealing_group(plan: Plan, seeds: int) -> list[Variant]:
    """Temperature 1 to 2 over the answer, as the paper's, against its ends held constant, noise on logits."""

    def drawn(**settings: Any) -> list[Policies]:
        shared = {"budget": plan.budget, "sink": plan.sink, "recent": plan.recent}
        return [quality.bound(keyformer.Config(**shared, **settings, seed=seed)) for seed in range(seeds)]

    schedule = {"tau_init": 1.0, "tau_end": 2.0, "anneal_steps": plan.continuation, "anneal_from": plan.context}
    annealed = "tau 1 to 2"
    return [
        Variant(annealed, drawn(**schedule), None),
        Variant("tau 1", drawn(tau=1.0), annealed),
        Variant("tau 2", drawn(tau=2.0), annealed),
        Variant("no noise, tau 1 (h2o)", drawn(tau=1.0, noise="none")[:1], annealed),
    ]


GROUPS: dict[str, Callable[[Plan, int], list[Variant]]] = {
    "merging": merging_group,
    "layers": layers_group,
    "squeeze": squeeze_group,
    "annealing": annealing_group,
}


class Outcome(NamedTuple):
    """A variant's results, one per seed."""

    variant: str
    against: str | None
    results: list[Result]

    @property
    def kl(self) -> list[float]:
        """KL of every seed and text."""
        return [kl for result in self.results for kl in result.kl]

    @property
    def mean_kl(self) -> float:
        """Average over seeds and texts."""
        return sum(self.kl) / len(self.kl)

    @property
    def agreement(self) -> float:
        """Share of equal top tokens, averaged likewise."""
        return sum(result.mean_agreement for result in self.results) / len(self.results)


def difference(outcome: Outcome, rival: Outcome) -> list[float]:
    """KL minus the rival's: over seeds where there are several, each averaged over the texts, else over the texts.

    A rival or an outcome without noise has one result, which stands against every seed of the other.
    """
    count = max(len(outcome.results), len(rival.results))
    mine, theirs = (each.results * (count // len(each.results)) for each in (outcome, rival))
    if count > 1:
        return [a.mean_kl - b.mean_kl for a, b in zip(mine, theirs, strict=True)]
    return [a - b for a, b in zip(mine[0].kl, theirs[0].kl, strict=True)]


def compared(outcome: Outcome, outcomes: Sequence[Outcome]) -> reporting.Interval | None:
    """The mean difference to the rival with its interval; None without a rival or with one pair only."""
    rivals = [other for other in outcomes if other.variant == outcome.against]
    if not rivals:
        return None
    values = difference(outcome, rivals[0])
    return reporting.mean(values) if len(values) > 1 else None


def line(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """An outcome as one line of the table."""
    interval = compared(outcome, outcomes)
    told = "" if interval is None else f"{interval.value:+.4f} ({interval.low:+.4f} to {interval.high:+.4f})"
    agreement = f"{100 * outcome.agreement:.1f} %"
    return reporting.row(outcome.variant, f"{outcome.mean_kl:.4f}", agreement, outcome.against or "", told)


def measure(model: Any, names: list[str], tokens: Any, variants: Sequence[Variant], plan: Plan) -> list[Outcome]:
    """All variants on the same texts, a table line each."""
    jobs = {(variant.name, seed): policies for variant in variants for seed, policies in enumerate(variant.policies)}
    told = quality.evaluate(model, names, tokens, {f"{name}: {seed}": job for (name, seed), job in jobs.items()}, plan)
    next(told)  # the full cache
    outcomes: list[Outcome] = []
    for variant in variants:
        outcomes.append(Outcome(variant.name, variant.against, [next(told) for _ in variant.policies]))
        print(line(outcomes[-1], outcomes), flush=True)
    return outcomes


def report(group: str, outcomes: Sequence[Outcome], plan: Plan) -> dict[str, Any]:
    """Everything measured, for the JSON file."""
    told = []
    for outcome in outcomes:
        interval = compared(outcome, outcomes)
        told.append(
            {
                "variant": outcome.variant,
                "against": outcome.against,
                "mean_kl": outcome.mean_kl,
                "agreement": outcome.agreement,
                "difference": None if interval is None else interval._asdict(),
                "texts": outcome.results[0].texts,
                "kl": [result.kl for result in outcome.results],
                "seconds": sum(result.seconds for result in outcome.results),
            }
        )
    return {"group": group, "plan": {**plan._asdict(), "recent": plan.recent}, "outcomes": told}


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Mean KL as bars, one dot per seed and text."""
    drawn, ((axes,),) = reporting.figure(1, 1, width=7, height=0.35 * len(outcomes) + 1.2)
    shown = list(reversed(outcomes))
    colours = ["#c9c9c9" if outcome.against is None else "#9bb8d3" for outcome in shown]
    axes.barh([outcome.variant for outcome in shown], [outcome.mean_kl for outcome in shown], color=colours)
    for place, outcome in enumerate(shown):
        axes.plot(outcome.kl, [place] * len(outcome.kl), "o", color="#1f3b57", markersize=4)
    axes.set_xlabel("KL to the full cache, nats (bar: mean, dots: texts and seeds; grey: compared with)")
    reporting.save(drawn, path)


def main(arguments: list[str] | None = None) -> None:
    parser = reporting.parser(__doc__, quick="one text, 384 tokens cut to 96 rows, 12 continued, two seeds")
    parser.add_argument("group", choices=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--texts", type=int, help="the first N texts (default 2; quick: 1)")
    parser.add_argument("--seeds", type=int, help="of the noise (default 4; quick: 2)")
    options = parser.parse_args(arguments)
    for name in ("texts", "seeds"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(options, name)}")
    plan = QUICK if options.quick else FULL
    variants = GROUPS[options.group](plan, options.seeds or (2 if options.quick else 4))
    model, names, tokens = quality.load(plan, count=options.texts or (1 if options.quick else 2))
    print(reporting.head(*COLUMNS))
    outcomes = measure(model, names, tokens, variants, plan)
    reporting.write(options.json, *quality.PACKAGES, **report(options.group, outcomes, plan))
    if options.plot:
        plot(outcomes, options.plot)


if __name__ == "__main__":
    machine.prefer_openblas()
    main()
