#!/usr/bin/env bash
# Runs the RDMA transport over real verbs, on soft-RoCE in a QEMU guest. See --help.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"

usage() {
    cat <<EOF
usage: bash tests/rdma/run.sh [--fetch | --packages DIR] [--json FILE] [--seconds N] [-- ARGUMENTS]

Boots a Linux guest with soft-RoCE (rdma_rxe) and runs tests/rdma/scenarios.py in it, with ARGUMENTS.
  --fetch         download the Debian packages that the guest needs; nothing is installed
  --packages DIR  use the packages unpacked in DIR, as --fetch --keep DIR has left them
  --keep DIR      with --fetch: unpack into DIR, and leave it
  --json FILE     write the results
  --log FILE      write what the guest printed
  --seconds N     time limit of the guest (600)
Variables: PYTHON (python3; it must have mt_megatron's requirements), RDMA_GUEST_ACCEL (tcg; kvm where it works).
Everything else goes to a temporary folder, which is removed.
Exit codes: 0 every scenario passed, 1 one failed, 2 wrong use, 77 skipped, with the reason.

example: bash tests/rdma/run.sh --fetch -- --messages 500
EOF
}

skip() {
    echo "skipped: $1"
    exit 77
}

fetch=0 packages="" keep="" json="" log="" seconds=600 arguments=()
while (($#)); do
    case "$1" in
        -h | --help)
            usage
            exit 0
            ;;
        --fetch) fetch=1 ;;
        --packages | --keep | --json | --log | --seconds)
            (($# > 1)) || { usage >&2 && exit 2; }
            case "$1" in
                --packages) packages="$2" ;;
                --keep) keep="$2" ;;
                --log) log="$(realpath -m "$2")" ;;
                --json) json="$(realpath -m "$2")" ;;
                --seconds) seconds="$2" ;;
            esac
            shift
            ;;
        --)
            shift
            arguments=("$@")
            break
            ;;
        *)
            usage >&2
            exit 2
            ;;
    esac
    shift
done

python="$(command -v "${PYTHON:-python3}")" || skip "there is no ${PYTHON:-python3}"
"$python" -c 'import torch, numpy' 2>/dev/null || skip "$python has no torch; set PYTHON"
[[ "$(uname -m)" == x86_64 ]] || skip "the guest is x86_64, this machine is $(uname -m)"

scratch="$(mktemp -d)"
guest=""
clean_up() {
    if [[ -n "$guest" ]] && kill -0 "$guest" 2>/dev/null; then
        kill "$guest" 2>/dev/null || true
    fi
    rm -rf "$scratch"
}
trap clean_up EXIT

if ((fetch)); then
    command -v apt-get >/dev/null || skip "there is no apt-get to fetch packages with"
    packages="${keep:-$scratch/packages}"
    mkdir -p "$packages" "$scratch/debs"
    kernel="$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-.*\)/\1/p' | head -n 1)"
    [[ -n "$kernel" ]] || skip "apt knows no linux-image-amd64; run apt-get update"
    # QEMU itself, if it is missing, with every library that this machine lacks.
    names=("$kernel" busybox-static rdma-core python3-pyverbs libibverbs1 ibverbs-providers librdmacm1 libibumad3
        libnl-3-200 libnl-route-3-200)
    if ! command -v qemu-system-x86_64 >/dev/null; then
        mapfile -t -O "${#names[@]}" names < <(apt-get install -s --no-install-recommends qemu-system-x86 2>/dev/null |
            sed -n 's/^Inst \([^ ]*\) .*/\1/p')
    fi
    (cd "$scratch/debs" && apt-get download "${names[@]}" >"$scratch/apt.log" 2>&1) ||
        skip "packages cannot be downloaded: $(tail -n 1 "$scratch/apt.log")"
    for file in "$scratch"/debs/*.deb; do
        dpkg -x "$file" "$packages"
    done
    "$packages/bin/busybox" depmod -b "$packages" "${kernel#linux-image-}"
fi
[[ -n "$packages" ]] || skip "no packages for the guest: give --fetch or --packages DIR"

qemu="$(command -v qemu-system-x86_64 || true)"
qemu_arguments=() libraries="${LD_LIBRARY_PATH:-}"
if [[ -z "$qemu" && -x "$packages/usr/bin/qemu-system-x86_64" ]]; then
    qemu="$packages/usr/bin/qemu-system-x86_64"
    qemu_arguments=(-L "$packages/usr/share/qemu" -L "$packages/usr/share/seabios")
    libraries="$packages/usr/lib/x86_64-linux-gnu:$packages/lib/x86_64-linux-gnu"
fi
[[ -n "$qemu" ]] || skip "there is no qemu-system-x86_64"
LD_LIBRARY_PATH="$libraries" "$qemu" -version >/dev/null || skip "$qemu does not start"
compiled=("$packages"/usr/lib/python3/dist-packages/pyverbs/device.cpython-*.so)
tag="$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')"
[[ "${compiled[0]}" == *"$tag"* ]] ||
    skip "python3-pyverbs is ${compiled[0]##*/}, which $python ($tag) cannot import"

export PYTHONPATH="$root"
printf -v command 'cd %q && PYTHONPATH=%q:/usr/lib/rdma-guest exec %q -m tests.rdma.scenarios --interface dmy0 %s' \
    "$root" "$root" "$python" "${arguments[*]@Q}"
"$python" -m tests.rdma.guest build "$packages" "$scratch" "$command" || skip "the guest cannot be built"

began=$SECONDS
LD_LIBRARY_PATH="$libraries" timeout --kill-after=5 "$seconds" "$qemu" "${qemu_arguments[@]}" \
    -accel "${RDMA_GUEST_ACCEL:-tcg}" -cpu max -smp 2 -m 3072 -nodefaults -no-user-config -no-reboot -display none \
    -serial stdio -kernel "$scratch/vmlinuz" -initrd "$scratch/initrd.gz" -append "console=ttyS0 quiet panic=-1" \
    -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=host,mount_tag=host \
    -fsdev local,id=kit,path="$scratch/kit",security_model=none,readonly=on \
    -device virtio-9p-pci,fsdev=kit,mount_tag=kit </dev/null >"$scratch/log" 2>&1 &
guest=$!
wait "$guest" || echo "the guest was ended after $seconds s, or failed"
guest=""
[[ -z "$log" ]] || cp "$scratch/log" "$log"
echo "guest: $((SECONDS - began)) s, $(grep -a -m 1 '^GUEST ready' "$scratch/log" || echo 'never ready')"
"$python" -m tests.rdma.guest report "$scratch/log" ${json:+--json "$json"}
