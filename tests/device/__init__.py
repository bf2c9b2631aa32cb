"""What needs a real device: ``bash tests/device/run.sh BACKEND`` runs it and writes one report."""
