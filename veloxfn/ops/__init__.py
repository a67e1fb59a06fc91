"""Pure ops: each file has a plain reference and one public name."""

from __future__ import annotations

from veloxfn.ops.attention_mass import Temper, attention_mass
from veloxfn.ops.attention_rows import attention_rows

__all__ = ["Temper", "attention_mass", "attention_rows"]
