"""The ablations' arithmetic on made-up numbers, and that the variants of a group differ in one thing only."""

import dataclasses
import json

import ablations
import pytest
import quality

import veloxfn

PLAN = ablations.FULL


def result(kl):
    return quality.Result("x", ["a", "b"][: len(kl)], kl, [0.5] * len(kl), [9.0] * len(kl), 1.0)


def configs(policies):
    return [policies.config] if isinstance(policies, veloxfn.Policy) else [policy.config for policy in policies]


@pytest.mark.parametrize("group", ablations.GROUPS)
@pytest.mark.parametrize("plan", [ablations.FULL, ablations.QUICK], ids=["full", "quick"])
def test_every_variant_has_the_same_rows_and_sinks(group, plan):
    variants = ablations.GROUPS[group](plan, 2)
    names = [variant.name for variant in variants]
    assert len(set(names)) == len(names)
    for variant in variants:
        assert variant.against is None or variant.against in names
        for policies in variant.policies:
            layers = configs(policies)
            assert sum(config.budget for config in layers) == len(layers) * plan.budget
            assert {config.sink for config in layers} == {plan.sink}


def test_merging_pairs_every_rule_with_and_without_the_gate():
    off, *rest, plain, own = ablations.merging_group(PLAN, 1)
    assert [configs(each.policies[0])[0].recent_rows for each in (plain, own)] == [PLAN.budget - PLAN.sink - 1] * 2
    assert configs(off.policies[0])[0].recent_rows == PLAN.recent
    for on, without in zip(rest[::2], rest[1::2], strict=True):
        (gated,), (always,) = configs(on.policies[0]), configs(without.policies[0])
        assert gated.gate
        assert dataclasses.replace(gated, gate=False) == always


def test_pyramids_fall_from_layer_to_layer():
    for variant in ablations.layers_group(PLAN, 1):
        budgets = [config.budget for config in configs(variant.policies[0])]
        assert budgets == sorted(budgets, reverse=True)
        assert (len(budgets) > 1) == (variant.against is not None)
        assert len(set(budgets)) > 1 or variant.against is None


def test_squeezed_layers_are_those_that_attention_changes_least():
    uniform, mild, strong = ablations.squeeze_group(PLAN, 1)
    assert len(configs(uniform.policies[0])) == 1
    for variant, share in ((mild, 0.8), (strong, 0.4)):
        rows = [config.budget for config in configs(variant.policies[0])]
        useful = [layer for layer, row in enumerate(rows) if row > PLAN.budget]
        assert useful == [0, 1, 24]
        assert {row for row in rows if row < PLAN.budget} == {round(share * PLAN.budget)}


def test_seeds_of_the_noise_differ_and_the_schedule_follows_the_prompt():
    annealed, low, high, none = ablations.annealing_group(PLAN, 4)
    for variant in (annealed, low, high):
        assert [configs(policy)[0].seed for policy in variant.policies] == [0, 1, 2, 3]
    schedule = configs(annealed.policies[0])[0]
    assert (schedule.anneal_from, schedule.anneal_steps) == (PLAN.context, PLAN.continuation)
    assert schedule.temperatures == (
        configs(low.policies[0])[0].temperatures[0],
        configs(high.policies[0])[0].temperatures[0],
    )
    assert len(none.policies) == 1


def test_differences_are_taken_seed_by_seed_or_text_by_text():
    seeds = ablations.Outcome("a", None, [result([0.1, 0.3]), result([0.2, 0.6])])
    other = ablations.Outcome("b", "a", [result([0.3, 0.3]), result([0.2, 0.2])])
    assert ablations.difference(other, seeds) == pytest.approx([0.1, -0.2])
    single = ablations.Outcome("c", "a", [result([0.5, 0.5])])
    assert ablations.difference(single, seeds) == pytest.approx([0.3, 0.1])
    assert ablations.difference(single, ablations.Outcome("d", None, [result([0.1, 0.7])])) == pytest.approx(
        [0.4, -0.2]
    )
    interval = ablations.compared(other, [seeds, other])
    assert interval.value == pytest.approx(-0.05)
    assert interval.low < -0.05 < interval.high
    assert ablations.compared(seeds, [seeds, other]) is None


def test_the_report_is_json_and_the_figure_is_drawn(tmp_path):
    first = ablations.Outcome("a", None, [result([0.1, 0.3])])
    second = ablations.Outcome("b", "a", [result([0.2, 0.2])])
    told = json.loads(json.dumps(ablations.report("merging", [first, second], PLAN)))
    assert told["outcomes"][0]["difference"] is None
    assert told["outcomes"][1]["difference"]["value"] == pytest.approx(0.0)
    assert told["plan"]["recent"] == 128
    pytest.importorskip("matplotlib")
    ablations.plot([first, second], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_group_is_refused(capsys):
    with pytest.raises(SystemExit):
        ablations.main(["everything"])
    assert "invalid choice: 'everything'" in capsys.readouterr().err
