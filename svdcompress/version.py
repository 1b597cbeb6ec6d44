"""The version, in a place that any room may import."""

__version__ = "0.1.0"
