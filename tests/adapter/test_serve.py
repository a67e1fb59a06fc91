"""`veloxfn serve`: mlx_lm's server over loopback, with caches that evict."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from types import SimpleNamespace

import mlx_lm
import pytest
from huggingface_hub.errors import CacheNotFound
from mlx_lm import server
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as make_stock

import veloxfn
from veloxfn import h2o
from veloxfn_mlx_adapter import EvictingCache, cli, demo, make_prompt_cache, serving

BUDGET, STEP = 16, 24
TEXT = "the harbour of Eskmouth has had a light for ages, of burning coal"


@pytest.fixture(scope="module")
def folder(letters):
    return letters.folder


@pytest.fixture(scope="module")
def alone(letters):
    """The model by itself, and what it answers with eviction caches, without a server."""
    policy = veloxfn.policy(h2o.Config(budget=BUDGET, age_normalised=True))

    def answer(prompt, count=20):
        caches = make_prompt_cache(letters.model, policy)
        options = {"max_tokens": count, "prefill_step_size": STEP, "prompt_cache": caches}
        return mlx_lm.generate(letters.model, letters.tokenizer, prompt, **options)

    return SimpleNamespace(tokenizer=letters.tokenizer, answer=answer)


@contextmanager
def server_here(*arguments):
    """The server on a free port in threads of this process, with what its store of prompt caches was given."""
    options = cli._parser(serving=True).parse_args(
        ["serve", "--budget", str(BUDGET), "--prefill-step-size", str(STEP), "--port", "0", *map(str, arguments)]
    )
    stored = []
    with serving.prepared(options, cli._config(options)) as provider:
        store = server.LRUPromptCache(options.prompt_cache_size)
        insert = store.insert_cache

        def noted(model, tokens, prompt_cache, **more):
            stored.append(SimpleNamespace(tokens=list(tokens), caches=prompt_cache))
            insert(model, tokens, prompt_cache, **more)

        store.insert_cache = noted
        generator = serving._Generator(provider, store)
        httpd = ThreadingHTTPServer(
            (options.host, options.port), lambda *found, **more: server.APIHandler(generator, *found, **more)
        )
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield SimpleNamespace(port=options.port, stored=stored, store=store, generator=generator, provider=provider)
        finally:
            httpd.shutdown()
            thread.join()
            httpd.server_close()
            generator.stop_and_join()


@pytest.fixture(scope="module")
def here(folder):
    with server_here("--model", folder) as running:
        yield running


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body


def post(port, path, **body):
    """The answer's JSON; with stream=True all its pieces."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    if not body.get("stream"):
        return response.status, json.loads(text)
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return response.status, [json.loads(piece) for piece in data]


def complete(port, prompt, count=20, **body):
    """The text of a completion, served by itself: a seed keeps it out of batches."""
    status, said = post(port, "/v1/completions", prompt=prompt, max_tokens=count, seed=0, **body)
    assert status == 200, said
    return said["choices"][0]["text"]


def test_completions_are_those_of_generate(here, alone):
    wanted = alone.answer(TEXT)
    status, said = post(here.port, "/v1/completions", prompt=TEXT, max_tokens=20, seed=0)
    assert status == 200
    assert said["choices"][0]["text"] == wanted
    assert said["choices"][0]["finish_reason"] == "length"
    assert said["usage"]["prompt_tokens"] == len(TEXT)
    _, pieces = post(here.port, "/v1/completions", prompt=TEXT, max_tokens=20, seed=0, stream=True)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == wanted
    assert len(pieces) > 5


def test_chat_completions_are_those_of_generate(here, alone):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    wanted = alone.answer(alone.tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    for path in ("/v1/chat/completions", "/chat/completions"):
        status, said = post(here.port, path, messages=messages, max_tokens=20, seed=0)
        assert status == 200
        assert said["choices"][0]["message"]["content"] == wanted
    _, pieces = post(here.port, path, messages=messages, max_tokens=20, seed=0, stream=True)
    assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == wanted


def test_without_a_seed_the_answer_is_the_same(here, alone):
    """In a batch of one, where the caches can be batched."""
    status, said = post(here.port, "/v1/completions", prompt=TEXT, max_tokens=20)
    assert (status, said["choices"][0]["text"]) == (200, alone.answer(TEXT))


@pytest.mark.parametrize("options", [{"seed": 0}, {}], ids=["alone", "batched"])
def test_the_caches_evict(here, alone, options):
    prompt = f"{len(options)} evicting {TEXT}"
    status, _ = post(here.port, "/v1/completions", prompt=prompt, max_tokens=20, **options)
    assert status == 200
    read = alone.tokenizer.encode(prompt)
    entry = wait_for(lambda: [entry for entry in here.stored if entry.tokens[: len(read)] == read])[-1]
    assert len(read) + 19 <= len(entry.tokens) <= len(read) + 20
    assert len(entry.caches) == 2
    for cache in entry.caches:
        assert isinstance(cache, EvictingCache)
        assert (cache.tokens_seen, cache.tokens_kept) == (len(entry.tokens), BUDGET)
        assert cache.nbytes < 2 * BUDGET * 2 * 2 * 8 * 4  # twice the keys and values of the budget


def test_clients_at_the_same_time_get_their_own_answers(here, alone):
    prompts = [TEXT[count:] for count in range(0, 30, 5)]
    wanted = [alone.answer(prompt) for prompt in prompts]

    def ask(prompt):
        _, said = post(here.port, "/v1/completions", prompt=prompt, max_tokens=20)
        return said["choices"][0]["text"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == wanted


@pytest.mark.parametrize("options", [{"seed": 0}, {}], ids=["alone", "batched"])
def test_a_client_that_leaves_harms_nobody(here, alone, capfd, options):
    wanted = alone.answer(TEXT)
    body = json.dumps({"prompt": "long " + TEXT, "max_tokens": 3000, "stream": True, **options})
    with socket.create_connection(("127.0.0.1", here.port), timeout=60) as left:
        left.sendall(f"POST /v1/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        received = b""
        while received.count(b"data: ") < 3:
            received += left.recv(1000)
    began = time.monotonic()
    assert complete(here.port, TEXT) == wanted
    status, said = post(here.port, "/v1/completions", prompt=TEXT, max_tokens=20)
    assert (status, said["choices"][0]["text"]) == (200, wanted)
    assert get(here.port, "/health") == (200, {"status": "ok"})
    assert time.monotonic() - began < 60
    wait_for(lambda: "BrokenPipe" in (text := capfd.readouterr().err) or "ConnectionReset" in text, may_fail=True)


@pytest.mark.parametrize("options", [{"seed": 0}, {}], ids=["alone", "batched"])
def test_a_second_turn_goes_on_from_the_stored_caches(here, alone, options):
    text = f"turn {len(options)} {TEXT}"

    def ask(prompt):
        status, said = post(here.port, "/v1/completions", prompt=prompt, max_tokens=12, **options)
        assert status == 200
        return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, held = ask(text)
    assert held == 0
    assert len(alone.tokenizer.encode(text + first)) == len(text) + 12, "it reads as the tokens that it was made of"
    wait_for(lambda: len(text) + 12 in [len(entry.tokens) for entry in here.stored])
    assert ask(text + first + " and then")[1] == len(text) + 12
    # What is held exactly is read anew: an answer needs a token to begin with.
    assert ask(text + first) == (alone.answer(text + first, 12), 0)


def test_health_and_models(here, folder):
    assert get(here.port, "/health") == (200, {"status": "ok"})
    status, listed = get(here.port, "/v1/models")
    assert status == 200
    assert str(folder.resolve()) in [model["id"] for model in listed["data"]]


def test_models_are_listed_where_nothing_was_ever_downloaded(folder, monkeypatch):
    def none():
        raise CacheNotFound("no cache", cache_dir="/nowhere")

    monkeypatch.setattr(server, "scan_cache_dir", none)
    with server_here("--model", folder) as running:
        status, listed = get(running.port, "/v1/models")
    assert (status, [model["id"] for model in listed["data"]]) == (200, [str(folder.resolve())])
    assert server.scan_cache_dir is none


def test_a_model_that_cannot_be_had_is_an_answer(here, alone):
    status, said = post(here.port, "/v1/completions", prompt=TEXT, model="/no/such/model", seed=0)
    assert status == 404
    assert said["error"]
    assert complete(here.port, TEXT) == alone.answer(TEXT)  # loaded anew, and attached again


def test_the_store_holds_no_more_than_it_may(folder):
    with server_here("--model", folder, "--prompt-cache-size", 2) as running:
        for word in ("one", "two", "three"):
            complete(running.port, word + TEXT, 8)
        wait_for(lambda: len(running.stored) == 3)
        assert len(running.store) == 2
        size = running.store.nbytes // 2
    with server_here("--model", folder, "--prompt-cache-bytes", int(1.5 * size)) as running:
        for word in ("one", "two", "three"):
            complete(running.port, word + TEXT, 8)
        wait_for(lambda: len(running.stored) == 3)
        assert len(running.store) == 1
        assert 0 < running.store.nbytes <= 1.5 * size


def test_a_draft_model_keeps_its_own_caches(folder, alone):
    with server_here("--model", folder, "--draft-model", folder) as running:
        assert all(type(cache) is KVCache for cache in make_stock(running.provider.draft_model))
        first = complete(running.port, TEXT, 12)
        assert first == alone.answer(TEXT, 12)
        again = complete(running.port, TEXT + first + " and then", 12)
        assert again == alone.answer(TEXT + first + " and then", 12)  # read anew: what was evicted does not go back


def test_settings_reach_the_caches(folder):
    options = ["--method", "keyformer", "--noise", "none", "--contiguous", "--cadence", "token", "--recent", "3"]
    with server_here("--model", folder, *options) as running:
        complete(running.port, TEXT, 4)
        wait_for(lambda: running.stored)
        config = running.stored[0].caches[0].config
    assert (config.noise, config.recent, config.cadence, config.placement.rope.dims) == ("none", 3, "token", 8)


@pytest.mark.parametrize("method", veloxfn.METHODS)
def test_every_method_serves(folder, method):
    with server_here("--model", folder, "--method", method, "--budget", "40") as running:
        text = complete(running.port, TEXT, 8)
        _, said = post(running.port, "/v1/completions", prompt=TEXT, max_tokens=8)
    assert said["choices"][0]["text"] == text
    assert len(text) == 8


def test_nothing_of_the_server_stays_replaced(folder):
    names = ("load", "sharded_load", "scan_cache_dir", "LRUPromptCache", "ModelProvider", "argparse")
    before = [getattr(server, name) for name in names]
    with server_here("--model", folder):
        assert server.load is not before[0]
    assert [getattr(server, name) for name in names] == before


def test_every_flag_of_the_server_is_known(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--host", "--port", "--allowed-origins", "--decode-concurrency", "--draft-model", "--chat-template"):
        assert flag in text
    for flag in ("--method", "--budget", "--scorer", "--contiguous", "--tau-init"):
        assert flag in text
    assert "--kv-bits" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "3"], "budget=3"),
        (["--method", "lru"], "invalid choice: 'lru'"),
        (["--method", "tova", "--noise-seed", "1"], "--noise-seed: tova has no such setting"),
        (["--port", "many"], "invalid int value: 'many'"),
        (["--port", "70000"], "--port must be 0 to 65535, got 70000"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["--model", "/no/such/folder"], "--model /no/such/folder: no mlx_lm folder"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize("flag", ["--kv-bits", "--kv-group-size", "--quantized-kv-start"])
def test_quantised_caches_are_refused(capsys, flag):
    known = any(flag in action.option_strings for action in serving.flags()._actions)  # since mlx-lm 0.32
    message = f"{flag}: a quantised cache cannot evict" if known else f"unrecognized arguments: {flag}"
    assert message in refused(capsys, flag, "8")


def test_a_port_that_is_taken_is_one_line(capsys, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--port {port}: Address already in use" in refused(capsys, "--port", port, "--model", str(folder))


def test_a_setting_that_does_not_fit_the_model_is_one_line(capsys, folder):
    message = refused(capsys, "--port", "0", "--model", str(folder), "--method", "pyramidkv", "--beta", "0.1")
    assert "beta" in message or "budget" in message


def refused(capsys, *arguments):
    threads = threading.active_count()
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve", *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert threading.active_count() == threads
    return printed.err


@contextmanager
def process(*arguments):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    # A shell without job control starts what it puts in the background with interrupts ignored, tests and all.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start += "; from veloxfn_mlx_adapter.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "serve", "--port", str(port), *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            wait_for(lambda: running.poll() is not None or listens(port))
            yield SimpleNamespace(port=port, running=running)
        finally:
            if running.poll() is None:
                running.kill()


def listens(port):
    try:
        return get(port, "/health")[0] == 200
    except OSError:
        return False


def wait_for(done, seconds=120, may_fail=False):
    ends = time.monotonic() + (2 if may_fail else seconds)
    while not (found := done()) and time.monotonic() < ends:
        time.sleep(0.02)
    assert found or may_fail
    return found


def test_the_command_serves_until_it_is_interrupted(folder, alone):
    arguments = ["--model", folder, "--budget", BUDGET, "--prefill-step-size", STEP]
    with process(*arguments) as served:
        assert complete(served.port, TEXT) == alone.answer(TEXT)
        served.running.send_signal(signal.SIGINT)
        out, err = served.running.communicate(timeout=60)
    assert (served.running.returncode, out) == (0, "")
    assert f"serving {folder} at http://127.0.0.1:{served.port}/v1: h2o, budget {BUDGET} rows per kv head" in err
    assert f"Eviction caches: {len(TEXT) + 20} tokens seen" in err
    assert "Traceback" not in err


def test_a_stop_waits_for_no_answer(folder):
    """Neither for one that is being served nor for those behind it."""
    with ThreadPoolExecutor(2) as pool, process("--model", folder, "--budget", BUDGET) as served:
        for options in ({"seed": 0}, {}):
            body = {"prompt": TEXT, "max_tokens": 10**6, "stream": True, **options}
            pool.submit(post, served.port, "/v1/completions", **body)
            time.sleep(1)
        served.running.send_signal(signal.SIGINT)
        served.running.communicate(timeout=60)
    assert served.running.returncode == 0


def test_the_command_serves_the_demo_model_until_it_is_terminated():
    try:
        path = demo.gguf_path()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    with process("--budget", "32", "--chat-template-args", "{}") as served:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        for name in ({}, {"model": str(path)}):
            _, said = post(served.port, "/v1/chat/completions", messages=messages, max_tokens=8, seed=0, **name)
            assert "Paris" in said["choices"][0]["message"]["content"]
        assert str(path.resolve()) in [model["id"] for model in get(served.port, "/v1/models")[1]["data"]]
        served.running.send_signal(signal.SIGTERM)
        _, err = served.running.communicate(timeout=60)
    assert served.running.returncode == 0
    assert os.fspath(path) in err
