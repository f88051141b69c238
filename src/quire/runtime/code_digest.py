"""`code_digest`: what values in the cache directory that Quire's code makes depend on."""

import functools
import hashlib
from pathlib import Path

from quire import __version__, _native

SOURCES = ("models", "layers", "kernels", "runtime")
"""Folders whose code decides what a program computes."""


@functools.cache
def code_digest() -> str:
    """Return a digest of the source that makes programs, and of the extension's version."""
    package, digest = Path(__file__).parents[1], hashlib.sha256(__version__.encode())
    for path in sorted(path for folder in SOURCES for path in (package / folder).rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    extension = Path(_native.__file__).stat()
    digest.update(f"{extension.st_size} {extension.st_mtime_ns}".encode())
    return digest.hexdigest()
