"""The version of onepass."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("onepass")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0.0.0"
