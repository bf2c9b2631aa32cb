#!/usr/bin/env bash
# Trains DeepSeek's models: a small V3 on a CPU, V2-Lite on GPUs, others with MODEL=deepseek_v3. See --help.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=../launch_common.sh
source "$here/../launch_common.sh"

launch "$here" deepseekv3_tiny deepseek_v2_lite "$@"
