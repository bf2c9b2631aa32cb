#!/usr/bin/env bash
# Trains with the unmodified pretrain_gpt.py and pretrain_bert.py of a Megatron-LM core_r0.9.0 checkout.
#   bash tests/upstream/run.sh CHECKOUT [--backend cpu|musa] [--only NAME ...] [--no-gate]
# Runs Megatron-Core's own unit tests of the tag core_r0.9.0, with a reason for each that does not pass.
#   bash tests/upstream/run.sh CHECKOUT --unit [--ranks 1,2,4,8] [--backend cpu|musa] [--only FILE ...]
# Where torch_musa is not installed, --backend musa takes the emulator in tests/emulators.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
program=tests.upstream.prove
if [[ " $* " == *" --unit "* ]]; then program=tests.upstream.unit.run; fi
exec "${PYTHON:-python}" -m "$program" "$@"
