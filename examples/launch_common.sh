# shellcheck shell=bash
# What every launch script shares: environment, backend, data, torchrun. Sourced, never run.
#
# A launch script calls `launch FOLDER CPU_MODEL ACCELERATOR_MODEL "$@"`: the folder of its YAML files
# and the model it trains by default on a CPU and on accelerators.

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 2
}

# Shows a command as it could be typed, blanks and all.
show() { printf '%q ' "$@" && printf '\n'; }

# In a dry run shows the command; otherwise runs it.
act() {
    if [[ $DRY_RUN == 1 ]]; then show "$@"; else "$@"; fi
}

supported_python() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 12))' 2>/dev/null
}

# Path of a program, not relative: it is also run from /.
absolute() {
    local found
    found="$(command -v "$1")"
    [[ $found == /* ]] || found="$PWD/$found"
    printf '%s\n' "$found"
}

# Options of mt-megatron prepare that a family's data need, and the beginning of the name of such data.
PREPARE_OPTIONS=() DATA_KIND=""

# What an environment must have; tests add theirs.
MODULES=(mt_megatron torch megatron.core tokenizers)

# Looks from / so that a checkout in the working directory does not pass for an installation.
has_mt_megatron() {
    (cd / && "$1" -c '
import importlib.util as u, sys
sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))
' "${MODULES[@]}") 2>/dev/null
}

find_base_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.10 python3 python; do
        if [[ -n $candidate ]] && supported_python "$candidate"; then
            absolute "$candidate"
            return
        fi
    done
    die "found no Python 3.10 or 3.11 (megatron-core 0.9.0 has no wheels for others); install one, or set PYTHON=/path/to/python3.11"
}

# Sets PYTHON to one that has mt_megatron; makes the environment .venv when there is none.
# ENV_EXTRAS: extras of the package to install with it, [scan,scope] for `scan sql` and the live page where none are named.
ensure_environment() {
    local venv="$REPO_ROOT/.venv" base
    if [[ -n ${PYTHON:-} ]]; then
        supported_python "$PYTHON" || die "PYTHON=$PYTHON does not run, or is not Python 3.10 or 3.11"
        PYTHON="$(absolute "$PYTHON")"
    elif [[ -x $venv/bin/python ]] && has_mt_megatron "$venv/bin/python"; then
        PYTHON="$venv/bin/python"
        return
    fi
    base="$(find_base_python)" || exit 2
    if has_mt_megatron "$base"; then
        PYTHON="$base"
        return
    fi
    say "mt_megatron is not importable by $base: making the environment $venv"
    if [[ $DRY_RUN != 1 ]]; then
        mkdir -p "$venv"
        # Two starters on one machine: the second waits, then finds the work done.
        exec 9>"$venv/.lock"
        if command -v flock >/dev/null && ! flock 9; then
            say "no file locks on the storage of $venv: start the first time on one machine alone"
        fi
    fi
    if [[ $DRY_RUN == 1 || ! -x $venv/bin/python ]] || ! has_mt_megatron "$venv/bin/python"; then
        install_environment "$base" "$venv"
    fi
    if [[ $DRY_RUN == 1 ]]; then
        PYTHON="$base" # still has no mt_megatron: shown where the new environment's would be
        SHOWN_PYTHON="$venv/bin/python"
    else
        exec 9>&-
        PYTHON="$venv/bin/python"
        has_mt_megatron "$PYTHON" || die "$venv was made but cannot import mt_megatron; delete it and start again"
    fi
}

install_environment() {
    local base="$1" venv="$2"
    # An environment that only lacks packages is completed: made again by another Python it would be
    # the binary of one and the library of the other.
    if ! supported_python "$venv/bin/python"; then
        act "$base" -m venv "$venv" ||
            die "'$base -m venv' failed (on Debian and Ubuntu it needs the package python3-venv)"
    fi
    # What reads options comes with the rest as well; before it, a wrong one costs seconds and not minutes.
    if [[ $DRY_RUN != 1 ]]; then
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "megatron-core==0.9.0" \
            "pyyaml>=6.0" "pydantic>=2.7" ||
            die "megatron-core, pyyaml and pydantic could not be installed; see pip's message above"
        PYTHONPATH="$REPO_ROOT" check_options "$venv/bin/python" "" ${config:+--config "$config"} "${extra[@]}"
        say "installing torch and the other packages of mt_megatron in $venv: once, a few minutes"
    fi
    # torch first: with it in place the rest cannot choose another build.
    act "$venv/bin/python" -m pip install --disable-pip-version-check "${TORCH_SPEC:-torch<=2.13.0}" ||
        die "torch could not be installed; set TORCH_SPEC to the version or wheel that this machine needs"
    act "$venv/bin/python" -m pip install --disable-pip-version-check \
        -e "$REPO_ROOT${ENV_EXTRAS-[scan,scope]}" ||
        die "mt_megatron could not be installed; see pip's message above"
}

# Sets BACKEND, DEVICES (how many this node has) and the reason.
choose_backend() {
    local answer reason
    if [[ -n ${SHOWN_PYTHON:-} ]]; then
        BACKEND="${BACKEND:-cpu}" DEVICES="${NPROC_PER_NODE:-2}"
        say "backend: $BACKEND is shown; it is chosen once the environment exists"
        return
    fi
    if [[ ${BACKEND:-} == cpu ]]; then
        # Torch, which takes seconds to import, has it always.
        DEVICES=1
        say "backend: cpu (cpu was asked for)"
        return
    fi
    answer="$("$PYTHON" -W ignore -c '
import sys
from mt_megatron.backends import registry
from mt_megatron.errors import MtMegatronError
try:
    backend, reason = registry.select(sys.argv[1])
except MtMegatronError as error:
    sys.exit(f"error: {error}")
print(backend.name, backend.device_count(), reason)
' "${BACKEND:-auto}")" || exit 2
    read -r BACKEND DEVICES reason <<<"$answer"
    say "backend: $BACKEND ($reason)"
}

# Whether one of the options named first is among the arguments after --.
given() {
    local -a names=()
    while [[ $1 != -- ]]; do
        names+=("$1")
        shift
    done
    shift
    local argument name
    for argument in "$@"; do
        for name in "${names[@]}"; do
            if [[ $argument == "$name" || $argument == "$name="* ]]; then return 0; fi
        done
    done
    return 1
}

# Sets FROM_FILE to the options that the file of --config sets, as they would be typed.
read_config() {
    FROM_FILE=()
    local names
    if [[ -n ${SHOWN_PYTHON:-} ]]; then
        say "config: what $1 sets is read once the environment exists"
        return
    fi
    names="$("$PYTHON" -W ignore -c '
import sys
from pathlib import Path
from mt_megatron.config.parse import read_yaml
from mt_megatron.errors import ConfigError
try:
    entries = read_yaml(Path(sys.argv[1]))
except ConfigError as error:
    sys.exit(f"error: {error}")
# A printed configuration holds every option: null, false and [] set none of those that are asked for.
named = {each.name.replace("-", "_"): each.value for each in entries if each.value not in (None, False, [])}
if named.get("cpu_bf16_products") == "torch":
    # It is what happens by itself, and no more insists on bf16 than the bf16 of a file does.
    del named["cpu_bf16_products"]
print(*("--" + name.replace("_", "-") for name in named))
' "$1")" || exit 2
    read -r -a FROM_FILE <<<"$names"
}

# Ends the script where mt-megatron pretrain would refuse the options after PYTHON and PROCESSES: by name and
# value, and where the number of processes is not empty, how they fit together. Files are left to the run.
check_options() {
    local python="$1" processes="$2"
    shift 2
    # They print and stop.
    if given --list-options --list-models -- "$@"; then return; fi
    "$python" -W ignore -c '
import sys
from mt_megatron.config.parse import load_config
from mt_megatron.errors import MtMegatronError
try:
    config = load_config(sys.argv[2:])
    if sys.argv[1]:
        from mt_megatron.training.validate import validate
        validate(config, world_size=int(sys.argv[1]), check_files=False)
except MtMegatronError as error:
    sys.exit(f"error: {error}")
' "$processes" "$@" || exit 2
}

# Sets DATA_ARGUMENTS and PREPARE, the command that makes their files; neither where the arguments name data
# themselves.
name_data() {
    DATA_ARGUMENTS=() PREPARE=()
    if given --data-path --train-data-path --mock-data -- "$@"; then return; fi
    local version name="stdlib"
    local -a options=("${PREPARE_OPTIONS[@]}")
    if [[ -n ${CORPUS:-} ]]; then
        name="$(basename "$CORPUS")"
        options+=(--corpus "$CORPUS")
        # A run's folder follows its corpus: another one has another tokenizer.
        RUN_NAME="$MODEL-$name"
    else
        # Another Python has another library: it gets a folder of its own.
        version="$("$PYTHON" -c 'import platform; print(platform.python_version())')"
        name="stdlib-$version"
    fi
    if [[ -n ${VOCAB_SIZE:-} ]]; then options+=(--vocab-size "$VOCAB_SIZE"); fi
    if [[ -n ${MAX_TOKENS:-} ]]; then options+=(--max-tokens "$MAX_TOKENS"); fi
    if [[ -n ${DATA_DIR:-} ]]; then RUN_NAME="$MODEL-$(basename "$DATA_DIR")"; fi
    DATA_DIR="${DATA_DIR:-$REPO_ROOT/data/$DATA_KIND$name}"
    PREPARE=("${SHOWN_PYTHON:-$PYTHON}" -m mt_megatron.cli prepare --output "$DATA_DIR" "${options[@]}")
    DATA_ARGUMENTS=(
        --train-data-path "$DATA_DIR/train"
        --valid-data-path "$DATA_DIR/valid"
        --tokenizer-model "$DATA_DIR/tokenizer.json"
    )
}

prepare_data() {
    if ((!${#PREPARE[@]})); then return; fi
    local code
    act "${PREPARE[@]}" || {
        code=$?
        # Its advice names the options of the command.
        say "here --corpus is CORPUS=${CORPUS:-}, --output DATA_DIR=$DATA_DIR, --vocab-size VOCAB_SIZE, --max-tokens MAX_TOKENS; for --force remove $DATA_DIR, for preprocess name its data with --train-data-path"
        exit "$code"
    }
}

# Sets LAUNCH: this node's part of the run. torchrun starts the processes; above it, mt-megatron launch
# sees to it that SIGTERM, SIGUSR1 and Ctrl-C reach them and that they have the time to save.
compose_launch() {
    NPROC_PER_NODE="${NPROC_PER_NODE:-}"
    if [[ -z $NPROC_PER_NODE ]]; then
        if [[ $BACKEND == cpu ]]; then NPROC_PER_NODE=2; else NPROC_PER_NODE="$DEVICES"; fi
    fi
    LAUNCH=("${SHOWN_PYTHON:-$PYTHON}" -m mt_megatron.cli launch --gpus-per-node "$NPROC_PER_NODE")
    if [[ ${MAX_RESTARTS:-0} != 0 ]]; then LAUNCH+=(--max-restarts "$MAX_RESTARTS"); fi
    if [[ ${NNODES:-1} != 1 ]]; then
        [[ -n ${MASTER_ADDR:-} ]] || die "NNODES=$NNODES needs MASTER_ADDR, an address of the first node that all nodes reach"
        [[ -n ${NODE_RANK:-} ]] || die "NNODES=$NNODES needs NODE_RANK, from 0 on the first node to $((NNODES - 1))"
        LAUNCH+=(--nodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR"
            --master-port "${MASTER_PORT:-29500}")
    fi
}

# Threads for each process on a CPU: the cores it may use, shared out. An accelerator's ranks keep
# torchrun's default.
choose_threads() {
    if [[ -n ${OMP_NUM_THREADS:-} || $BACKEND != cpu ]]; then return; fi
    local cores
    cores="$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)))')"
    OMP_NUM_THREADS=$((cores / NPROC_PER_NODE > 0 ? cores / NPROC_PER_NODE : 1))
}

usage() {
    cat <<EOF
usage: bash $0 [--dry-run] [--config FILE] [options of mt-megatron pretrain]

Makes the environment if there is none, picks the backend, prepares data once and trains.
Run again, it resumes. With --config FILE it trains what FILE says, in the place of MODEL: with FILE's
data if it names any, in runs/NAME-OF-FILE; what FILE says goes before all variables below but BACKEND.
Variables:
  MODEL            a file of $FAMILY_DIR without .yaml: $(model_names)
                   ($CPU_MODEL on a CPU, $ACCELERATOR_MODEL otherwise)
  BACKEND          auto, cpu, cuda, musa (auto)
  CORPUS           folder or file to train on: text, JSON lines, Parquet (Python's standard library)
  VOCAB_SIZE       tokens of the tokenizer that is trained on it (4096)
  MAX_TOKENS       limit of training tokens taken from it, 0 for none (10000000)
  DATA_DIR         where the prepared data is or goes (data/NAME in the repository)
  FP8              recipe in which the linears of decoder layers compute: delayed, tensorwise, rowwise,
                   rowwise_gw_hp, blockwise, mxfp8, nvfp4 (none); 'mt-megatron fp8 recipes' says which devices
                   compute which; on a CPU they are emulated
  PIPELINE_SCHEDULE   order of a step's passes where the model has a pipeline: auto, which adapts while
                   training and logs its decisions in RUN_DIR (mt-megatron pipeline explain RUN_DIR), 1f1b or
                   interleaved for Megatron-Core's own, another name or a FILE.csv (auto_if_pipeline: auto
                   where there is a pipeline)
  P2P_TRANSPORT    what carries activations and gradients between pipeline stages: auto, which takes shared
                   memory or RDMA where they work, shm, rdma, nixl, or collective for Megatron-Core's own way
                   (auto; without a pipeline it means nothing)
  RUN_DIR          checkpoints, metrics, the trace and the index cache (runs/MODEL in the repository,
                   runs/MODEL-NAME with a CORPUS or DATA_DIR called NAME)
  PYTHON           interpreter to use (.venv of the repository, made when missing)
  TORCH_SPEC       what pip installs as torch (torch<=2.13.0)
  NPROC_PER_NODE   processes (2 on a CPU, otherwise one per device)
  OMP_NUM_THREADS  threads of each process on a CPU (cores / processes)
  MAX_RESTARTS     how often a run starts again by itself, from its newest checkpoint, after a process
                   died (0)
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as for torchrun; RUN_DIR and DATA_DIR must
                   then be on storage that all nodes share
Every rank is traced, in RUN_DIR/scan, and a slow one is named while training; afterwards:
mt-megatron scan report RUN_DIR. With --scan off nothing of it runs.
What happens inside the model is recorded in RUN_DIR/scope every 20 steps and shown on a page on loopback; a
line at the start says how to open it. With --scope record there is no page, with --scope off nothing of it.
SIGTERM, SIGUSR1 and Ctrl-C end a run after its step, with a checkpoint and exit code 0.
--dry-run prints the commands and the environment and changes nothing.
Exit codes: 0 trained, 1 a problem was found, 2 wrong use, 79 ended because of a slow rank
(--scan-on-straggler).
EOF
}

# torch multiplies bf16 matrices one element at a time on x86 processors whose instructions oneDNN has no
# bf16 kernels for: it has some for AVX-512 with BW (AMX has both) and for AVX-NE-CONVERT. Only x86 has a
# line of flags; of other processors, and where /proc says nothing, nothing is assumed. oneDNN itself reads
# ONEDNN_MAX_CPU_ISA, below which no kernel is taken whatever the processor has.
bf16_is_slow() {
    local cpuinfo="${1:-/proc/cpuinfo}" flags
    if [[ $BACKEND != cpu || -n ${FP8:-} || ! -r $cpuinfo ]]; then return 1; fi
    flags="$(grep -m 1 '^flags[[:blank:]]*:' "$cpuinfo")" || return 1
    case "${ONEDNN_MAX_CPU_ISA:-}" in
        SSE41 | AVX | AVX2 | AVX2_VNNI) return 0 ;;
        AVX2_VNNI_2) flags="${flags//avx512bw/}" ;;
    esac
    [[ " $flags " != *" avx512bw "* && " $flags " != *" avx_ne_convert "* ]]
}

model_names() {
    local file
    local -a names=()
    for file in "$FAMILY_DIR"/*.yaml; do
        names+=("$(basename "$file" .yaml)")
    done
    printf '%s' "${names[*]}"
}

launch() {
    FAMILY_DIR="$1" CPU_MODEL="$2" ACCELERATOR_MODEL="$3" DRY_RUN=0
    shift 3
    local -a extra=()
    local config=""
    while (($#)); do
        case "$1" in
            --dry-run) DRY_RUN=1 ;;
            -h | --help)
                usage
                exit 0
                ;;
            --config | --config=*)
                [[ -z $config ]] || die "--config is given twice; expected one file: put what they say into one"
                if [[ $1 == --config=* ]]; then
                    config="${1#*=}"
                elif (($# > 1)); then
                    config="$2"
                    shift
                fi
                [[ -n $config ]] || die "--config names no file; expected --config FILE"
                ;;
            *) extra+=("$1") ;;
        esac
        shift
    done
    if [[ -n $config ]]; then
        [[ -z ${MODEL:-} ]] || die "MODEL=$MODEL and --config $config are both given; expected one of them: unset MODEL or leave --config out"
        [[ -f $config ]] || die "found no file '$config'; expected the YAML file of --config, or MODEL as one of: $(model_names)"
    elif [[ -n ${MODEL:-} && ! -f $FAMILY_DIR/$MODEL.yaml ]]; then
        # Before the backend is chosen, which takes seconds.
        die "found no model '$MODEL'; expected one of: $(model_names)"
    fi

    if [[ ${#extra[@]} -gt 0 && ${extra[0]} != --* ]]; then
        die "found '${extra[0]}' where an option was expected; options start with --, see --help"
    fi
    ensure_environment
    # They print and stop.
    if [[ -z ${SHOWN_PYTHON:-} ]] && given --list-options --list-models -- "${extra[@]}"; then
        exec "$PYTHON" -W ignore -m mt_megatron.cli pretrain "${extra[@]}"
    fi
    choose_backend
    # Options that are typed or in the user's own file; the script chooses the rest.
    local -a settled=("${extra[@]}")
    if [[ -n $config ]]; then
        MODEL="$(basename "$config")"
        MODEL="${MODEL%.*}"
        read_config "$config"
        settled+=("${FROM_FILE[@]}")
    else
        if [[ -z ${MODEL:-} ]]; then
            if [[ $BACKEND == cpu ]]; then MODEL="$CPU_MODEL"; else MODEL="$ACCELERATOR_MODEL"; fi
        fi
        config="$FAMILY_DIR/$MODEL.yaml"
    fi
    compose_launch
    choose_threads
    RUN_NAME="$MODEL"
    name_data "${settled[@]}"
    if ((${#DATA_ARGUMENTS[@]})) && [[ $config != "$FAMILY_DIR/$MODEL.yaml" ]]; then
        say "config: $config names no data, so this trains on $DATA_DIR"
    fi
    RUN_DIR="${RUN_DIR:-$REPO_ROOT/runs/$RUN_NAME}"

    local -a command=(--config "$config" --backend "$BACKEND" "${DATA_ARGUMENTS[@]}")
    if [[ -n ${FP8:-} ]] && ! given --fp8-recipe -- "${settled[@]}"; then command+=(--fp8-recipe "$FP8"); fi
    # A bf16 in a file does not insist on it: it may come from another machine.
    if bf16_is_slow && ! given --bf16 --no-bf16 -- "${extra[@]}" &&
        ! given --fp16 --fp8-recipe --fp8-format --cpu-bf16-products -- "${settled[@]}"; then
        if [[ ${NNODES:-1} == 1 ]]; then
            say "this processor has no AVX-512, without which bf16 takes 20 to 35 times as long: fp32 instead (--bf16 insists, --cpu-bf16-products fp32 makes it bearable)"
            command+=(--no-bf16)
        else
            # Another node may have another processor, and all ranks must train in one precision.
            say "this node's processor has no AVX-512, without which bf16 takes 20 to 35 times as long: --no-bf16 on all nodes avoids it"
        fi
    fi
    if ! given --save -- "${settled[@]}"; then command+=(--save "$RUN_DIR/checkpoints"); fi
    if ! given --data-cache-path -- "${settled[@]}"; then command+=(--data-cache-path "$RUN_DIR/index-cache"); fi
    if ! given --metrics-path -- "${settled[@]}"; then command+=(--metrics-path "$RUN_DIR/metrics.jsonl"); fi
    if ! given --pipeline-schedule -- "${settled[@]}"; then
        command+=(--pipeline-schedule "${PIPELINE_SCHEDULE:-auto_if_pipeline}")
    fi
    if ! given --p2p-transport -- "${settled[@]}"; then command+=(--p2p-transport "${P2P_TRANSPORT:-auto}"); fi
    command+=("${extra[@]}")
    # Data takes minutes. A dry run may be of another machine, and the family's own files are sound.
    local processes=""
    if [[ $DRY_RUN != 1 && $NPROC_PER_NODE =~ ^[0-9]+$ && ${NNODES:-1} =~ ^[0-9]+$ ]]; then
        processes=$((10#$NPROC_PER_NODE * 10#${NNODES:-1}))
    fi
    if [[ -z ${SHOWN_PYTHON:-} && ($DRY_RUN != 1 || ${#extra[@]} -gt 0) ]]; then
        check_options "$PYTHON" "$processes" "${command[@]}"
    fi
    prepare_data
    command=("${LAUNCH[@]}" -- "${command[@]}")

    if [[ -n ${OMP_NUM_THREADS:-} ]]; then
        export OMP_NUM_THREADS
        command=(env "OMP_NUM_THREADS=$OMP_NUM_THREADS" "${command[@]}")
    fi
    say "model $MODEL, $NPROC_PER_NODE processes on each of ${NNODES:-1} node(s), results in $RUN_DIR"
    if [[ $DRY_RUN == 1 ]]; then
        show "${command[@]}"
        return
    fi
    local beside
    beside="$(dirname "$PYTHON")/mt-megatron"
    if [[ -x $beside ]] && ! command -v mt-megatron >/dev/null; then say "mt-megatron is $beside"; fi
    mkdir -p "$RUN_DIR"
    # In this process's place: signals reach it.
    exec "${command[@]}"
}
