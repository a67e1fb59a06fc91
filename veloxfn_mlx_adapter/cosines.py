"""How little attention changes in each layer of a model: what `veloxfn.budgets.squeeze` goes by."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_lm_cache

from veloxfn import checks
from veloxfn_mlx_adapter.prompt_cache import stock_caches

__all__ = ["layer_cosines"]

nn: Any = mlx.nn  # without types

_ATTENTION = ("self_attn", "attn", "attention")  # what blocks call theirs
_CHUNK = 2048  # tokens of one call, as in mlx_lm
_lock = threading.RLock()  # one measurement at a time: each changes classes and changes them back


def layer_cosines(model: Any, tokens: Any, *, layers: Sequence[int] | None = None) -> dict[int, float]:
    """Mean cosine, over the tokens of a prompt, between the hidden state before a layer's attention and after it.

    The state after is that with the residual added. Near 1 means that attention changes little (SqueezeAttention, arXiv
    2404.04793). The model reads the prompt once, with its own caches; it is watched from outside and not changed.

    Args:
        model: an `mlx_lm` model whose blocks are modules with an attention in them, like llama's.
        tokens: of the prompt: [T] or [B, T] ints without padding, an array or nested lists.
        layers: indices of those to measure; None = all that a policy can evict from, those of full attention.

    Returns:
        Layer -> mean cosine in -1 .. 1, in the order of the layers.

    Raises:
        ValueError: layers whose hidden states cannot be seen, each named; no tokens; or states that are not finite.
        TypeError: tokens that are no ints.

    >>> rows = veloxfn.budgets.squeeze(layer_cosines(model, prompt).values(), 256, 0.8)  # doctest: +SKIP
    """
    prompt = tokens if isinstance(tokens, mx.array) else mx.array(tokens)
    prompt = prompt[None] if prompt.ndim == 1 else prompt
    if prompt.ndim != 2 or not prompt.size:
        raise ValueError(f"tokens must be [T] or [B, T] and not empty, got {list(prompt.shape)}")
    if not mx.issubdtype(prompt.dtype, mx.integer):
        raise TypeError(f"tokens must be ints, got {prompt.dtype}")
    caches, blocks = stock_caches(model), list(model.layers)
    if layers is None:
        layers = [i for i, cache in enumerate(caches) if type(cache) is mlx_lm_cache.KVCache]
    for i in layers:
        checks.integer("layers", i, low=0, high=len(blocks) - 1)
    seen = {i: _Seen() for i in sorted(set(layers))}
    with _watched({i: blocks[i] for i in seen}, seen):
        for start in range(0, prompt.shape[1], _CHUNK):
            model(prompt[:, start : start + _CHUNK], cache=caches)
            mx.eval([each.total for each in seen.values()], [cache.state for cache in caches if not cache.empty()])
    name = f"{type(model).__module__}.{type(model).__name__}"
    if unseen := [i for i, each in seen.items() if each.tokens != prompt.size]:
        raise ValueError(
            f"the hidden states around the attention of layers {unseen} of {name} cannot be seen: their blocks must "
            f"call a module {', '.join(_ATTENTION[:-1])} or {_ATTENTION[-1]}, then a norm of its sum with the residual"
        )
    means = {i: cast(float, each.total.item()) / each.tokens for i, each in seen.items()}
    if broken := [i for i, mean in means.items() if not math.isfinite(mean)]:
        raise ValueError(f"the hidden states of layers {broken} of {name} are not finite")
    return {i: min(1.0, max(-1.0, mean)) for i, mean in means.items()}


@dataclass
class _Seen:
    """What one block shows while it is called, and the sum over its calls."""

    before: mx.array | None = None  # [B, T, H], the input of the block
    asked: mx.array | None = None  # the input of its attention
    answer: mx.array | None = None  # the output of its attention
    after: mx.array | None = None  # [B, T, H], with the residual
    normed: bool = False  # the answer went through a norm of its own
    total: mx.array = field(default_factory=lambda: mx.array(0.0))
    tokens: int = 0

    def sees(self, module: Any, given: mx.array) -> None:
        """A module of the block is called. The first that follows attention and looks beyond its answer tells."""
        if self.answer is None or self.after is not None or self.before is None:
            return
        if given is self.answer:
            self.normed = True
        elif given is self.asked or given is self.before:  # attention and the rest stand side by side
            self.after = self.before + self.answer
        elif given.shape == self.before.shape and (self.normed or "norm" in type(module).__name__.lower()):
            self.after = given

    def ends(self) -> None:
        """The block's call is over."""
        if self.before is not None and self.after is not None:
            first, second = self.before.astype(mx.float32), self.after.astype(mx.float32)
            norms = mx.linalg.norm(first, axis=-1) * mx.linalg.norm(second, axis=-1)
            self.total = self.total + ((first * second).sum(axis=-1) / mx.maximum(norms, 1e-30)).sum()
            self.tokens += math.prod(first.shape[:-1])
        self.before = self.asked = self.answer = self.after = None
        self.normed = False


@contextmanager
def _watched(blocks: dict[int, Any], seen: dict[int, _Seen]) -> Iterator[None]:
    """Let calls of the blocks and of the modules right inside them tell `seen`.

    Python looks `__call__` up in the class, so the classes get another for a while. It does nothing but call the
    original for other instances and in other threads.
    """
    roles: dict[int, tuple[_Seen, str]] = {}
    classes: set[type] = set()
    for i, block in blocks.items():
        children: Any = tree_flatten(block.children(), is_leaf=lambda child: isinstance(child, nn.Module))
        inside = [module for _, module in children]
        attention = next((block[name] for name in _ATTENTION if isinstance(block.get(name), nn.Module)), None)
        for module in (block, *inside):
            role = "block" if module is block else "attention" if module is attention else "other"
            roles[id(module)] = (seen[i], role)
            classes.add(type(module))
    with _lock:
        originals = {kind: kind.__call__ for kind in classes}
        inherited = [kind for kind in classes if "__call__" not in vars(kind)]
        try:
            for kind, original in originals.items():
                kind.__call__ = _telling(kind, original, roles, threading.get_ident())  # type: ignore[method-assign]
            yield
        finally:
            for kind, original in originals.items():
                if kind in inherited:
                    del kind.__call__
                else:
                    kind.__call__ = original  # type: ignore[method-assign]


def _telling(
    kind: type, original: Callable[..., Any], roles: dict[int, tuple[_Seen, str]], thread: int
) -> Callable[..., Any]:
    """`original`, the `__call__` of a class, that tells of the modules in `roles`."""

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        watched = roles.get(id(self)) if type(self) is kind and threading.get_ident() == thread else None
        given = _array((*arguments, *named.values()))
        if watched is None or given is None:
            return original(self, *arguments, **named)
        seen, role = watched
        if role == "block":
            seen.before = given
        elif role == "attention":
            seen.asked = given
        else:
            seen.sees(self, given)
        answer = original(self, *arguments, **named)
        if role == "block":
            seen.ends()
        elif role == "attention":
            seen.answer = _array(answer if isinstance(answer, tuple) else (answer,))
        return answer

    return call


def _array(values: Sequence[Any]) -> mx.array | None:
    """The first array."""
    return next((value for value in values if isinstance(value, mx.array)), None)
