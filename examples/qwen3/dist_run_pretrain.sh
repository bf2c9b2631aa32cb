#!/usr/bin/env bash
# Trains Qwen3 and Qwen2.5: a small mixture on a CPU, 30B-A3B on GPUs, others with MODEL=qwen3_8b. See --help.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=../launch_common.sh
source "$here/../launch_common.sh"

launch "$here" qwen3_moe_tiny qwen3_30b_a3b "$@"
