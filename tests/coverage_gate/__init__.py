"""The gate that holds every device touch point of megatron.core to a named test on the cpu backend."""
