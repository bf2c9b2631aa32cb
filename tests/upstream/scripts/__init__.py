"""What is run: files of a stranger, and beside them a module of theirs."""
