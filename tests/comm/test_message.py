"""The header of a message: nothing is lost in it, nothing else is taken for one."""

from __future__ import annotations

import re
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mt_megatron.comm.errors import MessageMismatch
from mt_megatron.comm.message import HEADER_BYTES, MOST_DIMS, Header
from mt_megatron.comm.transport import UNLABELLED, Edge, Label
from mt_megatron.errors import MtMegatronError
from tests.comm.pairs import DTYPES

EDGE = Edge(3, 4, 1)
small = st.integers(-1, 2**31 - 1)
headers = st.builds(
    Header,
    st.integers(0, 2**64 - 1),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 2**20), max_size=2).map(tuple),
    st.builds(Label, small, small, st.integers(-1, 2**15 - 1)),
    st.none() | st.integers(0, 2**32 - 1),
)


@given(headers)
def test_a_header_survives(header: Header) -> None:
    encoded = header.encode()
    assert len(encoded) == HEADER_BYTES
    assert Header.decode(encoded) == header


def test_all_dtypes_of_this_torch_have_a_code() -> None:
    own = {str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)}
    missing = own - {str(each).removeprefix("torch.") for each in DTYPES}
    # Quantised ones and integers of less than a byte are no types of activations or gradients.
    assert not [name for name in missing if not re.fullmatch(r"q.*|bits?.*|u?int[1-7]", name)], missing
    assert {torch.int8, torch.uint8, torch.int64, torch.uint16, torch.bool, torch.bfloat16} <= set(DTYPES)


def test_the_layout_is_the_documented_one() -> None:
    encoded = Header(7, torch.bfloat16, (2, 3), Label(5, 1, 0), 0xABCD).encode()
    assert struct.unpack_from("<QI", encoded) == (7, 0xABCD)
    assert struct.unpack_from("<Q", encoded, 24) == (12,)
    assert encoded[32:34] == bytes([4, 2])
    assert struct.unpack_from("<h", encoded, 36) == (0,)
    assert struct.unpack_from("<ii", encoded, 40) == (5, 1)
    assert struct.unpack_from("<8q", encoded, 48) == (2, 3, 0, 0, 0, 0, 0, 0)
    assert struct.unpack_from("<I", encoded, 124) == (zlib.crc32(encoded[16:124]),)


@pytest.mark.parametrize("at", [16, 20, 24, 32, 33, 36, 40, 44, 48, 100, 123, 127])
def test_a_damaged_description_is_no_header(at: int) -> None:
    encoded = bytearray(Header(7, torch.float32, (2, 3)).encode())
    encoded[at] ^= 4
    with pytest.raises(MessageMismatch, match="no message header"):
        Header.decode(bytes(encoded))


def test_what_another_version_writes_is_named() -> None:
    def changed(offset: int, value: int) -> bytes:
        encoded = bytearray(Header(0, torch.float32, (2, 3)).encode()[16:124])
        encoded[offset - 16] = value
        return bytes(16) + bytes(encoded) + struct.pack("<I", zlib.crc32(encoded))

    for offset, value, says in ((20, 9, "format 9"), (32, 200, "dtype code 200"), (24, 25, "25 bytes")):
        with pytest.raises(MessageMismatch, match=says):
            Header.decode(changed(offset, value))


def test_what_cannot_be_said_is_refused() -> None:
    with pytest.raises(MtMegatronError, match="at most 8"):
        Header(0, torch.float32, (1,) * (MOST_DIMS + 1)).encode()
    with pytest.raises(MtMegatronError, match="torch.quint8"):
        Header(0, torch.quint8, (1,)).encode()


def test_a_receiver_gets_what_it_asked_for_or_an_error() -> None:
    header = Header(2, torch.float32, (4,), Label(1, 0, 0))
    header.require(EDGE, sequence=2, shape=[4], dtype=torch.float32)
    header.require(EDGE, sequence=2, shape=None, dtype=torch.float32, label=Label(direction=0))
    asked = {"sequence": 2, "shape": (4,), "dtype": torch.float32, "label": UNLABELLED}
    for wrong, says in (
        ({"sequence": 3}, "number 2 instead of 3"),
        ({"shape": (2, 2)}, "shape"),
        ({"dtype": torch.int32}, "torch.float32 instead of torch.int32"),
        ({"label": Label(micro_batch=2)}, "micro_batch=1"),
    ):
        with pytest.raises(MessageMismatch, match="rank 4 received from rank 3, lane 1") as error:
            header.require(EDGE, **{**asked, **wrong})
        assert says in str(error.value)


def test_a_checksum_is_checked_if_there_is_one() -> None:
    payload = b"0123"
    Header(0, torch.int8, (4,)).require_crc(EDGE, payload)
    Header(0, torch.int8, (4,), UNLABELLED, zlib.crc32(payload)).require_crc(EDGE, payload)
    with pytest.raises(MessageMismatch, match="damaged on the way"):
        Header(0, torch.int8, (4,), UNLABELLED, zlib.crc32(payload)).require_crc(EDGE, b"0124")
