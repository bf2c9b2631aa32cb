"""Tools of a checkout: not part of the installed package."""
