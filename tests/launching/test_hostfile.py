"""Hostfiles as people write them, and clear words about those that nobody can mean."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_megatron.errors import ConfigError
from mt_megatron.launching.jobs.hosts import Host, node_rank, parse_hostfile, read_hostfile, slots_of

NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z]([a-z0-9]{0,5}))?", fullmatch=True)
V4 = st.ip_addresses(v=4).map(str)
V6 = st.builds(
    lambda address, zone: str(address) + zone,
    st.ip_addresses(v=6),
    st.sampled_from(["", "%eth0", "%bond0.12"]),
)
SPACE = st.text(" \t", max_size=3)


def simple(hosts: list[Host]) -> list[tuple[str, int | None, str | None]]:
    return [(host.name, host.slots, host.user) for host in hosts]


@st.composite
def entries(draw: st.DrawFn) -> tuple[str, tuple[str, int | None, str | None]]:
    """A line in one of the accepted forms and what it means."""
    name = draw(st.one_of(NAMES, V4, V6))
    user = draw(st.sampled_from([None, "root", "a.b-c"]))
    slots = draw(st.one_of(st.none(), st.integers(1, 64)))
    colon = draw(st.booleans())
    shown = name
    if ":" in name and ((colon and slots is not None) or draw(st.booleans())):
        shown = f"[{name}]"
    if slots is not None:
        shown += f":{slots}" if colon else draw(st.sampled_from([" slots={}", "\tslots = {}"])).format(slots)
    line = draw(SPACE) + (f"{user}@" if user else "") + shown + draw(SPACE)
    return line + draw(st.sampled_from(["", "# a comment: x=1"])), (name, slots, user)


@given(
    lines=st.lists(entries(), min_size=1, max_size=6, unique_by=lambda entry: entry[1][0]),
    noise=st.sampled_from(["", "\n", "# only a comment\n", "  \t \n#\n"]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_every_form_is_understood(
    lines: list[tuple[str, tuple[str, int | None, str | None]]], noise: str, end: str
) -> None:
    text = noise + end.join(line for line, _ in lines) + end + noise
    found = parse_hostfile(text)
    assert simple(found) == [meaning for _, meaning in lines]
    rows = text.replace("\r\n", "\n").split("\n")
    for host in found:
        assert host.name in rows[host.line - 1]


@given(text=st.text(max_size=80))
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        hosts = parse_hostfile(text, "hosts.txt")
    except ConfigError as error:
        assert "hosts.txt" in str(error) and "expected" in str(error)
        return
    again = parse_hostfile(
        "\n".join(
            (f"{host.user}@" if host.user else "") + host.endpoint + (f":{host.slots}" if host.slots else "")
            for host in hosts
        )
    )
    assert simple(again) == simple(hosts)


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        ("good\n\nbad host", 3, "'bad host'"),
        ("a slots=0", 1, "'0' is no number of processes"),
        ("a slots=", 1, "no number"),
        ("a:2 slots=2", 1, "given twice"),
        ("a slots=2 max_slots=4", 1, "slots= stands at the end"),
        ("slots=2", 1, "slots= stands at the end"),
        ("[::1", 1, "not closed"),
        ("[::1]x", 1, "follows the bracket"),
        ("[::1%]:2", 1, "zone"),
        ("1.2.3.400", 1, "Octet"),
        ("fe80::zz", 1, "fe80::zz"),
        ("a..b", 1, "no host name"),
        ("-a", 1, "no host name"),
        ("a b@c", 1, "no user name"),
        ("x\ny\nx", 3, "first on line 1"),
        ("X\n#\nx:4", 3, "first on line 1"),
        ("::1\n0:0:0:0:0:0:0:1", 2, "first on line 1"),
        ("host$(reboot)", 1, "no host name"),
    ],
)
def test_wrong_lines_are_named(text: str, where: int, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_hostfile(text, "hosts.txt")
    assert f"hosts.txt:{where}: " in str(error.value) and said in str(error.value)


def test_all_wrong_lines_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)h:1: .*h:3: "):
        parse_hostfile("a b\nc\nd e\n", "h")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_a_file_without_hosts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="lists no host"):
        parse_hostfile(text)


def test_files_are_read_with_a_byte_order_mark_and_missing_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfa\nb:2\n")
    assert simple(read_hostfile(path)) == [("a", None, None), ("b", 2, None)]
    path.write_bytes(b"\xff\xfe")
    for wrong in (path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"cannot be read.*--hostfile"):
            read_hostfile(wrong)


def test_slots_must_be_one_number() -> None:
    assert slots_of(parse_hostfile("a:4\nb slots=4")) == 4
    assert slots_of(parse_hostfile("a\nb")) is None
    with pytest.raises(ConfigError, match="line 1: 4, line 2: nothing"):
        slots_of(parse_hostfile("a:4\nb"))


def test_this_machine_finds_itself() -> None:
    away = ["192.0.2.1", "198.51.100.7"]  # Addresses that belong to nobody (RFC 5737).
    assert node_rank(parse_hostfile("\n".join([away[0], "127.0.0.1", away[1]]))) == 1
    with pytest.raises(ConfigError, match="none belong to this machine"):
        node_rank(parse_hostfile("\n".join(away)))
    with pytest.raises(ConfigError, match=r"127.0.0.1, localhost.*--node-rank"):
        node_rank(parse_hostfile("127.0.0.1\nlocalhost"))
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        present = Path("/proc/net/if_inet6").read_text().startswith("0" * 31 + "1")
        if present:
            assert node_rank(parse_hostfile(f"{away[0]}\n[::1]:2")) == 1


def test_endpoints_bracket_ipv6() -> None:
    (host,) = parse_hostfile("fe80::1%eth0")
    assert host.endpoint == "[fe80::1%eth0]"
    assert ipaddress.ip_address(host.name.partition("%")[0]).version == 6
