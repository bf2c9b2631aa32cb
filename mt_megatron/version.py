"""Version of the package, for whoever compares it between ranks or writes it down."""

__version__ = "0.1.0"
