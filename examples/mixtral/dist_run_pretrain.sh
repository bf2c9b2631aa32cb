#!/usr/bin/env bash
# Trains Mixtral: a small one on a CPU, 8x7B on GPUs, 8x22B with MODEL=mixtral_8x22b. See --help.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=../launch_common.sh
source "$here/../launch_common.sh"

launch "$here" mixtral_tiny mixtral_8x7b "$@"
