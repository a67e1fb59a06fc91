"""Pure ops: each file has a plain reference and one public name."""

from __future__ import annotations

from veloxfn.ops.admit import Entry, Gumbel, KeyNorm, Loss, admit
from veloxfn.ops.attend import attend, attend_step
from veloxfn.ops.attention_mass import Temper, attention_mass
from veloxfn.ops.attention_rows import attention_rows
from veloxfn.ops.evict_step import evict_step
from veloxfn.ops.fold_tokens import fold_tokens
from veloxfn.ops.key_norms import key_norms
from veloxfn.ops.launch import using
from veloxfn.ops.merge_into import merge_into
from veloxfn.ops.merge_targets import MergeRule, merge_targets
from veloxfn.ops.ranks import ranks
from veloxfn.ops.rotate_by import rotate_by
from veloxfn.ops.token_step import token_step
from veloxfn.ops.weakest import weakest
from veloxfn.ops.window_step import window_step

__all__ = [
    "Entry",
    "Gumbel",
    "KeyNorm",
    "Loss",
    "MergeRule",
    "Temper",
    "admit",
    "attend",
    "attend_step",
    "attention_mass",
    "attention_rows",
    "evict_step",
    "fold_tokens",
    "key_norms",
    "merge_into",
    "merge_targets",
    "ranks",
    "rotate_by",
    "token_step",
    "using",
    "weakest",
    "window_step",
]
