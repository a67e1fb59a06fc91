"""The text of the kernels: what MLX makes of it for Metal, and the rules that let three compilers take it."""

import importlib
import pkgutil
import re
from pathlib import Path

import mlx.core as mx
import pytest

import veloxfn.ops
from veloxfn.ops import kept, launch
from veloxfn.ops.launch import Body, Kernel, _folder, included, source_of

FILES = sorted(path for path in (_folder() / "metal").glob("*.metal") if path.name != "common.metal")
COMMON = _folder() / "metal" / "common.metal"

# What bodies may ask for: msl_cuda.h and msl_host.h have no other.
ATTRIBUTES = {
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threads_per_threadgroup": "uint3",
    "threadgroups_per_grid": "uint3",
    "thread_index_in_simdgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
}
# Attributes of Metal that MLX finds in a body, as parts of words too.
OTHER_ATTRIBUTES = (
    "dispatch_quadgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "grid_origin",
    "grid_size",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
    "simdgroups_per_threadgroup",
    "thread_execution_width",
    "thread_index_in_quadgroup",
    "thread_index_in_threadgroup",
    "thread_position_in_grid",
    "threads_per_grid",
    "threads_per_simdgroup",
)


def kernels():
    """Every kernel that a module of ops names, by its name."""
    found = {}
    for module in pkgutil.iter_modules(veloxfn.ops.__path__, "veloxfn.ops."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Kernel):
                found[value.name] = value
    return found


KERNELS = kernels()


def code_of(text):
    """A text without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def words_of(text):
    return set(re.findall(r"[A-Za-z_]\w*", code_of(text)))


def generated(kernel, path, capfd):
    """The source that MLX prints while a call is traced; neither compiler nor GPU is needed."""
    header, body = source_of(kernel, "metal")
    call = mx.fast.metal_kernel(
        name=f"traced_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        header=header,
        source=body,
    )

    def traced(*arrays):
        return call(
            inputs=list(arrays),
            template=[("T", mx.bfloat16), ("D", 64)],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(4, 4)] * len(kernel.outputs),
            output_dtypes=[mx.float32] * len(kernel.outputs),
            verbose=True,
        )

    capfd.readouterr()
    mx.export_function(str(path / "traced.mlxfn"), traced, *([mx.zeros((4, 4))] * len(kernel.inputs)))
    return capfd.readouterr().out


def breaches(text, arrays=()):
    """The rules that a text breaks; `arrays` are the names of its inputs, None where they are not known."""
    code, words = code_of(text), words_of(text)
    found = []
    if re.search(r"\b(device|constant)\b[^;(){}=]*\*", code):
        found.append("a pointer with an address space: small inputs are `constant`, others `device`; write `auto`")
    for word in words:
        if "__" in word or re.fullmatch(r"(thread|block)(Idx|Dim)|gridDim|warpSize|veloxfn_\w*|host", word):
            found.append(f"{word} is no word of Metal")
        if word == "double":
            found.append("Metal has no double")
        if any(name in word for name in ATTRIBUTES) and word not in ATTRIBUTES:
            found.append(f"{word} contains an attribute's name, which MLX finds by its letters")
        if any(name in word for name in OTHER_ATTRIBUTES):
            found.append(f"{word}: only {', '.join(ATTRIBUTES)} exist for CUDA and the host")
        suffix = re.fullmatch(r"(\w+)_(shape|strides|ndim)", word)
        if suffix and arrays is not None and suffix[1] not in arrays:
            found.append(f"{word}: no input is called {suffix[1]}")
    if re.search(r"^\s*#\s*include", code, flags=re.MULTILINE):
        found.append("includes belong into msl_metal.h")
    for literal in re.findall(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+[eE][+-]?\d)(?:[eE][+-]?\d+)?(?![\w.])", code):
        found.append(f"{literal} is a double for CUDA: write {literal}f")
    constants = set(re.findall(r"constexpr\s+\w+\s+(\w+)\s*=", code))
    for declared in re.findall(r"\bthreadgroup\b([^;]*;)", code):
        shape = re.fullmatch(r"\s+\w+(?:<\w+>)?\s+\w+((?:\s*\[[^\]]+\])*)\s*;", declared)
        if not shape:
            found.append(f"threadgroup{declared} is not the declaration of an array")
            continue
        for word in re.findall(r"[A-Za-z_]\w*", shape[1]):
            # Constants of the template are in capitals.
            if word not in constants and not re.fullmatch(r"[A-Z][A-Z0-9_]*", word):
                found.append(f"threadgroup{declared} has a size that is not constant: {word}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_body_keeps_the_rules(path):
    kernel = KERNELS.get(path.stem)
    assert breaches(path.read_text(), kernel.inputs if kernel else None) == []


def test_every_body_belongs_to_an_op():
    bodies = {body.name for kernel in KERNELS.values() for body in kernel.bodies or (Body(kernel.name),)}
    assert sorted(bodies) == [path.stem for path in FILES]


def test_the_common_functions_keep_the_rules():
    text = COMMON.read_text()
    assert breaches(text) == []
    assert not words_of(text) & {"device", "constant", "threadgroup"}, "pointers are template parameters"
    assert not words_of(text) & set(ATTRIBUTES), "attributes exist in bodies only: pass them"


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_metal_gets_the_text_as_it_is_and_what_it_asks_for(name, tmp_path, capfd):
    kernel = KERNELS[name]
    header, body = source_of(kernel, "metal")
    text = generated(kernel, tmp_path, capfd)
    assert header in text
    assert body in text
    signature = text[text.index("[[kernel]]") : text.index(body)]
    for attribute, kind in ATTRIBUTES.items():
        assert (f"{kind} {attribute} [[{attribute}]]" in signature) == (attribute in words_of(body)), attribute
    assert len(re.findall(r"\[\[(?!kernel|buffer)\w+\]\]", signature)) == len(words_of(body) & set(ATTRIBUTES))
    for array in kernel.inputs:
        assert f"const device float* {array} [[buffer(" in signature
        assert (f"const constant int* {array}_shape [[" in signature) == (f"{array}_shape" in words_of(body)), array
    for array in kernel.outputs:
        assert f"  device float* {array} [[buffer(" in signature


def expanded(text):
    """A text with the files that it includes."""
    return re.sub(r'#include "([^"]+)"\n', lambda found: Path(found[1]).read_text(), text)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where files are kept, by a name that can be chosen."""

    def chosen(name):
        made = tmp_path / name
        made.mkdir()
        monkeypatch.setattr(kept, "kept_files", lambda: made)
        return made

    return chosen


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_cuda_gets_the_text_by_the_names_of_files_and_the_shapes_it_asks_for(name, folder):
    folder("kept")
    kernel = KERNELS[name]
    whole, (header, body) = source_of(kernel, "cuda"), included(kernel)
    assert expanded(header) == whole[0]
    shapes, _, rest = body.partition("\n")
    assert expanded(rest) == whole[1]
    asked = {f"{array}_shape" for array in kernel.inputs if f"{array}_shape" in whole[1]}
    assert set(re.findall(r"\w+_shape", shapes)) == asked
    assert len(header + body) < 1500, "MLX hashes it in every launch"


def test_a_changed_file_is_written_anew_and_an_installation_may_change(folder):
    made = folder("kept")
    kernel = KERNELS["weakest"]
    before = included(kernel)
    for path in made.iterdir():
        path.write_text("int changed;")
    assert included(kernel) == before
    assert expanded(before[0]) == source_of(kernel, "cuda")[0]
    assert str(_folder()) not in "".join(before)


def test_cuda_gets_the_text_itself_where_no_file_can_be_named_or_written(folder, monkeypatch):
    kernel = KERNELS["weakest"]
    folder('a"b')
    assert included(kernel) == source_of(kernel, "cuda")
    monkeypatch.setattr(kept, "kept_files", lambda: None)
    assert included(kernel) == source_of(kernel, "cuda")
    folder("gone").rmdir()
    assert included(kernel) == source_of(kernel, "cuda")
    assert "#include" not in included(kernel)[1]


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_array_is_used_and_named_once(name):
    kernel = KERNELS[name]
    arrays = kernel.inputs + kernel.outputs
    body = source_of(kernel, "metal")[1]
    assert len(set(arrays)) == len(arrays)
    used = {re.sub(r"_(shape|strides|ndim)$", "", word) for word in words_of(body)}
    assert set(arrays) <= used
    # A local of the same name would hide the array, unless it is another name for one.
    for name, array in (alias for part in kernel.bodies for alias in part.aliases):
        body = body.replace(f"auto {name} = {array};\n", "")
    for array in arrays:
        assert not re.search(rf"\b(?:auto|bool|float|int|uint|ulong|half|T)\s+{array}\b", code_of(body)), array


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("const device float* row = keys;", "pointer"),
        ("constant int *p = keys_shape;", "pointer"),
        ("int i = threadIdx.x;", "threadIdx"),
        ("__syncthreads();", "__syncthreads"),
        ("uint my_thread_index_in_simdgroup = 0;", "contains an attribute"),
        ("uint i = thread_position_in_grid.x;", "only thread_position"),
        ("uint n = other_shape[0];", "no input is called other"),
        ("threadgroup float x[n];", "not constant: n"),
        ("threadgroup float* x = y;", "not the declaration"),
        ("float x = 1.5;", "write 1.5f"),
        ("float x = 1e-3;", "write 1e-3f"),
        ("double x;", "no double"),
        ("#include <metal_stdlib>", "msl_metal.h"),
    ],
)
def test_a_breach_is_found(text, said):
    assert any(said in breach for breach in breaches(text, ("keys",)))


def test_what_is_allowed_is_no_breach():
    text = """
    // device float* in a comment, __ too
    constexpr int E = (D + 31) / 32;
    constexpr int wide = 4;
    threadgroup float x[32 * E][wide];
    threadgroup atomic<uint> n;
    auto row = keys + 3;
    float y = 1.5f + 2e-3f + float(keys_shape[0]) * 2.f;
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    """
    assert breaches(text, ("keys",)) == []


def test_cudas_compiler_learns_how_many_threads_a_block_may_have(monkeypatch):
    made = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **how: made.append(how) or how["name"])
    build = launch._made.__wrapped__
    kernel = KERNELS["attend_finish"]
    names = [build(kernel._replace(alone=alone), "cuda", most) for most in (256, 384, 544) for alone in (False, True)]
    bounds = [how["header"].removeprefix(included(kernel)[0]).split("__launch_bounds__")[1:] for how in made]
    assert bounds == [[], [], ["(384)\n"], ["(384, 1)\n"], ["(544)\n"], ["(544, 1)\n"]]
    assert all(how["source"] == included(kernel)[1] for how in made)
    assert len(set(names)) == 5, "a name for each text, and no more"
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **how: how["header"])
    assert build(kernel, "metal", 544) == source_of(kernel, "metal")[0]


def test_a_kernel_is_built_once_whatever_the_number_of_threads(monkeypatch):
    asked = []
    monkeypatch.setattr(launch, "_made", lambda kernel, backend, most: asked.append(most))
    for name, counts in {"weakest": (32, 1024), "attend_finish": (256, 544), "fold_tokens": (256, 384)}.items():
        for threads in counts:
            launch._call.__wrapped__(KERNELS[name], "cuda", (), (), (1, 1, 1), threads, None)
    assert asked == [1024, 1024, 544, 544, 256, 384]


def test_more_threads_than_a_kernel_may_have_are_refused():
    with pytest.raises(ValueError, match="attend is built for 256 threads at most, got 288"):
        launch.launch(KERNELS["attend"], "host", [], [], template={}, groups=(1, 1, 1), threads=288)
