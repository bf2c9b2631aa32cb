"""TODO: table of contents."""
