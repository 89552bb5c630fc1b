"""Rights to files, which the service gives to the exporter, and the exporter to guests."""

from collections.abc import Callable, Mapping
from pathlib import Path

SetAccess = Callable[[Path, int, Mapping[int, int]], None]
"""Gives a file a mode, and single users rights to it. These replace the rights that users had."""
