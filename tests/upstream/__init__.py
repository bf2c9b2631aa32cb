"""Scripts that know nothing of this package, run unchanged under ``mt-megatron run``."""
