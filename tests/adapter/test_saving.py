"""Files of prompt caches: exact, mlx_lm's format, and refused whole when anything in them was touched."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache

import veloxfn
from veloxfn_mlx_adapter import EvictingCache, load_prompt_cache, make_prompt_cache, portable, save_prompt_cache

METHODS = sorted(veloxfn.METHODS)


def h2o(**settings):
    return veloxfn.policy(veloxfn.h2o.Config(**{"budget": 16, "age_normalised": True, **settings}))


def same(first, second):
    return all(
        mx.array_equal(a, b) and (not isinstance(a, mx.array) or a.dtype == b.dtype)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one.state, other.state, strict=True)
    )


@pytest.fixture
def saved(tiny, tokens, feed, tmp_path):
    """Caches of 50 tokens, whose last block of 5 awaits eviction, and the file that holds them."""

    def write(policy=None, save=save_prompt_cache, dtype=mx.float32, **changes):
        model = tiny(dtype=dtype, **changes)
        caches = make_prompt_cache(model, policy or h2o())
        feed(model, caches, tokens(50), 20, 20, 5, 5)
        file = tmp_path / "prompt.safetensors"
        save(str(file), caches)
        return model, caches, file

    return write


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_file_continues_as_if_nothing_had_stopped(tiny, caches_of, tokens, feed, tmp_path, method, dtype):
    model, inputs, file = tiny(dtype=dtype), tokens(80), tmp_path / "prompt.safetensors"
    caches = caches_of(model, method, budget=16, sink=2)
    feed(model, caches, inputs[:, :50], 20, 25, 5)
    save_prompt_cache(file, caches, {"title": "fifty"})
    settings = {"age_normalised": True} if method == "h2o" else {"layers": 2} if method == "pyramidkv" else {}
    policy = veloxfn.policy(veloxfn.METHODS[method].Config(budget=16, sink=2, **settings))
    loaded, metadata = load_prompt_cache(file, model, policy, return_metadata=True)
    assert metadata == {"title": "fifty"}
    assert [cache.config for cache in loaded] == [cache.config for cache in caches]
    assert same(loaded, caches)
    assert mx.array_equal(feed(model, loaded, inputs[:, 50:], 10), feed(model, caches, inputs[:, 50:], 10))
    assert same(loaded, caches)
    assert same(load_prompt_cache(file, policy=policy), load_prompt_cache(file)), "the policy alone is enough"


def test_the_formats_are_one(saved, tmp_path):
    model, caches, ours = saved()
    assert same(mlx_lm_cache.load_prompt_cache(str(ours)), caches)
    theirs = tmp_path / "theirs.safetensors"
    mlx_lm_cache.save_prompt_cache(str(theirs), caches, {"title": "fifty"})
    loaded, metadata = load_prompt_cache(theirs, model, h2o(), return_metadata=True)
    assert same(loaded, caches)
    assert metadata == {"title": "fifty"}


def test_an_empty_cache_and_a_settled_one(tiny, saved, tmp_path):
    model, caches, _ = saved()
    file = tmp_path / "other.safetensors"
    save_prompt_cache(file, make_prompt_cache(model, h2o()))
    assert all(cache.empty() for cache in load_prompt_cache(file, model, h2o()))
    for cache in caches:
        cache.settle()
    save_prompt_cache(file, caches)
    assert same(load_prompt_cache(file, model, h2o()), caches)


def test_the_models_own_caches_beside_evicting_ones(tiny, tokens, feed, tmp_path):
    model, file = tiny("gemma3_text"), tmp_path / "mixed.safetensors"
    caches = make_prompt_cache(model, h2o())
    feed(model, caches, tokens(40), 30)
    kinds = [type(cache).__name__ for cache in caches]
    assert {*kinds} == {"EvictingCache", "RotatingKVCache"}
    save_prompt_cache(file, caches)
    for arguments in ((), (model,), (model, h2o())):
        loaded = load_prompt_cache(file, *arguments)
        assert [type(cache).__name__ for cache in loaded] == kinds
    assert mx.array_equal(feed(model, loaded, tokens(9, seed=1)), feed(model, caches, tokens(9, seed=1)))
    assert len(load_prompt_cache(file, policy=h2o())) == len(load_prompt_cache(file, policy=[h2o()] * 4)) == 4


def test_layers_with_none_keep_the_models_own(tiny, tokens, feed, tmp_path):
    model, file = tiny(), tmp_path / "half.safetensors"
    caches = make_prompt_cache(model, [None, h2o()])
    feed(model, caches, tokens(40), 30)
    save_prompt_cache(file, caches)
    for arguments in ((model,), (model, [None, h2o()]), (None, [None, h2o()])):
        assert same(load_prompt_cache(file, *arguments), caches)
    with pytest.raises(ValueError, match="layer 0: KVCache in the file, EvictingCache for the model"):
        load_prompt_cache(file, model, h2o())
    with pytest.raises(ValueError, match="layer 0: KVCache in the file, h2o in the policy"):
        load_prompt_cache(file, policy=h2o())
    with pytest.raises(ValueError, match="layer 1: h2o in the file, None in the policy"):
        load_prompt_cache(file, policy=[None, None])


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (h2o(budget=32), "layer 0: budget=16 in the file, budget=32 in the policy$"),
        (
            h2o(age_normalised=False, decay=0.5),
            "layer 0: .*decay=1.0 in the file, decay=0.5 in the policy; .*age_normalised=True in the file",
        ),
        (veloxfn.policy(veloxfn.knorm.Config(budget=16)), "layer 0: h2o in the file, knorm in the policy"),
        ([h2o(), h2o(budget=32)], "layer 1: budget=16 in the file, budget=32 in the policy"),
        (
            h2o(placement=veloxfn.Contiguous(veloxfn.Rope(dims=8, base=10000.0))),
            r"layer 0: placement=Absolute\(\) in the file, placement=Contiguous\(rope=Rope\(dims=8",
        ),
    ],
)
def test_other_settings_are_refused_with_the_difference(saved, policy, message, with_model):
    model, _, file = saved()
    with pytest.raises(ValueError, match=message):
        load_prompt_cache(file, model if with_model else None, policy)


def test_settings_within_settings_are_named(saved):
    def pyramid(**settings):
        return veloxfn.policy_for("pyramidkv", scorer="h2o", layers=2, budget=16, taper=1.5, **settings)

    model, _, file = saved(pyramid())
    with pytest.raises(ValueError, match=r"layer 0: .*decay=1.0 in the file, .*decay=0.5 in the policy"):
        load_prompt_cache(file, model, pyramid(decay=0.5))
    with pytest.raises(ValueError, match="2 layers that evict, the policy has layers=3"):
        load_prompt_cache(file, policy=veloxfn.policy_for("pyramidkv", scorer="h2o", layers=3, budget=16))


def test_another_model_is_refused(tiny, saved, stock, tmp_path):
    model, caches, file = saved()
    with pytest.raises(ValueError, match="the file has caches of 2 layers, the model has 3"):
        load_prompt_cache(file, tiny(num_hidden_layers=3))
    with pytest.raises(ValueError, match="the file has caches of 2 layers, the policy has 3"):
        load_prompt_cache(file, policy=[h2o()] * 3)
    with pytest.raises(ValueError, match="layer 0: EvictingCache in the file, RotatingKVCache for the model"):
        load_prompt_cache(file, tiny("gemma3_text", num_hidden_layers=2))
    save_prompt_cache(file, caches[::-1])
    with pytest.raises(ValueError, match="layer 0: the file has the cache of layer 1 in its place"):
        load_prompt_cache(file, model)
    mlx_lm_cache.save_prompt_cache(str(file), [EvictingCache(h2o()), *stock(model)[1:]])
    with pytest.raises(ValueError, match="layer 1: KVCache in the file, EvictingCache for the model"):
        load_prompt_cache(file, model, h2o())


def rewritten(file, change):
    """The file with its arrays changed by `change`."""
    arrays, metadata = mx.load(str(file), return_metadata=True)
    mx.eval(arrays)
    change(arrays)
    mx.save_safetensors(str(file), arrays, metadata)


def names_of(arrays, layer=0):
    """Names of a layer's arrays: the record, then the leaves in order."""
    return sorted((name for name in arrays if name.startswith(f"{layer}.")), key=lambda name: int(name.split(".")[1]))


def record_changed(**fields):
    def change(arrays):
        record = {**portable.record_of(arrays["0.0"]), **fields}
        record.pop("format")
        arrays["0.0"] = portable.array_of({key: value for key, value in record.items() if value is not ...})

    return change


def replaced(index, function):
    def change(arrays):
        name = names_of(arrays)[index]
        arrays[name] = function(arrays[name])

    return change


def swapped(first, second):
    def change(arrays):
        one, other = names_of(arrays)[first], names_of(arrays)[second]
        arrays[one], arrays[other] = arrays[other], arrays[one]

    return change


KEYS, VALUES, POSITIONS, ARRIVED, SEEN, STREAMS = 1, 2, 3, 4, 5, 6

DAMAGE = {
    "fewer tokens": record_changed(seen=[49]),
    "more heads": record_changed(heads=4),
    "another batch": record_changed(seen=[50, 50], spans=[[0, 5], [0, 5]]),
    "no queries": record_changed(queries=False),
    "a field is missing": record_changed(spans=...),
    "a foreign method": record_changed(config={"type": "os:path", "fields": {}}),
    "a setting out of range": record_changed(
        config={"type": "veloxfn.h2o:Config", "fields": {"budget": 0}},
    ),
    "a smaller budget": record_changed(config={"type": "veloxfn.h2o:Config", "fields": {"budget": 8}}),
    "text in place of the record": replaced(0, lambda record: record[:-9]),
    "positions and arrived": swapped(POSITIONS, ARRIVED),
    "keys and positions": swapped(KEYS, POSITIONS),
    "seen and streams": swapped(SEEN, STREAMS),
    "keys and queries": swapped(KEYS, -1),
    "integers for keys": replaced(KEYS, lambda keys: keys.astype(mx.int32)),
    "a number for keys": replaced(KEYS, lambda keys: keys.sum()),
    "another dtype of keys": replaced(KEYS, lambda keys: keys.astype(mx.float16)),
    "another dtype of positions": replaced(POSITIONS, lambda positions: positions.astype(mx.float32)),
    "fewer rows": replaced(KEYS, lambda keys: keys[:1]),
    "fewer slots": replaced(KEYS, lambda keys: keys[:, :9]),
    "fewer dimensions": replaced(VALUES, lambda values: values[0]),
    "positions out of range": replaced(POSITIONS, lambda positions: positions + 1000),
    "slots out of range": replaced(ARRIVED, lambda arrived: arrived + 1000),
    "an array is missing": lambda arrays: arrays.pop(names_of(arrays)[-1]),
    "two arrays are missing": lambda arrays: [arrays.pop(name) for name in names_of(arrays)[-2:]],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_changed_file_is_refused_by_its_digest(saved, damage):
    model, _, file = saved()
    rewritten(file, DAMAGE[damage])
    with pytest.raises(ValueError, match="is damaged: its arrays were written with SHA-256"):
        load_prompt_cache(file, model)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_changed_file_without_digest_is_refused_by_what_does_not_fit(saved, damage):
    model, _, file = saved(save=mlx_lm_cache.save_prompt_cache)
    rewritten(file, DAMAGE[damage])
    with pytest.raises(ValueError):  # noqa: PT011 (each has its own words)
        load_prompt_cache(file, model)


@pytest.mark.parametrize("index", [KEYS, VALUES, SEEN, -1])
def test_one_changed_bit_is_noticed(saved, index):
    def flip(array):
        raw = mx.contiguous(array).reshape(-1).view(mx.uint8)
        raw[array.nbytes // 2] = raw[array.nbytes // 2] ^ 1
        return raw.view(array.dtype).reshape(array.shape)

    model, _, file = saved()
    rewritten(file, replaced(index, flip))
    with pytest.raises(ValueError, match="is damaged"):
        load_prompt_cache(file, model)


@pytest.mark.parametrize("bytes_left", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(saved, bytes_left):
    model, _, file = saved()
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * bytes_left) if isinstance(bytes_left, float) else bytes_left])
    with pytest.raises((ValueError, RuntimeError)):
        load_prompt_cache(file, model)


def test_a_refused_state_leaves_the_cache_as_it_was(saved):
    _, caches, _ = saved()
    cache, before = caches[0], caches[0].copy()
    arrays = cache.state
    for wrong in (
        [],
        arrays[:-1],
        arrays[:1],
        arrays[:2],
        [arrays[0], *arrays[2:]],
        [arrays[0], arrays[3], *arrays[2:]],
    ):
        with pytest.raises(ValueError):  # noqa: PT011 (each has its own words)
            cache.state = wrong
        assert same([cache], [before])
        assert cache.offset == 50


def test_loaded_caches_notice_a_forward_pass_that_broke_off(saved, tokens):
    model, _, file = saved()
    loaded = load_prompt_cache(file, model, h2o())
    block = mx.zeros((1, 2, 1, 8))
    keys, _ = loaded[0].update_and_fetch(block, block)  # the first layer alone
    loaded[0].observe(mx.zeros((1, 4, 1, 8)), keys, 8**-0.5, None)
    with pytest.raises(RuntimeError, match="out of step: layer 1 has seen 50 tokens where layer 0 goes from 51 to 52"):
        model(tokens(1), cache=loaded)


class TestPrefixes:
    """mlx_lm's LRUPromptCache, which the server reuses prompts with."""

    @pytest.fixture
    def kept(self, tiny, tokens, feed):
        """A store with the caches of 30 + 10 tokens, the model and the tokens."""
        model, inputs = tiny(), tokens(60)
        caches = make_prompt_cache(model, h2o())
        feed(model, caches, inputs[:, :40], 30, 10)
        store = mlx_lm_cache.LRUPromptCache()
        store.insert_cache("tiny", inputs[0, :40].tolist(), caches)
        return store, model, inputs

    def test_a_longer_prompt_goes_on_from_a_copy(self, kept, feed):
        store, model, inputs = kept
        wanted = inputs[0].tolist()
        straight = make_prompt_cache(model, h2o())
        feed(model, straight, inputs[:, :40], 30, 10)
        expected = feed(model, straight, inputs[:, 40:], 10)
        for _ in range(3):  # what is in the store is never written to
            found, rest = store.fetch_nearest_cache("tiny", wanted)
            assert rest == wanted[40:]
            assert mx.array_equal(feed(model, found, inputs[:, 40:], 10), expected)
            assert same(found, straight)

    def test_the_same_prompt_is_found_whole(self, kept):
        store, _, inputs = kept
        found, rest = store.fetch_nearest_cache("tiny", inputs[0, :40].tolist())
        assert rest == []
        assert [cache.offset for cache in found] == [40, 40]

    def test_a_shorter_prompt_finds_nothing_after_an_eviction(self, kept):
        store, _, inputs = kept
        for length in (20, 35, 39):
            found, rest = store.fetch_nearest_cache("tiny", inputs[0, :length].tolist())
            assert found is None
            assert rest == inputs[0, :length].tolist()

    def test_a_shorter_prompt_of_one_block_is_taken_back_to(self, tiny, tokens, feed):
        model, inputs = tiny(), tokens(60)
        store = mlx_lm_cache.LRUPromptCache()
        caches = make_prompt_cache(model, h2o())
        feed(model, caches, inputs[:, :40], 40)
        store.insert_cache("tiny", inputs[0, :40].tolist(), caches)
        found, rest = store.fetch_nearest_cache("tiny", inputs[0, :25].tolist())
        assert rest == inputs[0, 24:25].tolist()
        straight = make_prompt_cache(model, h2o())
        feed(model, straight, inputs[:, :24], 24)
        assert [cache.offset for cache in found] == [24, 24]
        # A BLAS may round the keys of 24 tokens otherwise in a block of 40 than in one of 24.
        assert mx.allclose(feed(model, found, inputs[:, 24:]), feed(model, straight, inputs[:, 24:]), atol=1e-4)
        assert [cache.offset for cache in caches] == [40, 40]

    def test_bytes_are_counted_and_the_oldest_goes(self, kept):
        store, _, inputs = kept
        held = store.nbytes
        found, _ = store.fetch_nearest_cache("tiny", inputs[0, :40].tolist())
        assert held == sum(cache.nbytes for cache in found)
        small = mlx_lm_cache.LRUPromptCache(max_bytes=int(1.5 * held))
        for first in (1, 2, 3):
            small.insert_cache("tiny", [first, 2, 3], copy.deepcopy(found))
        assert len(small) == 1
        assert small.nbytes == held
