"""Files that one process leaves for the next: texts and builds of kernels, this user's, each under a digest."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["kept", "kept_files"]


@cache
def kept_files() -> Path | None:
    """The folder, `$XDG_CACHE_HOME/veloxfn` or one beside temporary files; None where neither can be written to."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    user = os.getuid() if hasattr(os, "getuid") else None
    for folder in (Path(base).expanduser() / "veloxfn", Path(tempfile.gettempdir()) / f"veloxfn-{user}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = folder.stat().st_uid
        except OSError:
            continue
        if os.access(folder, os.W_OK) and user in (None, owner):
            return folder
    return None


def kept(text: str) -> Path | None:
    """A file that holds the text, now and as long as nobody deletes it; None where none can be written."""
    folder = kept_files()
    if folder is None:
        return None
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.h"
    try:
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return path
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / path.name
            made.write_text(text, encoding="utf-8")
            made.replace(path)
    except OSError:
        return None
    return path
