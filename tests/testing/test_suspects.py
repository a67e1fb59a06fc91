"""The laws catch every policy with a fault, through each entry point that third parties have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from suspects import ARGUMENTS, OWN_STREAMS, SUSPECTS
from suspects_methods import merges_rightly, pools_rightly

import veloxfn
from veloxfn.testing import check, laws
from veloxfn.testing.checking import sample_streams
from veloxfn.testing.subjects import load_subject

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", SUSPECTS)
def test_the_named_law_catches_it(name: str) -> None:
    _, law_name = SUSPECTS[name]
    subject = load_subject(f"suspects:{name}")
    policy = subject.make(8)
    claims = subject.claims(policy)
    law = getattr(laws, law_name)

    def obey() -> None:
        if law_name in OWN_STREAMS:
            OWN_STREAMS[law_name](policy)
            return
        if law in laws.STANDALONE:
            law(policy, claims=claims)
            return
        more = ARGUMENTS.get(law_name, lambda stream: ())
        for stream in sample_streams(8):
            law(policy, stream, *more(stream), claims)

    with pytest.raises(AssertionError) as caught:
        obey()
    assert len(str(caught.value)) > 30, f"the message must say what is wrong, found {caught.value}"


@pytest.mark.parametrize("name", [name for name, (_, law) in SUSPECTS.items() if law in OWN_STREAMS])
def test_the_method_itself_obeys(name: str) -> None:
    """What the suspects of a method's own laws pretend to be passes them."""
    claimed = load_subject(f"suspects:{name}").make(8)
    OWN_STREAMS[SUSPECTS[name][1]](veloxfn.policy(claimed.config))


@pytest.mark.parametrize("factory", [merges_rightly, pools_rightly])
def test_the_suspects_code_is_right_without_the_fault(factory) -> None:
    for stream in sample_streams(8):
        laws.law_follows_the_oracle(factory(8), stream)


@pytest.mark.parametrize("name", SUSPECTS)
def test_check_catches_it(name: str) -> None:
    factory, law = SUSPECTS[name]
    policy = factory(8)
    standalone = law in {one.__name__ for one in laws.STANDALONE[2:]}
    with pytest.raises((AssertionError, ValueError, TypeError, RuntimeError)):
        check(policy, claims=load_subject(f"suspects:{name}").claims(policy), cost=standalone)


def run_suite(target: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`pytest properties --policy target` as a third party runs it."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    pytest_here = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    return subprocess.run(
        [*pytest_here, "properties", "--policy", target, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HYPOTHESIS_PROFILE": "ci"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("name", ["sink_ignored", "tie_flipped", "renumbered"])
def test_the_property_suite_catches_it(name: str) -> None:
    _, law = SUSPECTS[name]
    done = run_suite(f"suspects:{name}", "-k", law)
    assert done.returncode == 1, f"pytest must report failures (1), returned {done.returncode}: {done.stdout[-2000:]}"
    assert law in done.stdout, f"the report must name {law}: {done.stdout[-2000:]}"


@pytest.mark.parametrize("name", ["keep_even", "fifo"])
def test_the_property_suite_passes_a_right_policy(name: str) -> None:
    done = run_suite(f"third_party:{name}", "--hypothesis-profile", "dev")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_wrong_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"package\.module:factory"):
        load_subject("suspects")
    with pytest.raises(TypeError, match="Policy"):
        load_subject("suspects:ARGUMENTS")


def test_a_target_that_is_not_found_is_one_line() -> None:
    done = run_suite("nowhere:policy")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = (done.stdout + done.stderr).strip().splitlines()
    assert line.startswith("ERROR: --policy nowhere:policy: No module named 'nowhere' (modules are looked for in")
