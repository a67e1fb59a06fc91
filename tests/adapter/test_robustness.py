"""Long runs, calls that fail half-way, threads: nothing grows, nothing is left behind, nothing goes on wrong."""

import copy
import gc
import io
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base, llama

import veloxfn
from veloxfn_mlx_adapter import EvictingCache, hook_installed, make_prompt_cache, query_capture

METHODS = ["h2o", "keyformer", "cam", "snapkv", "knorm"]


def kept(caches):
    """Positions that each layer would keep, oldest first, by row; the caches are left alone."""
    result = []
    for cache in (each.copy() for each in caches):
        cache.settle()
        rows = veloxfn.kept_positions(cache.method_state).tolist()
        result.append([[position for position in row if position >= 0] for row in rows])
    return result


def nodes(array):
    """Operations that evaluating an array would run."""
    text = io.StringIO()
    mx.export_to_dot(text, array)
    return text.getvalue().count("shape=rectangle")


class TestTenThousandTokens:
    def test_neither_memory_nor_work_nor_objects_grow(self, tiny, caches_of):
        model, budget = tiny(num_hidden_layers=2), 512
        caches = caches_of(model, budget=budget)
        token, held, taken, objects, work = mx.array([[1]]), [], [], [], []
        for step in range(1, 10_001):
            measured = (step - 1) % 1000 >= 1000 - 128
            if measured:
                mx.clear_cache()
                held.append(mx.get_active_memory())
                mx.reset_peak_memory()
            logits = model(token, cache=caches)
            if step % 1000 == 0:
                work.append(nodes(logits))
                gc.collect()
                objects.append(len(gc.get_objects()))
            token = logits[:, -1].argmax(axis=-1, keepdims=True)
            mx.eval(token)  # as decoding does: the caches' states are never evaluated for themselves
            if measured:
                taken.append(mx.get_peak_memory() - held[-1])
        # Which of a step's small buffers are alive together is up to the scheduler, and adds to what the step needs: 20
        # kB on a busy machine, where a copy of the cache is 66 kB.
        active, peaks = ([min(each[i : i + 128]) for i in range(0, 1280, 128)] for each in (held, taken))
        assert [cache.offset for cache in caches] == [10_000] * 2
        assert [cache.tokens_kept for cache in caches] == [budget] * 2
        assert len({*work}) == 1, work
        assert work[0] > 20
        row = 2 * 2 * 8 * 4  # keys and values of one token in one layer
        assert max(active) - min(active) < 8 * row, active
        assert max(peaks) - min(peaks) < (budget + 1) * row, peaks
        assert max(objects[1:]) - min(objects[1:]) < 1000, objects

    def test_the_graph_of_a_step_is_as_large_after_eviction_as_its_budget_says(self, tiny, caches_of, tokens):
        """The work of a step does not depend on the tokens seen, nor, in launches, on the budget."""
        model, found = tiny(), []
        for budget in (16, 256):
            caches = caches_of(model, budget=budget)
            model(tokens(300), cache=caches)
            for _ in range(4):
                logits = model(tokens(1), cache=caches)
                found.append(nodes(logits))
                mx.eval(logits)
        assert found[2:4] == found[6:8]


class BrokenError(Exception):
    pass


class Failing(nn.Module):
    """A layer, or its attention's output projection, that raises when told to."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.fail = inner, False

    def __call__(self, *arguments, **named):
        if self.fail:
            raise BrokenError
        return self.inner(*arguments, **named)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


LAYERS = 3


@pytest.fixture
def breakable():
    """A model of three layers and the places where it can be made to fail."""
    from .conftest import tiny_model

    model = tiny_model(num_hidden_layers=LAYERS)
    places = {}
    for i, layer in enumerate(model.model.layers):
        places[f"before layer {i}"] = model.model.layers[i] = Failing(layer)
    attention = model.model.layers[1].inner.self_attn
    places["after the attention of layer 1"] = attention.o_proj = Failing(attention.o_proj)
    places["after all layers"] = model.model.norm = Failing(model.model.norm)
    return model, places


def fail(model, place, caches, inputs):
    place.fail = True
    with pytest.raises(BrokenError):
        model(inputs, cache=caches)
    place.fail = False


def rewind(caches, seen):
    for cache in caches:
        cache.trim(cache.offset - seen)


class TestBrokenForward:
    PLACES = ("before layer 1", "before layer 2", "after the attention of layer 1")

    @pytest.mark.parametrize("count", [1, 5])
    @pytest.mark.parametrize("where", PLACES)
    def test_going_on_is_refused_and_says_which_layers(self, breakable, caches_of, tokens, where, count):
        model, places = breakable
        caches = caches_of(model, budget=16)
        model(tokens(30), cache=caches)
        fail(model, places[where], caches, tokens(count))
        states = [cache.state for cache in caches]
        for again in (1, 5):  # and it is refused as long as nobody has mended it
            with pytest.raises(
                RuntimeError, match=r"out of step: layer \d has seen \d+ tokens where layer \d goes from"
            ):
                model(tokens(again), cache=caches)
        for cache, before in zip(caches, states, strict=True):
            assert all(mx.array_equal(a, b) for a, b in zip(cache.state, before, strict=True))

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("count", [1, 5])
    @pytest.mark.parametrize("where", [*PLACES, "after all layers"])
    def test_taking_back_repairs_it(self, breakable, caches_of, tokens, feed, method, where, count):
        model, places = breakable
        inputs = tokens(60)
        caches, straight = (caches_of(model, method, budget=16, sink=2) for _ in range(2))
        feed(model, caches, inputs[:, :40], 30)
        fail(model, places[where], caches, inputs[:, 40 : 40 + count])
        rewind(caches, 40)
        assert [cache.offset for cache in caches] == [40] * LAYERS
        # What was evicted before the call that failed stays evicted: the block before it cannot be taken back as well.
        feed(model, straight, inputs[:, :40], 30)
        for start, stop in ((40, 40 + count), (40 + count, 47), (47, 48), (48, 49)):
            first, second = (model(inputs[:, start:stop], cache=each) for each in (caches, straight))
            assert mx.allclose(first, second, atol=1e-5)
            assert kept(caches) == kept(straight)

    def test_before_the_first_layer_nothing_happened(self, breakable, caches_of, tokens, feed):
        model, places = breakable
        caches, straight = (caches_of(model, budget=16) for _ in range(2))
        for each in (caches, straight):
            feed(model, each, tokens(30), 30)
        fail(model, places["before layer 0"], caches, tokens(1))
        assert mx.array_equal(model(tokens(1), cache=caches), model(tokens(1), cache=straight))

    def test_in_the_very_first_call(self, breakable, caches_of, tokens):
        model, places = breakable
        caches, straight = (caches_of(model, budget=16) for _ in range(2))
        fail(model, places["before layer 1"], caches, tokens(20))
        with pytest.raises(
            RuntimeError, match="out of step: layer 0 has seen 21 tokens where layer 1 goes from 0 to 1"
        ):
            model(tokens(1), cache=caches)

        caches = caches_of(model, budget=16)
        fail(model, places["before layer 1"], caches, tokens(20))
        rewind(caches, 0)
        assert all(cache.empty() for cache in caches)
        for count in (20, 1, 3):
            assert mx.allclose(model(tokens(count), cache=caches), model(tokens(count), cache=straight), atol=1e-5)

    def test_an_interrupt_is_an_exception_like_any_other(self, breakable, caches_of, tokens, monkeypatch):
        model, _ = breakable
        caches = caches_of(model, budget=16)
        model(tokens(30), cache=caches)
        calls, original = [], llama.Attention.__call__

        def interrupted(self, *arguments, **named):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return original(self, *arguments, **named)

        monkeypatch.setattr(llama.Attention, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(tokens(1), cache=caches)
        with pytest.raises(RuntimeError, match="out of step"):
            model(tokens(1), cache=caches)
        rewind(caches, 30)
        assert mx.isfinite(model(tokens(1), cache=caches)).all()

    @pytest.mark.parametrize("made", ["merged", "merged alone", "extended", "extracted", "filtered"])
    def test_batches_are_watched(self, breakable, caches_of, tokens, made):
        model, places = breakable
        first, second = (caches_of(model, budget=16) for _ in range(2))
        model(tokens(30), cache=first)
        model(tokens(20, seed=1), cache=second)
        if made == "merged alone":
            batch = [EvictingCache.merge([cache]) for cache in first]
        else:
            batch = [EvictingCache.merge(pair) for pair in zip(first, second, strict=True)]
        if made == "extended":
            for cache, other in zip(batch, copy.deepcopy(second), strict=True):
                cache.extend(other)
        if made == "extracted":
            batch = [cache.extract(1) for cache in batch]
        if made == "filtered":
            for cache in batch:
                cache.filter([1])
        size = len(batch[0].method_state.slots.seen) // 2
        model(tokens(1, batch=size), cache=batch)
        fail(model, places["before layer 1"], batch, tokens(1, batch=size))
        with pytest.raises(RuntimeError, match="out of step: layer 1 has seen"):
            model(tokens(1, batch=size), cache=batch)
        batch[0].trim(1)
        model(tokens(1, batch=size), cache=batch)
        apart = [[cache.extract(i) for i in range(size)] for cache in batch]  # all of one layer, then of the next
        for i in range(size):
            model(tokens(1), cache=[caches[i] for caches in apart])
        again = [EvictingCache.merge([cache]) for cache in batch]  # a lockstep of its own, each time
        model(tokens(1, batch=size), cache=again)
        model(tokens(1, batch=size), cache=[EvictingCache.merge([cache]) for cache in batch])

    def test_a_broken_pass_over_padding_is_noticed(self, breakable, caches_of, tokens):
        """The longest sequence has nothing but padding there."""
        model, places = breakable
        first, second = (caches_of(model, budget=16) for _ in range(2))
        model(tokens(20), cache=first)
        model(tokens(3), cache=second)
        batch = [EvictingCache.merge(pair) for pair in zip(first, second, strict=True)]
        for cache in batch:
            cache.prepare(lengths=[1, 9], right_padding=[8, 0])
        model(tokens(3, batch=2), cache=batch)
        fail(model, places["before layer 1"], batch, tokens(3, batch=2))
        with pytest.raises(RuntimeError, match=r"out of step: layer 1 has seen \[21, 6\] tokens where layer 0"):
            model(tokens(3, batch=2), cache=batch)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
    def test_caches_copied_one_by_one_go_on(self, tiny, caches_of, tokens, copied):
        model = tiny()
        caches = caches_of(model, budget=8)
        model(tokens(5), cache=caches)
        apart = [copied(cache) for cache in caches]
        model(tokens(1), cache=apart)
        model(tokens(3), cache=caches)
        assert [cache.offset for cache in (*apart, *caches)] == [6, 6, 8, 8]

    def test_two_of_each_made_layer_by_layer(self, tiny, caches_of, tokens):
        model = tiny()
        caches = caches_of(model, budget=8)
        model(tokens(5, batch=2), cache=caches)
        pairs = [(cache.extract(0), cache.extract(0)) for cache in caches]
        model(tokens(1), cache=[pair[0] for pair in pairs])
        model(tokens(2), cache=[pair[1] for pair in pairs])

    @pytest.mark.parametrize("taken", [1, 9, 20])
    @pytest.mark.parametrize(
        "padding", [{"lengths": [12, 20]}, {"right_padding": [8, 0]}, {"left_padding": [8, 0]}], ids=str
    )
    def test_padding_that_was_taken_back_comes_again(self, tiny, caches_of, tokens, padding, taken):
        model, inputs = tiny(), tokens(25, batch=2)
        again, straight = (caches_of(model, budget=16) for _ in range(2))
        for cache in (*again, *straight):
            cache.prepare(**padding)
        model(inputs[:, :20], cache=again)
        for cache in again:
            cache.trim(taken)
        own = slice(8, None) if "left_padding" in padding else slice(0, 12)
        first = model(inputs[:, 20 - taken : 20], cache=again)
        if taken < 20:
            for cache in straight if "right_padding" in padding else ():
                cache.prepare(lengths=[12, 20])
            model(inputs[:, : 20 - taken], cache=straight)
        second = model(inputs[:, 20 - taken : 20], cache=straight)
        assert again[0].offset.tolist() == straight[0].offset.tolist() == [12, 20]
        assert mx.allclose(first[1], second[1], atol=1e-5)
        assert kept(again) == kept(straight)
        if taken == 20:
            assert mx.allclose(first[0, own], second[0, own], atol=1e-5)

    def test_the_models_own_layers_are_not_watched(self, breakable, tokens):
        """A layer that does not evict cannot tell; the others still do."""
        model, places = breakable
        policy = veloxfn.policy(veloxfn.knorm.Config(budget=16))
        caches = make_prompt_cache(model, [policy, None, policy])
        model(tokens(30), cache=caches)
        fail(model, places["before layer 1"], caches, tokens(1))
        with pytest.raises(RuntimeError, match="layer 2 has seen 30 tokens where layer 0 goes from 31 to 32"):
            model(tokens(1), cache=caches)


WRONG = {
    "dtype": (mx.zeros((1, 2, 1, 8), mx.float16), mx.zeros((1, 2, 1, 8), mx.float16)),
    "dtype of values": (mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1, 8), mx.float16)),
    "dimension": (mx.zeros((1, 2, 1, 4)), mx.zeros((1, 2, 1, 8))),
    "dimension of values": (mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1, 4))),
    "heads": (mx.zeros((1, 4, 1, 8)), mx.zeros((1, 4, 1, 8))),
    "batch": (mx.zeros((2, 2, 1, 8)), mx.zeros((2, 2, 1, 8))),
    "heads times batch": (mx.zeros((2, 1, 1, 8)), mx.zeros((2, 1, 1, 8))),
    "axes": (mx.zeros((2, 1, 8)), mx.zeros((2, 1, 8))),
    "tokens": (mx.zeros((1, 2, 2, 8)), mx.zeros((1, 2, 1, 8))),
}


class TestRefusedUpdate:
    @pytest.mark.parametrize("wrong", WRONG)
    @pytest.mark.parametrize("method", ["h2o", "knorm"])
    def test_it_leaves_caches_as_they_were_and_in_step(self, tiny, caches_of, tokens, feed, method, wrong):
        model, inputs = tiny(), tokens(50)
        caches, straight = (caches_of(model, method, budget=16) for _ in range(2))
        for each in (caches, straight):
            feed(model, each, inputs[:, :40], 30)  # one-token steps at full budget: they are compiled
        before = [cache.state for cache in caches]
        with pytest.raises((ValueError, TypeError)):
            caches[0].update_and_fetch(*WRONG[wrong])
        for cache, state in zip(caches, before, strict=True):
            assert all(mx.array_equal(a, b) for a, b in zip(cache.state, state, strict=True))
        assert mx.array_equal(feed(model, caches, inputs[:, 40:], 3), feed(model, straight, inputs[:, 40:], 3))

    @pytest.mark.parametrize("wrong", ["dtype of values", "axes", "tokens"])
    def test_an_empty_cache_stays_empty(self, tiny, caches_of, tokens, wrong):
        model = tiny()
        caches = caches_of(model, budget=16)
        with pytest.raises((ValueError, TypeError)):
            caches[0].update_and_fetch(*WRONG[wrong])
        assert caches[0].empty()
        expected = model(tokens(20), cache=caches_of(model, budget=16))
        assert mx.array_equal(model(tokens(20), cache=caches), expected)


class TestCopies:
    def test_a_copied_list_keeps_step_as_a_group_of_its_own(self, breakable, caches_of, tokens):
        model, places = breakable
        caches = caches_of(model, budget=16)
        model(tokens(30), cache=caches)
        copied = copy.deepcopy(caches)
        fail(model, places["before layer 2"], copied, tokens(1))
        with pytest.raises(RuntimeError, match="out of step"):
            model(tokens(1), cache=copied)
        model(tokens(1), cache=caches)  # the first list knows nothing of it
        rewind(copied, 30)
        again = copy.deepcopy({"held": copied})["held"]
        fail(model, places["before layer 1"], caches, tokens(1))
        first, second = model(tokens(1), cache=copied), model(tokens(1), cache=again)
        assert mx.array_equal(first, second)
        with pytest.raises(RuntimeError, match="out of step"):
            model(tokens(1), cache=caches)

    def test_a_copy_of_caches_out_of_step_is_out_of_step(self, breakable, caches_of, tokens):
        model, places = breakable
        caches = caches_of(model, budget=16)
        model(tokens(30), cache=caches)
        fail(model, places["before layer 1"], caches, tokens(1))
        copied = copy.deepcopy(caches)
        with pytest.raises(RuntimeError, match="out of step"):
            model(tokens(1), cache=copied)
        rewind(copied, 30)
        model(tokens(1), cache=copied)

    def test_pickled_caches_hold_the_hook(self, tiny, caches_of, tokens):
        model = tiny()
        caches = caches_of(model, budget=16)
        model(tokens(30), cache=caches)
        copied = pickle.loads(pickle.dumps(caches))
        expected = [model(tokens(1), cache=caches) for _ in range(2)]
        del caches
        gc.collect()
        assert all(mx.array_equal(model(tokens(1), cache=copied), each) for each in expected)


class TestHook:
    @pytest.fixture(autouse=True)
    def clean(self):
        gc.collect()
        assert not hook_installed()
        originals = {
            (module.__name__, name): value
            for module in list(sys.modules.values())
            if getattr(module, "__name__", "").startswith("mlx_lm.")
            for name, value in list(vars(module).items())
            if callable(value)
        }
        yield
        gc.collect()
        assert not hook_installed()
        for (module, name), value in originals.items():
            assert vars(sys.modules[module])[name] is value, f"{module}.{name}"

    def test_nothing_is_left_after_exceptions(self, breakable, tokens):
        model, places = breakable
        policy = veloxfn.policy(veloxfn.h2o.Config(budget=16, age_normalised=True))
        for depth in range(3):
            caches = make_prompt_cache(model, policy)
            model(tokens(20), cache=caches)
            fail(model, places[f"before layer {depth}"], caches, tokens(1))
            with pytest.raises(ValueError, match="one entry per cache"):
                make_prompt_cache(model, [policy])
            with pytest.raises(BrokenError), query_capture(model), query_capture():
                raise BrokenError
            assert hook_installed()
            del caches
            gc.collect()
            assert not hook_installed()

    def test_captures_end_in_any_order(self, tiny):
        first, second = query_capture(tiny()), query_capture()
        original = base.scaled_dot_product_attention
        first.__enter__()
        hooked = base.scaled_dot_product_attention
        second.__enter__()
        assert base.scaled_dot_product_attention is hooked is not original, "one replacement, however often"
        first.__exit__(None, None, None)
        assert base.scaled_dot_product_attention is hooked
        second.__exit__(None, None, None)
        assert base.scaled_dot_product_attention is original

    def test_threads_make_drop_and_run_at_once(self, tiny, tokens):
        """Each thread's logits are those of a run alone, with caches coming and going in the others."""
        model, inputs = tiny(), tokens(44)
        policies = [
            veloxfn.policy(veloxfn.h2o.Config(budget=16, age_normalised=True)),
            veloxfn.policy(veloxfn.knorm.Config(budget=16)),
        ]
        mx.eval(inputs)

        def run(policy, pause=lambda: None):
            caches, logits = make_prompt_cache(model, policy), []
            for start, stop in ((0, 20), (20, 24), *((i, i + 1) for i in range(24, 44))):
                logits.append(model(inputs[:, start:stop], cache=caches))
                mx.eval(logits[-1])
                pause()
            return [each.tolist() for each in logits]

        expected = [run(policy) for policy in policies]
        stop, errors = threading.Event(), []

        def churn():
            try:
                while not stop.is_set():
                    held = [EvictingCache(policies[0]) for _ in range(5)]
                    with query_capture():
                        del held
            except BaseException as error:
                errors.append(error)

        churning = [threading.Thread(target=churn) for _ in range(2)]
        for thread in churning:
            thread.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda i: run(policies[i % 2]), range(8)))
        finally:
            stop.set()
            for thread in churning:
                thread.join()
        assert not errors
        assert found == expected * 4
