"""The example runs with every method and refuses bad settings in one line."""

import importlib.util
import pathlib
import re

import pytest

import veloxfn

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "custom_decoder.py"
if not EXAMPLE.exists():
    pytest.skip("examples/ is not here (installed wheel)", allow_module_level=True)

spec = importlib.util.spec_from_file_location("custom_decoder", EXAMPLE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


@pytest.mark.parametrize("method", veloxfn.METHODS)
def test_it_trains_and_decodes(method, capsys):
    example.main(["--steps", "2", "--max-tokens", "4", "--method", method])
    printed = capsys.readouterr().out
    seen = example.LENGTH + 4
    assert f"{seen} tokens seen, 64 kept; " in printed
    row = example.LAYERS * example.KV_HEADS * 2 * example.HEAD_DIM * 4  # float32 keys and values of one token
    assert f"{64 * row:,} bytes for {seen * row:,} of a full cache ({seen / 64:.1f} to 1)" in printed
    bits = re.findall(r"^  (.+?) +(\d+\.\d+) bits per byte$", printed, flags=re.MULTILINE)
    assert [name for name, _ in bits] == ["full cache", method, "sliding window"]
    assert all(1 < float(number) < 12 for _, number in bits)


def test_a_budget_that_holds_everything_is_the_full_cache(capsys):
    example.main(["--steps", "1", "--max-tokens", "1", "--budget", str(example.LENGTH + 1)])
    bits = [float(number) for number in re.findall(r"  (\d+\.\d+) bits per byte\n", capsys.readouterr().out)[-3:]]
    assert bits == pytest.approx(bits[:1] * 3, abs=0.002)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "budget must be >= 1, got 0"),
        (["--budget", "4"], "budget=4"),
        (["--steps", "0"], "--steps must be >= 1, got 0"),
        (["--max-tokens", "0"], "--max-tokens must be >= 1, got 0"),
        (["--method", "lru"], "invalid choice: 'lru'"),
    ],
)
def test_bad_settings_are_refused_before_training(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.main(arguments)
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    assert message in printed.err
