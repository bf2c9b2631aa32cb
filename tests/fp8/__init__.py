"""Tests of FP8: formats and products beside other implementations, training over layouts."""
