#!/usr/bin/env bash
# Runs what needs a real device and writes one dated report. See --help.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=../../examples/launch_common.sh
source "$here/../../examples/launch_common.sh"

usage() {
    cat <<EOF
usage: bash tests/device/run.sh cuda|musa|cpu [--devices N] [--only SECTION]... [--output FOLDER]

Checks backward, optimizer, random numbers, streams, memory, short trainings, values watched in them,
collectives and every parity layout on the devices of this machine against the cpu, and times a few sizes.
Writes FOLDER/device-BACKEND-DATE.md (readable, with the figures as JSON at its end), which is the file to
send back.
  cpu          the reference itself, to see what the report looks like
  --devices N  use N devices (default: all; layouts that need more are left out and named)
  --only NAME  only this section, repeatable: device, training, watching, collectives,
               parity, gate, timing
  --output D   default: results
Variables: PYTHON (interpreter that has everything already), NCCL_* or MCCL_* as your machine needs them.
Exit codes: 0 all passed, 1 something failed (the report says what), 2 no device or wrong use.
EOF
}

case "${1:-}" in
    -h | --help)
        usage
        exit 0
        ;;
    "")
        usage >&2
        exit 2
        ;;
esac

DRY_RUN=0 ENV_EXTRAS="[test]"
MODULES+=(pytest)
ensure_environment
cd "$REPO_ROOT"
# Layouts of the parity section train for as many steps as in the second lane.
export HF_HUB_OFFLINE=1 MT_MEGATRON_DAILY=1 PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$REPO_ROOT"
exec "$PYTHON" -W ignore -m tests.device "$@"
