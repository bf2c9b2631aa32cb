#!/usr/bin/env bash
# Trains Llama 3: a small one on a CPU, the 8B on GPUs, others with MODEL=llama3_70b. See --help.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=../launch_common.sh
source "$here/../launch_common.sh"

launch "$here" llama3_tiny llama3_8b "$@"
