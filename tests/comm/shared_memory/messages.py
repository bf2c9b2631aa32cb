"""Contents of messages over shared memory, one function each; run by ``ranks.several``."""

from __future__ import annotations

import ctypes
import warnings
from contextlib import suppress

import torch

from mt_megatron.comm.errors import MessageMismatch, TransportError
from mt_megatron.comm.shared_memory.transport import SharedMemoryTransport as Transport
from mt_megatron.comm.transport import BACKWARD, FORWARD, Edge, Label
from mt_megatron.errors import MtMegatronError
from tests.comm.pairs import BACK, DTYPES, FLOAT, SMALL, THERE, as_bytes, raises, run_pair

SIGNAL = Edge(0, 1, 1)


def every_dtype_and_shape(helper: str) -> int:
    """Codes of all dtypes, with 0 to 8 dimensions, empty, transposed, expanded, conjugated; into ``out``."""
    shapes: list[tuple[int, ...]] = [(), (1,), (0,), (3, 0, 2), (2, 3), (1, 2, 1, 2, 1, 2, 1, 3)]
    tensors = []
    for dtype in DTYPES:
        for shape in shapes:
            count = int(torch.Size(shape).numel())
            raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
            raw = raw & 1 if dtype is torch.bool else raw
            tensors.append(raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype))
        bits = torch.arange(6 * dtype.itemsize).to(torch.uint8) & 1
        tensors.append(bits.view(dtype).view(2, 3).t())
        if dtype is torch.complex64:
            tensors.append(torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj())
            tensors.append(torch.view_as_complex(torch.arange(8.0).view(4, 2)).conj().imag)
    tensors += [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(20)[::3],
        torch.ones(1).expand(5, 4),
        torch.ones(3, requires_grad=True) * 2,
        torch.arange(10_000, dtype=torch.int16).view(100, 100)[:, ::2],
    ]

    def first(transport: Transport) -> None:
        for each in tensors:
            transport.post_send(THERE, each)
        transport.finish()

    def second(transport: Transport) -> int:
        for index, each in enumerate(tensors):
            out = torch.empty(each.shape, dtype=each.dtype) if index % 2 else None
            got = transport.post_recv(THERE, each.shape, each.dtype, out=out).wait()
            assert out is None or got is out
            assert got.shape == each.shape and got.dtype == each.dtype and not got.requires_grad
            assert torch.equal(as_bytes(got), as_bytes(each.detach().resolve_neg())), (index, each)
        return len(tensors)

    return int(run_pair(first, second, helper=helper)[1])


def wrong_messages_are_refused(helper: str) -> dict[str, str]:
    """Another shape, dtype or label than asked for; damaged bytes; what no transport sends."""
    lanes = {name: Edge(0, 1, lane) for lane, name in enumerate(("shape", "dtype", "label", "crc", "header"))}
    asked = Label(3, 0, FORWARD)

    def first(transport: Transport) -> list[str]:
        transport.post_send(lanes["shape"], torch.ones(2, 3))
        transport.post_send(lanes["dtype"], torch.ones(2, dtype=torch.bfloat16))
        transport.post_send(lanes["label"], torch.ones(2), label=Label(3, 0, BACKWARD))
        for name in ("crc", "header"):
            transport.post_send(lanes[name], torch.ones(2))
        transport.finish()
        sparse = torch.ones(2, 2).to_sparse()
        said = [raises(MtMegatronError, lambda: transport.post_send(lanes["shape"], sparse))]
        nine = torch.ones([1] * 9)
        said.append(raises(MtMegatronError, lambda: transport.post_send(lanes["shape"], nine)))
        said.append(raises(MtMegatronError, lambda: transport.post_send(Edge(0, 1, 77), nine)))
        # Refused messages leave the edge as it was.
        transport.post_send(Edge(0, 1, 6), torch.ones(1))
        return said

    def second(transport: Transport) -> dict[str, str]:
        ready = Edge(0, 1, 6)
        transport.post_recv(ready, (1,), FLOAT).wait()
        for name, offset in (("crc", SMALL.payload_offset), ("header", 4096 + 16)):
            mapping = transport._incoming[lanes[name]]._mapping
            assert mapping is not None
            ctypes.c_uint8.from_address(mapping.address + offset).value ^= 1
        handles = {
            "shape": transport.post_recv(lanes["shape"], (3, 2), FLOAT),
            "dtype": transport.post_recv(lanes["dtype"], (2,), torch.float16),
            "label": transport.post_recv(lanes["label"], (2,), FLOAT, label=asked),
            "crc": transport.post_recv(lanes["crc"], (2,), FLOAT),
            "header": transport.post_recv(lanes["header"], (2,), FLOAT),
        }
        found = {name: raises(MessageMismatch, handle.wait) for name, handle in handles.items()}
        for name, handle in handles.items():
            assert raises(MessageMismatch, handle.wait) == found[name]
        found["out"] = raises(
            MtMegatronError, lambda: transport.post_recv(ready, (2,), FLOAT, out=torch.ones(3))
        )
        return found

    edges = [THERE, BACK, *lanes.values(), Edge(0, 1, 6)]

    # The second damages what lies in its rings already.
    said, found = run_pair(first, second, edges, helper=helper, crc=True)
    assert "layout torch.sparse_coo" in said[0] and "9 dimensions" in said[1] and "not prepared" in said[2]
    return dict(found)


def labels_arrive(helper: str) -> list[int]:
    def first(transport: Transport) -> None:
        transport.post_send(THERE, torch.ones(1), label=Label(5, 1, BACKWARD))
        transport.finish()

    def second(transport: Transport) -> list[int]:
        handle = transport.post_recv(THERE, (1,), FLOAT, label=Label(micro_batch=5))
        assert handle.label == Label()
        handle.wait()
        assert "taken twice" in raises(MtMegatronError, handle.wait)
        return list(handle.label)

    return list(run_pair(first, second, helper=helper)[1])


def written_before_it_was_copied(helper: str) -> None:
    """A write to a tensor that waits ends the edge; an exchanged ``.data``, and a write after it, do not."""

    def first(transport: Transport) -> str:
        whole = torch.arange(50_000.0)
        sending = transport.post_send(THERE, whole)
        whole.data = torch.empty(1)
        sending.wait()
        whole.data = torch.arange(50_000.0)
        whole.add_(1.0)
        transport.post_send(THERE, whole)
        whole.view(-1)[3:].mul_(2.0)
        transport.post_send(SIGNAL, torch.ones(1))
        said = raises(TransportError, transport.finish)
        assert raises(TransportError, lambda: transport.post_send(THERE, torch.ones(1))) == said
        return said

    def second(transport: Transport) -> bool:
        kept = transport.post_recv(THERE, (50_000,), FLOAT).wait()
        transport.post_recv(SIGNAL, (1,), FLOAT).wait()
        with suppress(TransportError):
            transport.post_recv(THERE, (50_000,), FLOAT).wait()
        return bool((kept == torch.arange(50_000.0)).all())

    said, same = run_pair(first, second, [THERE, SIGNAL], helper=helper)
    assert same and "(50000,) was written to in place 1 time(s) between its post to rank 1" in said, said


def writes_elsewhere_are_none(helper: str) -> None:
    """Writes beside what waits to be sent end nothing: to other rows of its buffer, which is copied; to the
    storage that its ``.data`` was exchanged for; by an optimizer and a backward that read it."""
    count = 50_000
    expected = [float(each) for each in range(6)]

    def first(transport: Transport) -> list[str]:
        tensors = [torch.full((count,), value) for value in expected]
        rows = torch.stack([tensors[0], tensors[0]])
        parameter = torch.nn.Parameter(torch.zeros(count))
        parameter.grad = tensors[2]
        doubled = torch.full((count,), expected[3] / 2, requires_grad=True) * 2.0
        with torch.inference_mode():
            inferred = tensors[4].clone()
        given = [rows[0], tensors[1], parameter.grad, doubled, inferred, tensors[5]]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handles = [transport.post_send(THERE, each) for each in given]
            rows[1].fill_(-1.0)
            rows[0].fill_(-1.0)
            tensors[1].data = torch.zeros(count)
            tensors[1].add_(1.0)
            torch.optim.SGD([parameter], lr=0.1).step()
            parameter.grad = None
            doubled.sum().backward()
            tensors[5].data = torch.empty(1)
            assert not any(each.test() for each in handles)
            transport.post_send(SIGNAL, torch.ones(1))
            for each in handles:
                each.wait()
            # Once waited for, all may be written to.
            tensors[2].zero_()
            transport.finish()
        return [str(each.message) for each in caught]

    def second(transport: Transport) -> bool:
        transport.post_recv(SIGNAL, (1,), FLOAT).wait()
        return all(
            bool((transport.post_recv(THERE, (count,), FLOAT).wait() == each).all()) for each in expected
        )

    (said,), same = run_pair(first, second, [THERE, SIGNAL], helper=helper)
    assert same and "its .data was exchanged, so what was sent may be right" in said, said
