#!/usr/bin/env bash
# Trains with the unmodified pretrain_gpt.py of a Megatron-LM core_r0.9.0 checkout.
#   bash tests/upstream/run.sh CHECKOUT [--backend cpu|musa] [--only NAME ...] [--no-gate]
# Where torch_musa is not installed, --backend musa takes the emulator in tests/emulators.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python}" -m tests.upstream.prove "$@"
