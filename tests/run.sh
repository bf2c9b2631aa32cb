#!/usr/bin/env bash
# Lints, type-checks and tests everything; does all its own set-up. See --help.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=../examples/launch_common.sh
source "$here/../examples/launch_common.sh"

usage() {
    cat <<EOF
usage: bash tests/run.sh [--all] [--soak] [--backend NAME] [arguments of pytest]

Makes the environment .venv if there is none, then runs ruff, mypy and pytest.
  --all            also the second lane, marked daily: what proves the port and hardly ever fails
  --soak           both lanes and acceptance volumes; writes results/soak-DATE.json and .md. With
                   --soak-record NAME (of pytest): results/NAME.json, after every test, and what passed
                   in it with the same sources is left out
  --backend NAME   also the tests of this backend: on its device, or for musa, where torch_musa is
                   not installed, on the emulator of tests/emulators (cpu)
Variables: PYTHON (interpreter that has everything already), TORCH_SPEC (torch<=2.13.0), WORKERS (test
files that run at a time when all are run; by default 3, half of the cores when there are more than 4,
and 1 with --soak, which measures).
Exit codes: 0 all is well, 1 something failed, 2 wrong use.

example: bash tests/run.sh tests/patching -x
EOF
}

pytest_arguments=() selected=() backend=cpu
while (($#)); do
    case "$1" in
        -h | --help)
            usage
            exit 0
            ;;
        --all) pytest_arguments+=(--all) ;;
        --soak) pytest_arguments+=(--soak) ;;
        --backend)
            (($# > 1)) || die "--backend needs a name"
            backend="$2"
            shift
            ;;
        --backend=*) backend="${1#*=}" ;;
        *) selected+=("$1") ;;
    esac
    shift
done

DRY_RUN=0 ENV_EXTRAS="[dev]"
MODULES+=(pytest xdist ruff mypy hypothesis transformers)
ensure_environment
cd "$REPO_ROOT"

# The tests start processes of their own: one thread each, and nothing that goes out.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-true}"
# Hundreds of processes import what the first one has compiled.
unset PYTHONDONTWRITEBYTECODE
# For tests that call a linter: it is installed beside the interpreter.
PATH="$(dirname "$PYTHON"):$PATH"

if [[ "$backend" == musa ]] && ! "$PYTHON" -c 'import torch_musa' 2>/dev/null; then
    say "backend: musa, emulated on the cpu: this proves code paths, neither speed nor hardware"
else
    "$PYTHON" -W ignore -c '
import sys
from mt_megatron.backends import registry
from mt_megatron.errors import MtMegatronError
try:
    print("backend:", *registry.select(sys.argv[1])[1:])
except MtMegatronError as error:
    sys.exit(f"error: {error}")
' "$backend" || exit 2
fi

lint=0
"$PYTHON" -m ruff check . || lint=1
"$PYTHON" -m ruff format --check --quiet . || { lint=1 && say "error: run 'ruff format .'"; }
if ((lint)); then say "error: ruff found problems (above); the tests run all the same, then this ends with 1"; fi
# Without its cache mypy takes half a minute: it runs beside the tests, and is heard after them.
types="$(mktemp)"
"$PYTHON" -m mypy >"$types" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true; rm -f "$types"' EXIT

# Tests wait for processes that start and for clocks: three files at a time keep two cores busy.
everything=1
for argument in "${selected[@]}"; do
    if [[ $argument != -* ]]; then everything=0; fi
done
if ((everything)); then
    cores="$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)))')"
    workers="${WORKERS:-$((cores > 4 ? cores / 2 : cores > 1 ? 3 : 1))}"
    if [[ " ${pytest_arguments[*]} " == *" --soak "* ]]; then workers=1; fi
    if ((workers > 1)); then pytest_arguments+=(--numprocesses "$workers" --dist loadfile); fi
fi

status=0
"$PYTHON" -m pytest --backend "$backend" "${pytest_arguments[@]}" "${selected[@]}" || status=$?
wait "$mypy" || { lint=1 && say "error: mypy found problems:"; }
cat "$types"
if ((status == 0)); then status=$lint; fi
exit "$status"
