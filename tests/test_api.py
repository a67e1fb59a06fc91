"""The shape of the library: same names, same parameters, pure sources."""

import ast
import dataclasses
import inspect
import pathlib

import mlx.core as mx
import pytest

import veloxfn
from veloxfn import h2o, knorm, streaming_llm

NAMES = ["Config", "State", "init_state", "absorb", "evict", "update_batched", "get_kv", "policy"]
PARAMETERS = {
    "init_state": ["config", "rows", "key_dim", "value_dim", "dtype", "streams"],
    "absorb": ["config", "state", "keys", "values", "valid"],
    "evict": ["config", "state", "queries", "attention"],
    "update_batched": ["config", "state", "keys", "values", "queries", "attention", "valid"],
    "get_kv": ["config", "state"],
    "policy": ["config"],
}
POSITIONAL = {"config", "state", "rows", "key_dim", "value_dim", "keys", "values"}
PACKAGE = pathlib.Path(veloxfn.__file__).parent
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if "testing" not in path.relative_to(PACKAGE).parts]

methods = pytest.mark.parametrize("method", veloxfn.METHODS.values(), ids=veloxfn.METHODS)


@methods
def test_every_method_exports_the_same_names_in_the_same_order(method):
    assert method.__all__ == NAMES


@methods
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_function_has_the_shared_parameters(method, name):
    parameters = inspect.signature(getattr(method, name)).parameters
    assert list(parameters)[: len(PARAMETERS[name])] == PARAMETERS[name]
    for parameter in parameters.values():
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword_only == (parameter.name not in POSITIONAL), parameter


@methods
def test_config_is_a_frozen_keyword_only_hashable_dataclass(method):
    config = method.Config(budget=16)
    assert config == method.Config(budget=16)
    assert hash(config) == hash(method.Config(budget=16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 8
    with pytest.raises(TypeError):
        method.Config(16)


@methods
def test_state_is_a_named_tuple_of_arrays_with_slots_first_and_rows_leading(method):
    config = method.Config(budget=16)
    state = method.init_state(config, 3, 4)
    assert method.State._fields[0] == "slots"
    for leaf in [*state.slots, *state[1:]]:
        assert isinstance(leaf, mx.array)
        assert leaf.shape[0] == 3


@methods
def test_policy_binds_the_config(method):
    config = method.Config(budget=16)
    policy = veloxfn.policy(config)
    assert policy.config is config
    assert policy._fields == ("config", "init_state", "absorb", "candidates", "evict", "update_batched", "get_kv")
    state = policy.init_state(2, 4, dtype=mx.float32)
    assert type(state) is method.State
    assert state.slots.keys.shape == (2, 17, 4)


def test_policy_of_an_unknown_config_names_the_known_ones():
    with pytest.raises(TypeError, match=r"h2o\.Config.*got Retention"):
        veloxfn.policy(veloxfn.Retention())


def test_defaults_are_the_papers():
    assert (h2o.Config().budget, h2o.Config().sink, h2o.Config().recent_rows) == (512, 4, 256)
    assert (h2o.Config(budget=8).recent_rows, h2o.Config(budget=2, sink=1).recent_rows) == (3, 0)
    assert (h2o.Config().decay, h2o.Config().age_normalised, h2o.Config().query_source) == (1.0, False, "true")
    assert (knorm.Config().sink, knorm.Config().recent, knorm.Config().keep) == (4, 0, "low")
    assert streaming_llm.Config().sink == 4


FORBIDDEN_CALLS = {"eval", "async_eval", "item", "tolist", "seed", "synchronize", "print"}


def test_the_sources_of_all_methods_and_ops_are_looked_at():
    assert {"h2o.py", "slots.py", "attention_mass.py", "retention.py"} <= {path.name for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_lesson_38_update_code_has_no_sync_no_numpy_no_global_rng_no_item_assignment(path):
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            assert not {"numpy", "random"} & {name.split(".")[0] for name in names}, where
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in FORBIDDEN_CALLS, f"{where} calls .{node.func.attr}()"
        if isinstance(node, ast.Attribute) and node.attr == "random":
            raise AssertionError(f"{where} uses the random module")
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assert not any(isinstance(target, ast.Subscript) for target in targets), f"{where} assigns to an item"
        assert not isinstance(node, ast.Assert), f"{where} asserts"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_conditions_are_joined_as_mx_vmap_maps_them(path):
    """By `mx.logical_and`: MLX maps `&` and `|` wrongly where one side is not mapped and has two axes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
            compared = any(isinstance(part, ast.Compare) for part in ast.walk(node))
            assert not compared, f"{path.name}:{node.lineno} joins conditions by & or |"
