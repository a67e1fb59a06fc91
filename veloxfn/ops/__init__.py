"""Pure ops: each file has a plain reference and one public name."""

from __future__ import annotations

from veloxfn.ops.attention_mass import attention_mass

__all__ = ["attention_mass"]
