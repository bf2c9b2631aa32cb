"""Links, credits and errors of the RDMA transport, over a fake of the verbs within one process.

Real verbs are tested by tests/rdma/run.sh in a guest with soft-RoCE.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mt_megatron.comm import message
from mt_megatron.comm.errors import (
    MessageMismatch,
    PeerLost,
    TransferTimeout,
    TransportError,
    TransportUnavailable,
)
from mt_megatron.comm.rdma import completions, edges
from mt_megatron.comm.rdma.completions import RdmaError
from mt_megatron.comm.rdma.edges import Memory
from mt_megatron.comm.rdma.gpu_direct import DirectMemory, open_direct
from mt_megatron.comm.rdma.ports import Unusable
from mt_megatron.comm.rdma.ring import MOST_SLOTS, ReceiveRing, SendRing
from mt_megatron.comm.rdma.transport import RdmaTransport, RingSize
from mt_megatron.comm.transport import Edge, Label
from mt_megatron.errors import ConfigError, MtMegatronError
from tests.comm.rdma.fake_ranks import BACK, FORTH, Pair
from tests.comm.rdma.fake_verbs import FakeDevice, FakeNetwork
from tests.comm.rdma.message_traffic import SharedBootstrap, exchange


def test_random_messages_over_the_fake() -> None:
    pair = Pair(crc=True)
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        found[rank] = exchange(pair.ranks[rank], rank, messages=150, producers=4, seed=7)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each["received"] for each in found] == [150, 150]
    pair.close()
    assert all(device.closed for device in pair.devices)


def test_headers_and_payloads_may_lie_in_different_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with rings in a device's memory; here both are the host's."""
    fetch = RdmaTransport._fetch

    def memory(self: RdmaTransport, slots: int, slot_bytes: int) -> Memory:
        return Memory(self._device, slots, slot_bytes, self._device.region)

    def fetch_split(self: RdmaTransport, key: str, peer: int, deadline: float) -> dict[str, Any]:
        found = fetch(self, key, peer, deadline)
        if "is_one" in found:
            assert found["is_one"] is False
            found["is_one"] = True
        return found

    monkeypatch.setattr(RdmaTransport, "_memory", memory)
    monkeypatch.setattr(RdmaTransport, "_fetch", fetch_split)
    pair = Pair(crc=True)
    pair.prepare(FORTH)
    sent = [torch.arange(count, dtype=torch.int32) for count in (0, 3, 256, 257, 5000)]
    handles = [pair.ranks[0].post_send(FORTH, each) for each in sent]
    received = [pair.ranks[1].post_recv(FORTH, each.shape, each.dtype).wait() for each in sent]
    assert all(torch.equal(a, b) for a, b in zip(received, sent, strict=True))
    for handle in handles:
        handle.wait()
    pair.close()


def test_ranks_that_do_not_agree_on_gpudirect_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(self: RdmaTransport, slots: int, slot_bytes: int) -> Memory:
        return Memory(self._device, slots, slot_bytes, self._device.region)

    pair = Pair()
    refusals: list[str] = []

    def prepare() -> None:
        try:
            pair.ranks[0].prepare([FORTH])
        except TransportUnavailable as error:
            refusals.append(str(error))

    thread = threading.Thread(target=prepare)
    thread.start()
    # The rank that receives makes the ring.
    monkeypatch.setattr(RdmaTransport, "_memory", memory)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 0 .* gave up its channels \(TransportUnavailable: "):
        pair.ranks[1].prepare([FORTH])
    assert time.monotonic() - begin < 20, "long before its own time-out"
    thread.join()
    assert "rank 1 and rank 0 do not both use GPUDirect; set MT_MEGATRON_GPU_DIRECT" in refusals[0]
    pair.close()


def test_gpudirect_is_refused_with_the_reason() -> None:
    adapter = FakeNetwork().device()
    assert open_direct(torch.device("cpu"), adapter, crc=False, environ={}) is None
    asked = {"MT_MEGATRON_GPU_DIRECT": "1"}
    with pytest.raises(Unusable, match="the tensors are on cpu, not on CUDA"):
        open_direct(torch.device("cpu"), adapter, crc=False, environ=asked)
    with pytest.raises(Unusable, match="a CRC needs the bytes on the host"):
        open_direct(torch.device("cuda"), adapter, crc=True, environ=asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_gpudirect_without_a_driver_is_refused() -> None:
    asked = {"MT_MEGATRON_GPU_DIRECT": "1"}
    with pytest.raises(Unusable, match="the CUDA driver cannot be loaded: libcuda"):
        open_direct(torch.device("cuda"), FakeNetwork().device(), crc=False, environ=asked)


def test_a_flush_in_a_new_thread_has_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stand-in for CUDA, in which a call of the runtime gives a thread its context, as CUDA's does."""
    context = threading.local()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            context.is_current = True

        def query(self) -> bool:
            context.is_current = True
            return True

    class Driver:
        def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
            return 0 if getattr(context, "is_current", False) else 201

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    memory = DirectMemory(torch.device("cuda", 0), FakeNetwork().device(), Driver())
    with ThreadPoolExecutor(1) as thread:
        thread.submit(memory.flush).result()


def test_headers_have_the_size_that_slots_leave_for_them() -> None:
    assert edges.HEADER_BYTES == message.HEADER_BYTES == len(message.Header(0, torch.int8, (1,)).encode())


def test_posting_does_not_wait_for_the_peer_and_a_full_ring_loses_nothing(pair: Pair) -> None:
    sent = [torch.full((256,), float(number)) for number in range(11)]
    handles = [pair.ranks[0].post_send(FORTH, tensor) for tensor in sent]
    # 128 bytes of header and 1,024 of payload fill one slot each: the fifth message waits for a credit.
    assert [handle.test() for handle in handles] == [True] * 4 + [False] * 7
    with pytest.raises(
        TransferTimeout, match=r"a message to rank 1, lane 0, took longer than 0\.0.*7 message"
    ):
        handles[4].wait(0.05)
    received = [pair.ranks[1].post_recv(FORTH, (256,), torch.float32) for _ in sent]
    assert all(torch.equal(a.wait(), b) for a, b in zip(received, sent, strict=True))
    pair.ranks[0].finish()


def test_what_is_sent_is_held_when_data_is_exchanged_and_may_change_once_staged(pair: Pair) -> None:
    for _ in range(4):
        pair.ranks[0].post_send(FORTH, torch.zeros(1))
    waiting = torch.arange(3000, dtype=torch.float64)
    handle = pair.ranks[0].post_send(FORTH, waiting)
    waiting.data = torch.empty(1)  # As deallocate_output_tensor does.
    for _ in range(4):
        pair.ranks[1].post_recv(FORTH, (1,), torch.float32).wait()
    received = pair.ranks[1].post_recv(FORTH, None, torch.float64)
    assert torch.equal(received.wait(), torch.arange(3000, dtype=torch.float64))
    handle.wait(20)  # Its own thread hears of it after the receiver has it.
    assert handle.test()


def test_a_write_before_it_is_staged_ends_the_edge(pair: Pair) -> None:
    sender, receiver = pair.ranks
    for _ in range(4):
        sender.post_send(FORTH, torch.zeros(1))
    waiting = torch.arange(3000.0)
    handle = sender.post_send(FORTH, waiting)
    behind = sender.post_send(FORTH, torch.zeros(1))
    waiting.view(-1)[3:].mul_(2.0)
    for _ in range(4):
        receiver.post_recv(FORTH, (1,), torch.float32).wait()
    receiver.post_recv(FORTH, (3000,), torch.float32).wait()
    for call in (handle.wait, behind.wait, lambda: sender.post_send(FORTH, waiting), sender.finish):
        with pytest.raises(
            TransportError, match=r"\(3000,\) was written to in place 1 time.* post to rank 1"
        ):
            call()


def test_writes_elsewhere_end_nothing(pair: Pair) -> None:
    """To other rows of a buffer, of which the waiting one is copied, and to a storage that ``.data`` was
    exchanged for."""
    sender, receiver = pair.ranks
    for _ in range(4):
        sender.post_send(FORTH, torch.zeros(1))
    rows, whole = torch.ones(2, 3000), torch.ones(3000)
    handles = [sender.post_send(FORTH, each) for each in (rows[0], whole)]
    rows.fill_(-1.0)
    whole.data = torch.zeros(3000)
    whole.add_(5.0)
    for _ in range(4):
        receiver.post_recv(FORTH, (1,), torch.float32).wait()
    with pytest.warns(UserWarning, match="its .data was exchanged"):
        expected = [receiver.post_recv(FORTH, (3000,), torch.float32) for _ in handles]
        assert all(bool((each.wait() == 1.0).all()) for each in expected)
        for handle in handles:
            handle.wait()
    sender.finish()


def test_edges_do_not_wait_for_each_other() -> None:
    pair = Pair()
    other = Edge(0, 1, 5)
    pair.prepare(FORTH, other)
    for _ in range(9):
        pair.ranks[0].post_send(FORTH, torch.zeros(1))
    pair.ranks[0].post_send(other, torch.tensor([3]))
    assert pair.ranks[1].post_recv(other, (1,), torch.int64).wait(5.0).item() == 3
    pair.close()


def test_a_message_fills_the_given_tensor_and_says_its_label(pair: Pair) -> None:
    out = torch.empty(2, 300, dtype=torch.bfloat16)
    pair.ranks[0].post_send(FORTH, torch.ones(2, 300, dtype=torch.bfloat16), label=Label(3, 1, 0))
    handle = pair.ranks[1].post_recv(FORTH, (2, 300), torch.bfloat16, label=Label(3), out=out)
    assert handle.wait() is out
    assert handle.label == Label(3, 1, 0) and out.sum() == 600
    with pytest.raises(MtMegatronError, match="was taken before"):
        handle.wait()


@pytest.mark.parametrize(
    ("shape", "dtype", "label", "said"),
    [
        ((4,), torch.float32, Label(), r"shape \(3,\) instead of \(4,\)"),
        ((3,), torch.float16, Label(), "torch.float32 instead of torch.float16"),
        ((3,), torch.float32, Label(micro_batch=8), "micro_batch=7"),
    ],
)
def test_a_message_that_is_not_the_expected_one_is_named(
    pair: Pair, shape: tuple[int, ...], dtype: torch.dtype, label: Label, said: str
) -> None:
    pair.ranks[0].post_send(FORTH, torch.zeros(3), label=Label(micro_batch=7))
    with pytest.raises(MessageMismatch, match=rf"rank 1 received from rank 0, lane 0.*{said}"):
        pair.ranks[1].post_recv(FORTH, shape, dtype, label=label).wait()


def test_a_damaged_byte_is_noticed_by_the_crc() -> None:
    pair = Pair(crc=True)
    pair.prepare(FORTH)
    sender = pair.queue_pair(0)
    sender.held = deque()
    pair.ranks[0].post_send(FORTH, torch.ones(100))
    work = sender.held[0]
    work[1].bytes[work[2] + 200] ^= 1
    sender.release()
    with pytest.raises(MessageMismatch, match="CRC-32"):
        pair.ranks[1].post_recv(FORTH, (100,), torch.float32).wait()
    pair.close()


def test_a_peer_that_is_gone_is_named_soon(pair: Pair) -> None:
    expected = pair.ranks[0].post_recv(BACK, (1,), torch.float32)
    # As the kernel does it for a process that is killed: nothing is said.
    pair.queue_pair(1).close()
    began = time.monotonic()
    with pytest.raises(PeerLost, match=rf"rank 1 \(process {os.getpid()} on ") as caught:
        expected.wait()
    assert time.monotonic() - began < 15
    assert caught.value.rank == 1
    with pytest.raises(PeerLost):
        pair.ranks[0].post_send(FORTH, torch.zeros(1)).wait()
    pair.devices[1].made.remove(pair.queue_pair(1))


def test_a_peer_that_closed_is_named_and_what_it_had_sent_arrives(pair: Pair) -> None:
    pair.ranks[1].post_send(BACK, torch.tensor([5.0]))
    pair.ranks[1].close()
    assert pair.ranks[0].post_recv(BACK, (1,), torch.float32).wait().item() == 5.0
    with pytest.raises(PeerLost, match="closed its channels"):
        pair.ranks[0].post_recv(BACK, (1,), torch.float32).wait()


def test_a_farewell_that_overtakes_an_acknowledgement_is_no_loss(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fragments that the peer has copied out have reached it, whenever the write's completion is seen."""
    own = pair.queue_pair(0)
    poll = own.poll
    monkeypatch.setattr(own, "poll", lambda most: [each for each in poll(most) if each.is_receive])
    expected = pair.ranks[1].post_recv(FORTH, (1,), torch.float32)
    pair.ranks[0].post_send(FORTH, torch.tensor([5.0])).wait()
    assert expected.wait().item() == 5.0
    pair.ranks[1].finish()
    pair.ranks[1].close()
    link = pair.ranks[0]._links[1]
    until = time.monotonic() + 10
    while not link.closed_by_peer:
        assert time.monotonic() < until
        time.sleep(0.01)
    pair.ranks[0].finish()
    assert not link.is_quiet(), "the completion has not been seen"


def test_an_own_port_that_is_down_is_not_the_peers_end(pair: Pair) -> None:
    pair.devices[0].is_active = False
    pair.network.is_cut = True
    with pytest.raises(RdmaError, match="fake0 port 1.*the port of this machine is down") as caught:
        pair.ranks[0].post_recv(BACK, (1,), torch.float32).wait()
    assert caught.value.status == "RETRY_EXC_ERR"


@pytest.mark.parametrize("call", ["poll", "clear_event"])
def test_an_error_of_the_library_is_the_links(pair: Pair, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that waits, or in the one that serves all links: it is told, and the thread goes on."""

    def broken(*arguments: int) -> Any:
        raise OSError("the adapter is gone")

    expected = pair.ranks[0].post_recv(BACK, (1,), torch.float32)
    monkeypatch.setattr(pair.queue_pair(0), call, broken)
    with pytest.raises(RdmaError, match="an error when completions were read: the adapter is gone"):
        expected.wait()
    assert pair.ranks[0]._engine._thread.is_alive()


def test_a_port_that_cannot_be_asked_counts_as_down(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise OSError("the adapter is gone")

    monkeypatch.setattr(pair.devices[0], "port_is_active", broken)
    pair.network.is_cut = True
    with pytest.raises(RdmaError, match="RETRY_EXC_ERR: the port of this machine is down"):
        pair.ranks[0].post_recv(BACK, (1,), torch.float32).wait()


def test_too_few_receive_requests_are_said() -> None:
    pair = Pair(receives=2)
    pair.prepare(FORTH)
    sender = pair.queue_pair(0)
    sender.held = deque()
    for _ in range(4):
        pair.ranks[0].post_send(FORTH, torch.zeros(1))
    # All at once: the peer has no time to post further requests.
    sender.release()
    with pytest.raises(RdmaError, match="RNR_RETRY_EXC_ERR: the peer had no receive request left"):
        pair.ranks[0].finish()
    pair.close()


def test_a_key_that_is_wrong_is_a_remote_access_error(pair: Pair) -> None:
    for region in list(pair.network.regions.values()):
        if region.nbytes > 4096:
            del pair.network.regions[region.remote_key]
    with pytest.raises(RdmaError, match=r"rank 1 .*REM_ACCESS_ERR"):
        pair.ranks[0].post_send(FORTH, torch.zeros(1))
        pair.ranks[0].finish()


def test_events_of_the_adapter_end_links_or_do_not(pair: Pair) -> None:
    expected = pair.ranks[0].post_recv(BACK, (1,), torch.float32)
    pair.devices[0].raise_event(completions.PORT_DOWN_EVENT)
    time.sleep(0.1)
    assert not expected.test()
    pair.devices[0].raise_event(8)
    with pytest.raises(RdmaError, match="DEVICE_FATAL: the adapter failed"):
        expected.wait()


@pytest.mark.parametrize("status", range(1, 24))
def test_every_status_names_the_peer(status: int) -> None:
    from mt_megatron.comm.bootstrap import own_place

    error = completions.failure_of_status(status, "mlx5_0 port 1", own_place(3), port_is_active=True)
    assert f"rank 3 (process {os.getpid()} on " in str(error)
    assert isinstance(error, PeerLost) == (status == completions.RETRIES_EXCEEDED)


def test_a_rank_without_an_adapter_is_named_to_its_peers() -> None:
    keys: dict[str, bytes] = {}
    network = FakeNetwork()

    class NoMemory(FakeDevice):
        def region(self, nbytes: int) -> Any:
            raise Unusable("12 bytes of memory cannot be registered", "raise the limit")

    devices = [network.device(), NoMemory(network, 64)]
    ranks = [
        RdmaTransport(SharedBootstrap(keys, rank), timeout=20.0, open_device=lambda at=rank: devices[at])
        for rank in range(2)
    ]
    with pytest.raises(TransportUnavailable, match="cannot be registered; raise the limit"):
        ranks[1].prepare([FORTH])
    with pytest.raises(TransportUnavailable, match="rank 1: 12 bytes of memory cannot be registered"):
        ranks[0].prepare([FORTH])
    for rank in ranks:
        rank.abandon()
        rank.close()


def test_misuse_is_refused(pair: Pair) -> None:
    with pytest.raises(MtMegatronError, match="was not prepared"):
        pair.ranks[0].post_send(Edge(0, 1, 9), torch.zeros(1))
    with pytest.raises(MtMegatronError, match="was not prepared"):
        pair.ranks[0].post_recv(FORTH, (1,), torch.float32)
    with pytest.raises(ConfigError, match="lane of 0 to 4,095"):
        pair.ranks[0].prepare([Edge(0, 1, 4096)])
    with pytest.raises(ConfigError, match="4 to 16384 slots"):
        RingSize(slots=3).require()
    with pytest.raises(MtMegatronError, match="8; flatten it"):
        pair.ranks[0].post_send(FORTH, torch.zeros([1] * 9))
    for wrong in (torch.empty(2), torch.empty(1, dtype=torch.int8), torch.empty(2, 1).t()):
        with pytest.raises(MtMegatronError, match="found out= of"):
            pair.ranks[0].post_recv(BACK, (1,), torch.float32, out=wrong)
    with pytest.raises(MtMegatronError, match="found out= on meta; expected memory of the host"):
        pair.ranks[0].post_recv(BACK, (1,), torch.float32, out=torch.empty(1, device="meta"))
    pair.ranks[0].post_recv(BACK, (1,), torch.float32)
    with pytest.raises(MtMegatronError, match="1 transfer.*not taken, the first from rank 1"):
        pair.ranks[0].finish()
    pair.ranks[0].abandon()
    with pytest.raises(TransportError, match="was given up after an error; start the processes anew"):
        pair.ranks[0].post_send(FORTH, torch.zeros(1))
    assert MOST_SLOTS == 16384


def test_more_edges_than_a_queue_pair_serves_are_refused() -> None:
    pair = Pair(RingSize(slots=64, slot_bytes=128))
    failures: list[BaseException] = []

    def prepare(rank: int) -> None:
        try:
            pair.ranks[rank].prepare([Edge(0, 1, lane) for lane in range(16)])
        except ConfigError as error:
            failures.append(error)

    thread = threading.Thread(target=prepare, args=(1,))
    thread.start()
    thread.join()
    assert "found more edges between ranks 1 and 0 than one queue pair of 1024 requests serves" in str(
        failures[0]
    )
    pair.close()


class Ring:
    """Both sides of a ring with credit messages that are delayed, repeated and merged at random."""

    def __init__(self, slots: int, gives: int = 0) -> None:
        self.sender, self.receiver = SendRing(slots), ReceiveRing(slots)
        self.lies: deque[int] = deque()
        self.gives = gives
        """Credits that the receiver gives too early: the planted error."""

    def run(self, steps: int, seed: int) -> int:
        """Fragments that arrived intact. Raises MessageMismatch or AssertionError for what may not be."""
        random = torch.Generator().manual_seed(seed)
        memory: list[int | None] = [None] * self.sender.slots
        arrived = 0
        for _ in range(steps):
            choice = int(torch.randint(4, (1,), generator=random))
            if choice == 0 and self.sender.free():
                number = self.sender.sent
                slot = self.sender.take(1)
                if memory[slot] is not None:
                    raise AssertionError("a slot was overwritten before it was read")
                memory[slot] = number
                self.receiver.arrive(slot)
                self.sender.acknowledge(slot)
            elif choice == 1 and (slot_or_none := self.receiver.next_slot()) is not None:
                assert memory[slot_or_none] == self.receiver.consumed
                memory[slot_or_none] = None
                self.receiver.consume()
                arrived += 1
            elif choice == 2:
                due = self.receiver.credit_due(more_follows=bool(torch.randint(2, (1,), generator=random)))
                if due is not None:
                    self.lies.append(due + self.gives)
            elif self.lies:
                # A repeated message changes nothing.
                low_bits = self.lies.popleft()
                self.sender.credit(low_bits)
                assert self.sender.credit(low_bits) == 0
        return arrived


def test_credits_survive_any_order_and_the_end_of_their_count() -> None:
    ring = Ring(5)
    # Counts are sent as 16 bits: begin close below their end.
    ring.sender.sent = ring.sender.credited = ring.receiver.arrived = ring.receiver.consumed = (
        65535 - 65535 % 5
    )
    assert ring.run(20_000, seed=1) > 2_000
    assert ring.sender.sent > 65536


def test_a_credit_that_is_given_too_early_is_found() -> None:
    with pytest.raises((MessageMismatch, AssertionError)):
        Ring(5, gives=1).run(20_000, seed=1)
