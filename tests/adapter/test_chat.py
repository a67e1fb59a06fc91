"""`veloxfn chat`: a conversation whose caches stay within the budget."""

import io
import os
import signal
import subprocess
import sys

import pytest
from mlx_lm import stream_generate

import veloxfn
from veloxfn import h2o
from veloxfn_mlx_adapter import chat, cli, generation, make_prompt_cache

MANNER = {"system": None, "max_tokens": 8, "temp": 0.0, "top_p": 1.0, "seed": 0, "chunk": 512}


@pytest.fixture
def talk(letters, monkeypatch, capsys):
    """What the command prints for some input, with the model that writes letters at random."""
    monkeypatch.setattr(generation, "load_demo", lambda: (letters.model, letters.tokenizer))

    def run(*arguments, said):
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        assert cli.main(["chat", "--max-tokens", "8", *arguments]) == 0
        assert "make_cache" not in vars(letters.model)
        return capsys.readouterr()

    return run


@pytest.fixture
def tokens_read(monkeypatch):
    """The tokens of every turn, as the model gets them."""
    read = []

    def noted(model, tokenizer, tokens, **options):
        read.append(list(tokens))
        return stream_generate(model, tokenizer, tokens, **options)

    monkeypatch.setattr(chat, "stream_generate", noted)
    return read


def test_every_line_is_answered_and_the_caches_reported(talk):
    printed = talk("--budget", "32", said="What is it?\n\n  \nAnd then?\nq\nnever read\n").out
    answers, _, report = printed.partition("\n\nmethod")
    assert len(answers) >= 2 * 8 + 1
    assert report.startswith("       h2o, budget 32 rows per kv head")
    assert "rows kept    32 per kv head in 2 layers" in report
    assert "decode       16 tokens" in report


def test_the_end_of_the_input_ends_the_conversation(talk):
    printed = talk(said="").out
    assert "rows kept    0 per kv head in 2 layers" in printed
    assert "prompt       0 tokens, 0.0 tokens/s" in printed


def test_the_conversation_goes_on_in_the_same_caches(talk, tokens_read, letters):
    report = talk("--budget", "64", said="My name is Ana.\nWhat is my name?\nThank you.\n").out
    seen = sum(map(len, tokens_read)) + 3 * 8
    assert f"tokens seen  {seen}" in report
    assert f"prompt       {sum(map(len, tokens_read))} tokens" in report
    turns = [letters.tokenizer.decode(tokens) for tokens in tokens_read]
    assert turns[0] == "<s>user\nMy name is Ana.</s>\n<s>assistant\n"
    assert turns[1] == "</s>\n<s>user\nWhat is my name?</s>\n<s>assistant\n"
    assert turns[2] == "</s>\n<s>user\nThank you.</s>\n<s>assistant\n"


def test_all_turns_together_read_as_the_template_has_them(letters):
    """Whether an answer ended by itself or was cut, and with a system prompt."""
    tokenizer = letters.tokenizer
    said = [("Hello.", "Hi there!"), ("And you?", "Fine."), ("veloxfn-answer", "")]
    (end,) = tokenizer.encode("</s>", add_special_tokens=False)
    messages, held = [{"role": "system", "content": "Be brief."}], []
    for i, (question, answer) in enumerate(said):
        messages.append({"role": "user", "content": question})
        held += chat.turn_tokens(
            tokenizer, question, system="Be brief.", opened=i > 0, closed_by=end if i == 1 else None
        )
        assert held == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        held += tokenizer.encode(answer, add_special_tokens=False) + ([end] if i == 0 else [])
        messages.append({"role": "assistant", "content": answer})


def test_templates_that_show_no_answers_and_tokenizers_without_template():
    class Bare:
        has_chat_template = False

        def encode(self, text, add_special_tokens):
            return [*(["start"] if add_special_tokens else []), *text.split()]

    class Silent(Bare):
        has_chat_template = True

        def apply_chat_template(self, messages, add_generation_prompt, tokenize=True):
            text = " ".join(message["content"] for message in messages if message["role"] == "user")
            return text.split() if tokenize else text

    options = {"system": None, "closed_by": None}
    assert chat.turn_tokens(Bare(), "a b", opened=False, **options) == ["start", "a", "b"]
    assert chat.turn_tokens(Bare(), "a b", opened=True, **options) == ["a", "b"]
    assert chat.turn_tokens(Silent(), "a b", opened=True, **options) == ["a", "b"]


def test_the_trained_model_talks(smollm2, monkeypatch, capsys, tokens_read):
    """Its answers end by themselves, and are closed once."""
    monkeypatch.setattr(generation, "load_demo", lambda: (smollm2.model, smollm2.tokenizer))
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\nAnd of Italy?\n"))
    assert cli.main(["chat", "--budget", "40", "--max-tokens", "30"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert "Paris" in first
    assert "Rome" in second
    assert smollm2.tokenizer.decode(tokens_read[0]).startswith("<|im_start|>system\n")
    assert smollm2.tokenizer.decode(tokens_read[1]).startswith("\n<|im_start|>user\nAnd of Italy?")


def test_forgetting_starts_anew(talk, tokens_read):
    printed = talk(said="My name is Ana.\nr\nMy name is Ana.\n").out
    first, _, second = printed.partition("\nforgotten\n")
    assert second.startswith(first + "\n")
    assert tokens_read[0] == tokens_read[1]
    assert f"tokens seen  {len(tokens_read[1]) + 8}" in printed
    assert f"prompt       {2 * len(tokens_read[0])} tokens" in printed


def test_help_says_what_the_commands_are(talk, tokens_read):
    assert "q quits, r forgets the conversation, h shows this" in talk(said="h\n").out
    assert not tokens_read


def test_answers_are_those_of_generate(talk, tokens_read, letters):
    printed = talk("--budget", "24", "--chunk", "16", said="Name three rivers.\nAnd three lakes.\n").out
    caches = make_prompt_cache(letters.model, veloxfn.policy(h2o.Config(budget=24, age_normalised=True)))
    wanted = ""
    for tokens in list(tokens_read):
        options = {"max_tokens": 8, "prompt_cache": caches, "prefill_step_size": 16}
        pieces = stream_generate(letters.model, letters.tokenizer, tokens, **options)
        wanted += "".join(piece.text for piece in pieces) + "\n"
    assert printed.startswith(wanted)


def test_memory_does_not_grow_with_the_conversation(letters):
    talk, held = chat._Talk(make_prompt_cache(letters.model, veloxfn.policy(h2o.Config(budget=16)))), []
    tokens, manner = letters.tokenizer.encode("and so on and on and on"), chat.Manner(**MANNER)
    for _ in range(30):
        chat._answer(letters.model, letters.tokenizer, talk, tokens, manner, io.StringIO())
        held.append(sum(cache.nbytes for cache in talk.caches))
    assert len(set(held)) == 1
    assert (talk.caches[0].tokens_seen, talk.caches[0].tokens_kept) == (30 * (len(tokens) + 8), 16)
    assert talk.total().tokens == 240


def test_an_interrupt_stops_the_answer_between_tokens(letters, monkeypatch):
    """And the conversation goes on."""

    class Out(io.StringIO):
        pieces = 0

        def write(self, text):
            self.pieces += 1
            if self.pieces == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    out, handler = Out(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Count to one hundred.\nGo on.\n"))
    config = h2o.Config(budget=64, age_normalised=True)
    manner = chat.Manner(**{**MANNER, "max_tokens": 12})
    chat.chat(letters.model, letters.tokenizer, config, manner, out=out)
    assert "decode       15 tokens" in out.getvalue()  # 3, then 12
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_end_of_the_trained_length_is_said_once(talk, monkeypatch, letters):
    monkeypatch.setattr(letters.model.args, "max_position_embeddings", 50)
    said = "One.\nTwo.\nThree.\n"
    assert talk("--budget", "32", said=said).err.count("more than the 50 tokens that the model was trained on") == 1
    assert "trained" not in talk("--budget", "32", "--contiguous", said=said).err


def test_sampling_follows_the_seed(talk):
    answers = [talk("--temp", "2", "--top-p", "0.9", "--seed", seed, said="Hello!\n").out.splitlines()[0]
               for seed in ("1", "1", "2")]  # fmt: skip
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "3"], "budget=3"),
        (["--max-tokens", "0"], "--max-tokens must be a finite number >= 1, got 0"),
        (["--top-p", "0"], "--top-p must be above 0 and at most 1, got 0.0"),
        (["--top-p", "nan"], "--top-p must be above 0 and at most 1, got nan"),
        (["--temp", "-1"], "--temp must be a finite number >= 0, got -1.0"),
        (["--chunk", "0"], "--chunk must be a finite number >= 1, got 0"),
        (["--method", "h2o", "--scorer", "tova"], "--scorer"),
        (["--prompt", "hello"], "unrecognized arguments: --prompt hello"),
        (["--model", "/no/such/folder"], "--model /no/such/folder: no mlx_lm folder"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["chat", *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err


def test_settings_that_do_not_fit_the_model_are_one_line(letters, monkeypatch, capsys):
    monkeypatch.setattr(generation, "load_demo", lambda: (letters.model, letters.tokenizer))
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two three four five six seven eight nine ten\n"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["chat", "--budget", "16", "--shared-heads", "3"])
    assert stopped.value.code == 2
    assert "shared_heads must divide the rows" in capsys.readouterr().err.splitlines()[-1]
    assert "make_cache" not in vars(letters.model)


def test_input_that_is_no_text_is_one_line(letters, monkeypatch, capsys):
    monkeypatch.setattr(generation, "load_demo", lambda: (letters.model, letters.tokenizer))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["chat"])
    assert stopped.value.code == 2
    assert "stdin: not UTF-8 text" in capsys.readouterr().err


def test_the_command_runs_through_a_pipe(letters):
    command = [sys.executable, "-m", "veloxfn_mlx_adapter.cli", "chat", "--model", letters.folder, "--budget", "32"]
    done = subprocess.run(command, input="What is it?\nr\nq\n", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nforgotten\n\nmethod       h2o, budget 32" in done.stdout
    assert "decode       100 tokens" in done.stdout
    assert "rows kept    0 per kv head" in done.stdout
