"""Named tests that execute Megatron's device touch points; importing a module here imports no megatron."""
