"""Trains the unmodified, pip-installed Megatron-Core on other devices; importing this changes nothing."""

__version__ = "0.1.0"
