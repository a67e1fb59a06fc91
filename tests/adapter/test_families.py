"""mlx_lm's own tiny test configurations as an outside suite: every family of models over its caches and over ours."""

import copy
import functools
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache

import veloxfn
from veloxfn import h2o, streaming_llm
from veloxfn_mlx_adapter import EvictingCache, make_prompt_cache

spec = importlib.util.spec_from_file_location("families", Path(__file__).with_name("families.py"))
families = sys.modules["families"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(families)
try:
    FAMILIES, FAILED = families.collected()
except families.UnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

VERSION = importlib.metadata.version("mlx-lm")
SEEN = "0.32.2"  # the mlx_lm up to which these lists are complete

NOTHING_TO_EVICT = {  # their own caches are recurrent, sliding or composite ones
    "baichuan_m1",
    "deepseek_v32",
    "deepseek_v41",
    "falcon_h1",
    "longcat_flash",
    "longcat_flash_ngram",
    "mamba",
    "mamba2",
    "minimax_m3_vl",
    "recurrent_gemma",
    "rwkv7",
}
OUTSIDE_THE_HOOK = {"gemma2", "olmo", "plamo2"}  # attention of their own
SHOW_NO_QUERIES = {  # latent keys, keys repeated for each head, or block-sparse layers of their own
    "bailing_hybrid",
    "bailing_moe_v3",
    "bailing_moe_v3-2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_k3",
    "kimi_linear",
    "kimi_vl",
    "mistral4",
    "phi3small",
    "plamo",
}
WAY_OUT = r"(knorm, streaming_llm\) work with it|knorm and streaming_llm need no queries)"

BUDGET, WHOLE, CHUNKS, EVICTING = 6, (9, 1), (3, 5, 1, 1), (10, 4, 1, 1)  # rows, and lengths of calls
CONFIGS = {
    "streaming_llm": lambda budget: streaming_llm.Config(budget=budget, sink=2),
    "h2o": lambda budget: h2o.Config(budget=budget, sink=2, age_normalised=True),
}


def text(lengths, batch):
    """Tokens [batch, T] of any vocabulary, none twice in a sequence."""
    return mx.stack([mx.random.permutation(30, key=mx.random.key(row))[: sum(lengths)] for row in range(batch)])


def run(model, caches, lengths, batch=1):
    """Logits [batch, T, V] of the text in calls of these lengths."""
    inputs, outputs, start = text(lengths, batch), [], 0
    for length in lengths:
        outputs.append(model(inputs[:, start : start + length], cache=caches))
        mx.eval(outputs[-1])
        start += length
    return mx.concatenate(outputs, axis=1)


class Stock:
    """A family over mlx_lm's own caches: its model, logits by lengths, and the caches after the longest text."""

    def __init__(self, name):
        self.name, self.model = name, FAMILIES[name].model
        own = mlx_lm_cache.make_prompt_cache
        self.logits = {lengths: run(self.model, own(self.model), lengths) for lengths in (WHOLE, CHUNKS)}
        self.caches = own(self.model)
        self.logits[EVICTING] = run(self.model, self.caches, EVICTING, batch=2)


FAILURES = {}  # by family that was tried: why it cannot be compared, or ""


@functools.lru_cache(maxsize=1)
def tried(name):
    """The family over mlx_lm's caches, or None where it cannot be compared."""
    FAILURES[name] = ""
    try:
        stock = Stock(name)
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        FAILURES[name] = f"{name} does not run here over mlx_lm {VERSION}'s own caches: {told}"
        return None
    if re.search(r"keys, values = cache(\[-1\])?\.state\b", inspect.getsource(inspect.getmodule(type(stock.model)))):
        FAILURES[name] = f"{name} unpacks a cache's state in mlx_lm {VERSION}: ours holds more than keys and values"
        return None
    return stock


@pytest.fixture(scope="module")
def family(request):
    """One family at a time, for all its tests."""
    if request.param not in FAMILIES:
        pytest.skip(f"mlx_lm {VERSION} has no test configuration of {request.param}")
    stock = tried(request.param)
    if stock is None:
        pytest.skip(FAILURES[request.param])
    return stock


@pytest.fixture(scope="module", autouse=True)
def release():
    """Let go of the models after the last test."""
    yield
    tried.cache_clear()
    FAMILIES.clear()
    families.collected.cache_clear()


def is_evicted(cache):
    return type(cache) is mlx_lm_cache.KVCache


def each(names):
    """A test of each family."""
    return pytest.mark.parametrize("family", names, indirect=True)


def with_methods(names):
    """A test of each family with each method that it can have; the scope keeps the tests of a family together."""
    queries = [name for name in names if name not in OUTSIDE_THE_HOOK | SHOW_NO_QUERIES]
    cases = [(name, method) for name in names for method in CONFIGS if method != "h2o" or name in queries]
    return pytest.mark.parametrize(("family", "method"), cases, indirect=["family"], scope="module")


WITH_ROWS = [
    name for name, found in FAMILIES.items() if any(map(is_evicted, mlx_lm_cache.make_prompt_cache(found.built)))
]


def shapes(cache):
    return [getattr(leaf, "shape", None) for _, leaf in tree_flatten(cache.state)]


def evicting(model, method, budget=BUDGET):
    return make_prompt_cache(model, veloxfn.policy(CONFIGS[method](budget)))


def ours(family, method, budget, lengths, batch=1):
    """Logits over our caches, and these."""
    try:
        caches = evicting(family.model, method, budget)
        return run(family.model, caches, lengths, batch), caches
    except (ValueError, RuntimeError) as error:
        if method == "h2o" and VERSION != SEEN and "ranks by the model's queries" in str(error):
            pytest.skip(f"the lists here were made for mlx_lm {SEEN}, and in {VERSION}: {error}")
        raise


@with_methods(WITH_ROWS)
def test_below_the_budget_logits_are_those_of_mlx_lms_caches(family, method):
    for lengths in (WHOLE, CHUNKS):
        logits, _ = ours(family, method, 64, lengths)
        assert mx.array_equal(logits, family.logits[lengths]), lengths


@with_methods(WITH_ROWS)
def test_under_eviction_logits_are_finite_and_the_budget_holds(family, method):
    logits, caches = ours(family, method, BUDGET, EVICTING, batch=2)
    full, first = family.logits[EVICTING], EVICTING[0]
    assert (mx.isfinite(logits) | ~mx.isfinite(full)).all()
    assert mx.array_equal(logits[:, :first], full[:, :first]), "the first call sees all of itself"
    assert not mx.array_equal(logits[:, first:], full[:, first:]), "eviction reaches the logits"
    for cache, own in zip(caches, family.caches, strict=True):
        if is_evicted(own):
            assert type(cache) is EvictingCache
            assert cache.offset == own.offset == sum(EVICTING)
            cache.settle()
            assert set(veloxfn.tokens_kept(cache.method_state).tolist()) == {BUDGET}
        else:
            assert type(cache) is type(own)
            assert shapes(cache) == shapes(own)


# What is particular, by name.


@each(sorted(SHOW_NO_QUERIES))
@pytest.mark.parametrize("first", [7, 1])
def test_attention_that_shows_no_queries_is_refused_at_the_next_call(family, first):
    caches = evicting(family.model, "h2o")
    family.model(text((first,), 1), cache=caches)
    with pytest.raises(RuntimeError, match=WAY_OUT):
        family.model(mx.array([[1]]), cache=caches)


@pytest.mark.parametrize("name", sorted(OUTSIDE_THE_HOOK))
def test_attention_outside_the_hook_is_refused_at_once(name):
    if name not in FAMILIES:
        pytest.skip(f"mlx_lm {VERSION} has no test configuration of {name}")
    with pytest.raises(ValueError, match=WAY_OUT):
        evicting(FAMILIES[name].built, "h2o")
    assert evicting(FAMILIES[name].built, "streaming_llm")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITH_ROWS])
@pytest.mark.parametrize("method", CONFIGS)
def test_a_family_without_full_attention_caches_is_refused(name, method):
    assert name in NOTHING_TO_EVICT or VERSION != SEEN
    kinds = {type(cache).__name__ for cache in mlx_lm_cache.make_prompt_cache(FAMILIES[name].built)}
    with pytest.raises(ValueError, match=f"has no layer to evict from: .* layers have {', '.join(sorted(kinds))},"):
        evicting(FAMILIES[name].built, method)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gemma3_text", {"EvictingCache", "RotatingKVCache"}),
        ("gpt_oss", {"EvictingCache", "RotatingKVCache"}),
        ("jamba", {"EvictingCache", "ArraysCache"}),
        ("qwen3_next", {"EvictingCache", "ArraysCache"}),
        ("gear", {"EvictingCache", "ArraysCache", "RotatingKVCache"}),
        ("llama4", {"EvictingCache", "ChunkedKVCache"}),
    ],
)
def test_lesson_33_other_layers_keep_their_own_caches(name, kinds):
    if name not in FAMILIES:
        pytest.skip(f"mlx_lm {VERSION} has no test configuration of {name}")
    assert {type(cache).__name__ for cache in evicting(FAMILIES[name].built, "streaming_llm")} == kinds


@each(["afm7", "gemma3n", "gemma4_text"])
def test_layers_share_the_rows_that_another_one_keeps(family):
    caches = evicting(family.model, "h2o")
    logits = run(family.model, caches, EVICTING)
    shared = [cache for cache in caches if isinstance(cache, EvictingCache)]
    assert len(caches) < len(family.model.layers)
    assert mx.isfinite(logits).all()
    assert [cache.tokens_kept for cache in shared] == [BUDGET] * len(shared)


@each(["deepseek_v2", "kimi_vl", "mimo_v2_flash", "minicpm3"])
def test_keys_and_values_may_differ_in_width(family):
    _, caches = ours(family, "streaming_llm", BUDGET, EVICTING)
    for cache in caches:
        if isinstance(cache, EvictingCache):
            keys, values = cache.keys_and_values()
            assert keys.shape[:-1] == values.shape[:-1]
            assert keys.shape[-1] != values.shape[-1]


@each(["gpt_oss"])
def test_the_softmax_keeps_its_sinks(family, monkeypatch):
    original, seen = mx.fast.scaled_dot_product_attention, []

    def spy(queries, keys, values, *, sinks=None, **options):
        seen.append(sinks is not None)
        return original(queries, keys, values, sinks=sinks, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", spy)
    logits, _ = ours(family, "h2o", 64, WHOLE)
    assert all(seen)
    assert len(seen) == len(WHOLE) * len(family.model.layers)
    assert mx.array_equal(logits, family.logits[WHOLE])


@each(["bailing_hybrid", "deepseek_v3", "gemma2", "glm4_moe_lite", "kimi_k3", "kimi_linear", "phi3small"])
def test_a_mask_that_must_be_an_array_has_kept_and_new_columns(family, monkeypatch):
    masks, original = [], EvictingCache.make_mask

    def spy(cache, N, return_array=False, window_size=None):
        mask = original(cache, N, return_array=return_array, window_size=window_size)
        if return_array and N > 1:
            masks.append(mask.shape)
        return mask

    monkeypatch.setattr(EvictingCache, "make_mask", spy)
    ours(family, "streaming_llm", BUDGET, EVICTING)
    assert set(masks) == {(10, 10), (4, BUDGET + 4)}


JOINED = ["deepseek_v3", "gemma2", "gemma3n", "gpt_oss", "jamba", "kimi_linear", "llama-2", "mistral4", "qwen3_next"]


@with_methods(JOINED)
def test_sequences_of_two_lengths_decode_together_as_alone(family, method):
    parts, alone = [], []
    for length in (5, 9):
        caches = evicting(family.model, method)
        family.model(text((9,), 1)[:, :length], cache=caches)
        parts.append(copy.deepcopy(caches))
        alone.append(mx.concatenate([family.model(mx.array([[token]]), cache=caches) for token in (4, 7, 1)], axis=1))
    joined = [layers[0].merge(layers) for layers in zip(*parts, strict=True)]
    together = [family.model(mx.array([[token], [token]]), cache=joined) for token in (4, 7, 1)]
    assert mx.allclose(mx.concatenate(together, axis=1), mx.concatenate(alone), atol=1e-4)


PIPELINES = ["deepseek_v2", "deepseek_v3", "glm4_moe", "mistral4", "qwen2", "qwen3_5", "qwen3_moe", "qwen3_next"]


@with_methods(PIPELINES)
def test_a_pipeline_ties_the_keys_to_what_it_sends(family, method, monkeypatch):
    """As the first of two processes: what it would send, and the second go on with, it keeps."""
    part = next((part for part in family.model.modules() if hasattr(part, "pipeline_rank")), None)
    if part is None:
        pytest.skip(f"{family.name} has no pipeline in mlx_lm {VERSION}")
    sent, set_to, setter = [], [], EvictingCache.keys.fset
    monkeypatch.setattr(part, "pipeline_rank", 1)
    monkeypatch.setattr(mx.distributed, "send", lambda hidden, to: sent.append(to) or hidden * 1)
    spied = EvictingCache.keys.setter(lambda cache, keys: set_to.append(keys) or setter(cache, keys))
    monkeypatch.setattr(EvictingCache, "keys", spied)
    logits, _ = ours(family, method, 64, CHUNKS)
    assert len(set_to) == len(sent) == len(CHUNKS)
    assert mx.array_equal(logits, family.logits[CHUNKS])
    logits, caches = ours(family, method, BUDGET, EVICTING)
    assert mx.isfinite(logits).all()
    assert {cache.tokens_kept for cache in caches if isinstance(cache, EvictingCache)} == {BUDGET}


def test_the_suite_covers_what_mlx_lm_runs(capsys):
    for name in set(WITH_ROWS) - set(FAILURES):
        tried(name)
    compared = [name for name in WITH_ROWS if not FAILURES[name]]
    by_queries = [name for name in compared if name not in OUTSIDE_THE_HOOK | SHOW_NO_QUERIES]
    with capsys.disabled():
        print(f"\n{len(FAMILIES)} test configurations of mlx_lm {VERSION}, {len(WITH_ROWS)} with layers to evict from:")
        print(f"{len(compared)} compared, {len(by_queries)} of them also with a method that ranks by queries")
        for name in WITH_ROWS:
            if FAILURES[name]:
                print(f"not compared: {FAILURES[name]}")
        for name, reason in FAILED.items():
            print(f"not collected: {name}: {reason}")
    assert len(compared) >= 0.9 * len(WITH_ROWS)
    assert len(FAMILIES) >= 0.9 * (len(FAMILIES) + len(FAILED))
    assert VERSION != SEEN or len(FAMILIES) == 122
