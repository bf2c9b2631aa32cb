#!/usr/bin/env bash
# Trains BERT: a small one on a CPU, 336M on GPUs, others with MODEL=bert_1.3b. See --help.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source-path=SCRIPTDIR source=../launch_common.sh
source "$here/../launch_common.sh"

# Read by launch: a sequence of each sentence, and a WordPiece.
# shellcheck disable=SC2034
PREPARE_OPTIONS=(--split-sentences) DATA_KIND="sentences-"
launch "$here" bert_tiny bert_336m "$@"
