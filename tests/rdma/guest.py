"""Builds root and initramfs of a guest with soft-RoCE from unpacked Debian packages; reads its results.

python -m tests.rdma.guest build PACKAGES OUT COMMAND   writes OUT/initrd.gz, OUT/kit/ and OUT/vmlinuz
python -m tests.rdma.guest report LOG [--json FILE]     0: every scenario passed, 1: not

The guest's root is an overlay of the kit (rdma-core, pyverbs, the command) over the host's root, both
read-only over 9p; what it writes stays in its memory.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import stat
import sys
from pathlib import Path

MODULES = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",
    "dummy",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
)

_INIT = """#!/bin/sh
B=/bin/busybox
$B mount -t proc p /proc; $B mount -t sysfs s /sys; $B mount -t devtmpfs d /dev
{insmods}
nine=trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose
$B mount -t 9p -o $nine host /host && $B mount -t 9p -o $nine kit /kit || echo GUEST cannot mount
$B mount -t tmpfs t /up && $B mkdir /up/upper /up/work
$B mount -t overlay o -o lowerdir=/kit:/host,upperdir=/up/upper,workdir=/up/work /new
$B mount -t proc p /new/proc; $B mount -t sysfs s /new/sys; $B mount --bind /dev /new/dev
$B mkdir -p /dev/shm; $B mount -t tmpfs t /dev/shm
$B chroot /new /bin/bash /guest-command.sh
echo GUEST command ended with $?
$B poweroff -f
"""

PYVERBS = "usr/lib/rdma-guest"
"""Folder of the kit that has pyverbs and nothing else, for ``PYTHONPATH``."""

_COMMAND = """export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/dev/shm TMPDIR=/dev/shm
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
ulimit -l unlimited
echo guest > /proc/sys/kernel/hostname
ip link set lo up
ip link add dmy0 type dummy && ip addr add 10.77.0.1/24 dev dmy0 && ip link set dmy0 up
rdma link add rxe0 type rxe netdev dmy0 && rdma link show
echo "GUEST ready after $(cut -d' ' -f1 /proc/uptime) s on Linux $(uname -r)"
{command}
"""


def build(packages: Path, out: Path, command: str) -> None:
    """Raises SystemExit with the reason if something is missing in ``packages``."""
    kernels = sorted((packages / "boot").glob("vmlinuz-*"))
    if not kernels:
        raise SystemExit(f"{packages}/boot has no kernel")
    version = kernels[-1].name.removeprefix("vmlinuz-")
    shutil.copy(kernels[-1], out / "vmlinuz")
    kit = out / "kit"
    # /lib is a link on a merged host: what is below it in a package belongs below /usr/lib.
    for source, target in (
        ("usr/lib", "usr/lib"),
        ("lib", "usr/lib"),
        ("etc/libibverbs.d", "etc/libibverbs.d"),
    ):
        if (packages / source).is_dir():
            shutil.copytree(
                packages / source,
                kit / target,
                symlinks=True,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("modules", "systemd", "udev", "qemu", "firmware", "python3"),
            )
    shutil.copytree(packages / "usr/lib/python3/dist-packages/pyverbs", kit / PYVERBS / "pyverbs")
    (kit / "guest-command.sh").write_text(_COMMAND.format(command=command))
    (out / "initrd.gz").write_bytes(gzip.compress(_initramfs(packages, version), 1))


def _initramfs(packages: Path, version: str) -> bytes:
    folder = packages / "lib" / "modules" / version
    modules = [folder / each for each in _in_order(folder)]
    archive = _Archive()
    for name in ("bin", "dev", "proc", "sys", "host", "kit", "up", "new", "modules"):
        archive.add(name, stat.S_IFDIR | 0o755)
    archive.add("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    busybox = next((path for path in (packages / "bin/busybox", Path("/bin/busybox")) if path.exists()), None)
    if busybox is None:
        raise SystemExit(f"{packages}/bin/busybox is missing")
    archive.add("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes())
    archive.add("bin/sh", stat.S_IFLNK | 0o777, b"busybox")
    for module in modules:
        archive.add(f"modules/{module.name}", stat.S_IFREG | 0o644, module.read_bytes())
    insmods = "\n".join(f"$B insmod /modules/{module.name}" for module in modules)
    archive.add("init", stat.S_IFREG | 0o755, _INIT.format(insmods=insmods).encode())
    return archive.end()


def _in_order(folder: Path) -> list[str]:
    """Paths of ``MODULES`` and what they need, each after its needs, from depmod's table."""
    needs: dict[str, tuple[str, list[str]]] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[_name(path)] = (path, others.split())
    order: list[str] = []

    def add(path: str) -> None:
        found, others = needs[_name(path)]
        for other in others:
            if other not in order:
                add(other)
        if found not in order:
            order.append(found)

    for module in MODULES:
        # What is missing is built into the kernel.
        if module in needs:
            add(f"{module}.ko")
    return order


def _name(path: str) -> str:
    return Path(path).name.split(".ko")[0].replace("-", "_")


class _Archive:
    """Newc cpio."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        encoded = name.encode() + b"\0"
        numbers = (len(self._parts) + 1, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0)
        head = b"070701" + b"".join(b"%08x" % number for number in numbers) + encoded
        self._parts.append(head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4))

    def end(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return b"".join(self._parts)


def report(log: Path, json_file: Path | None) -> int:
    """Print the results of ``log``; 0 if all scenarios are there and passed."""
    from tests.rdma.scenarios import SCENARIOS

    text = log.read_text(errors="replace").replace("\r", "")
    lines = text.splitlines()
    results = [json.loads(line[len("RESULT ") :]) for line in lines if line.startswith("RESULT ")]
    for result in results:
        word = "passed" if result["passed"] else "FAILED"
        print(f"{word} {result['scenario']:26} {result['seconds']:7.1f} s")
        for key, value in result.get("figures", {}).items():
            print(f"          {key}: {value}")
        if "error" in result:
            print(f"          {result['error']}")
    missing = [each.__name__ for each in SCENARIOS if each.__name__ not in {r["scenario"] for r in results}]
    if missing:
        print(f"no result: {', '.join(missing)}; the guest said last:")
        print("\n".join(text.splitlines()[-25:]))
    if json_file is not None:
        ready = [line for line in text.splitlines() if line.startswith("GUEST ready")]
        host = {"machine": platform.platform(), "cores": os.cpu_count()}
        json_file.write_text(json.dumps({"host": host, "guest": ready, "results": results}, indent=1) + "\n")
    return int(bool(missing) or not all(each["passed"] for each in results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    built = commands.add_parser("build")
    built.add_argument("packages", type=Path)
    built.add_argument("out", type=Path)
    built.add_argument("command")
    told = commands.add_parser("report")
    told.add_argument("log", type=Path)
    told.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what == "build":
        build(options.packages, options.out, options.command)
        return 0
    return report(options.log, options.json)


if __name__ == "__main__":
    sys.exit(main())
