"""The patch engine: declared changes to installed code, checked first, applied whole, undone exactly."""
