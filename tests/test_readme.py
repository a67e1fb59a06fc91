"""The README's samples run as they stand, and its commands name what exists."""

import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
if not README.exists():
    pytest.skip("README.md is not here (installed wheel)", allow_module_level=True)
TEXT = README.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_samples_run_in_order():
    pytest.importorskip("mlx_lm")
    assert len(BLOCKS) == 5
    for code in (BLOCKS[0] + BLOCKS[1], BLOCKS[2], BLOCKS[3]):  # the first two belong together
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_the_decoder_sample_is_twelve_lines():
    assert len(BLOCKS[0].splitlines()) == 12


def test_the_sample_method_passes_the_laws(tmp_path):
    (tmp_path / "value_norm.py").write_text(BLOCKS[4])
    properties = README.parent / "properties"
    command = [sys.executable, "-m", "pytest", "-q", str(properties), "--policy", "value_norm:policy", "-x"]
    command += ["-p", "no:cacheprovider", "-c", str(README.parent / "pyproject.toml")]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**__import__("os").environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_every_method_has_a_row():
    import veloxfn

    for name in veloxfn.METHODS:
        assert f"| [`{name}`](https://" in TEXT


def test_every_cell_of_the_table_of_proofs_names_a_test_that_exists():
    import veloxfn

    table = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (README.parent / "tests" / "README.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    assert {row[0].strip("`") for row in table} == set(veloxfn.METHODS)
    for method, *cells in table:
        assert len(cells) == 6
        for cell in cells:
            named = re.findall(r"`([\w/]+\.py)::(?:(Test\w+)::)?(test_\w+)`", cell)
            assert named, f"{method} has a cell without a test"
            for path, group, test in named:
                text = (README.parent / path).read_text()
                if group:
                    assert f"\nclass {group}:" in text, f"{path} has no {group}"
                    text = text.partition(f"\nclass {group}:")[2]
                indent = "    " if group else ""
                assert f"\n{indent}def {test}(" in text, f"{path} has no {test}"
