"""The version, in a module that all others may import."""

__version__ = "0.1.0"
