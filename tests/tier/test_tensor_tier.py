from __future__ import annotations

import gc
import os
import resource

import numpy as np
import pytest
import torch

from tieredkv.errors import BadConfig
from tieredkv.testing.fake_device import LateStream, is_poisoned, poison
from tieredkv.tier.copier import Copier
from tieredkv.tier.stream import CopyStream, HostStream, stream_for
from tieredkv.tier.tensor import TensorTier, copy_slots
from tieredkv.units import GiB, MiB

PAGE = 4096
CPU = torch.device("cpu")


def make(name: str = "host", num_pages: int = 64, stream: CopyStream | None = None) -> TensorTier:
    return TensorTier(
        name,
        num_pages * PAGE,
        min_chunk_nbytes=4 * PAGE,
        device=CPU,
        pinned=False,
        stream=stream or HostStream(Copier()),
    )


@pytest.mark.parametrize("name", ["device", "host"])
def test_tensor_and_memory_views_of_a_run_are_the_same_bytes(name: str) -> None:
    tier = make(name)
    slots = tier.arena.allocate(2 * PAGE, 5)
    ((first, count, offset),) = tier.arena.runs(2 * PAGE, slots)
    parts = tier.parts(2 * PAGE, first, count)
    assert parts.shape == (5, 2 * PAGE) and parts.data_ptr() == tier.buffer.data_ptr() + offset
    parts[3].fill_(7)
    assert bytes(tier.memory(2 * PAGE, slots[3:4])[0]) == b"\x07" * 2 * PAGE
    tier.memory(2 * PAGE, slots[4:5])[0][:3] = b"abc"
    assert parts[4, :3].tolist() == list(b"abc")
    assert tier.run_memory(2 * PAGE, first, count).nbytes == 10 * PAGE
    assert tier.buffer.data_ptr() % PAGE == 0
    tier.check()
    tier.close()


def test_zero_free_leaves_what_lives_alone_and_touches_no_new_memory() -> None:
    tier = make()
    slots, larger = tier.arena.allocate(PAGE, 6), tier.arena.allocate(3 * PAGE, 1)
    tier.buffer.fill_(9)
    tier.arena.free(PAGE, slots[[1, 2, 4]])
    tier.zero_free()
    pages = tier.buffer.view(-1, PAGE)[:, -1].tolist()
    assert pages[:8] == [9, 0, 0, 9, 0, 9, 0, 0] and pages[8:12] == [9, 9, 9, 0] and set(pages[12:]) == {9}
    tier.arena.free(PAGE, slots[[0, 3, 5]])
    tier.arena.free(3 * PAGE, larger)
    tier.zero_free()
    assert not tier.buffer[: 12 * PAGE].any()
    tier.close()


def test_a_run_over_a_chunk_tail_is_a_programming_error() -> None:
    tier = make()
    with pytest.raises(AssertionError, match="end to end"):
        tier.parts(3 * PAGE, 0, 2)
    tier.close()


def test_a_large_budget_costs_no_memory_before_use() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tier = TensorTier("host", 4 * GiB, device=CPU, pinned=False, stream=HostStream(Copier()))
    slot = int(tier.arena.allocate(64 * PAGE, 1)[0])
    tier.parts(64 * PAGE, slot, 1).fill_(1)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib * 1024 < 16 * MiB
    tier.close()
    tier.close()


def test_a_view_outlives_close() -> None:
    tier = make()
    slot = int(tier.arena.allocate(PAGE, 1)[0])
    view = tier.parts(PAGE, slot, 1)
    view.fill_(3)
    tier.close()
    assert int(view.sum()) == 3 * PAGE


def test_memory_that_cannot_be_had_names_the_tier() -> None:
    with pytest.raises(BadConfig, match="host tier"):
        TensorTier("host", 1 << 60, device=CPU, pinned=False, stream=HostStream(Copier()))


def test_pinning_without_cuda_is_refused_and_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    tier = TensorTier("host", MiB, device=CPU, pinned=True, stream=HostStream(Copier()))
    assert not tier.pinned and tier.pin_refusal == "CUDA is not available"
    tier.close()


def test_a_forked_child_lives_and_dies_without_the_memory() -> None:
    tier = make()
    tier.buffer.fill_(5)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert int(tier.buffer[-1]) == 5
    tier.close()


def test_host_stream_copies_at_once() -> None:
    stream = stream_for(CPU, Copier())
    dst, src = torch.zeros(8), torch.arange(8.0)
    stream.after_current()
    stream.copy(dst, src)
    ticket = stream.ticket()
    assert ticket.done() and ticket.wait(0) and torch.equal(dst, src)
    stream.before_current(ticket)


def test_a_late_copy_reads_its_source_when_it_completes() -> None:
    stream = LateStream()
    dst, src = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
    poison(dst)
    stream.copy(dst, src)
    ticket = stream.ticket()
    assert is_poisoned(dst) and not ticket.done() and not ticket.wait(0.001)
    src.fill_(2)  # a caller that does not wait spoils its own copy
    assert stream.release() == 2
    assert ticket.done() and dst.unique().tolist() == [2]
    stream.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_overtakes_its_producer_unless_it_waits_for_it(waits: bool) -> None:
    stream = LateStream()
    dst, src = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    poison(src)
    stream.compute(lambda: src.fill_(1).sum().item())
    if waits:
        stream.after_current()
    stream.copy(dst, src)
    ticket = stream.ticket()
    stream.before_current(ticket)
    assert is_poisoned(dst) is not waits
    stream.close()
    assert not is_poisoned(src)


def test_a_thread_completes_copies_after_seeded_delays() -> None:
    stream = LateStream(delay_s=0.001, seed=3)
    src = torch.arange(10)
    copies = [torch.zeros(10, dtype=torch.int64) for _ in range(20)]
    for dst in copies:
        stream.copy(dst, src)
    assert stream.ticket().wait(10.0) and stream.num_pending == 0
    assert all(torch.equal(dst, src) for dst in copies)
    stream.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_cuda_copies_wait_for_the_producer_and_hold_up_the_reader() -> None:
    cuda = torch.device("cuda", torch.cuda.current_device())
    stream = stream_for(cuda, Copier())
    device = TensorTier("device", 64 * MiB, device=cuda, pinned=False, stream=stream)
    host = TensorTier("host", 64 * MiB, device=CPU, pinned=True, stream=stream)
    assert host.pinned and not device.host_addressable
    part = 2 * MiB
    up, down = int(device.arena.allocate(part, 1)[0]), int(host.arena.allocate(part, 1)[0])
    torch.cuda._sleep(50_000_000)
    device.parts(part, up, 1).fill_(42)
    stream.after_current()
    stream.copy(host.parts(part, down, 1), device.parts(part, up, 1))
    ticket = stream.ticket()
    assert not ticket.done() and not ticket.wait(1e-4) and ticket.wait(10.0)
    assert bytes(host.memory(part, np.array([down]))[0]) == b"\x2a" * part
    host.parts(part, down, 1).fill_(7)
    stream.copy(device.parts(part, up, 1), host.parts(part, down, 1))
    stream.before_current(stream.ticket())
    assert int(device.parts(part, up, 1).sum()) == 7 * part
    device.arena.free(part, [up])
    device.zero_free()
    assert int(device.parts(part, up, 1).sum()) == 0
    device.close()
    host.close()


def test_a_forked_child_keeps_its_own_memory_when_an_inherited_tier_goes() -> None:
    """The child's new tier may lie where the parent's was: collecting the parent's must not unmap it."""
    inherited = [make_tier_for_fork() for _ in range(4)]
    pid = os.fork()
    if pid == 0:
        own = [make_tier_for_fork() for _ in range(4)]
        inherited.clear()
        gc.collect()
        for tier in own:
            tier.memory(4096, np.array([0]))[0][:] = b"x" * 4096
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status}"


def make_tier_for_fork() -> TensorTier:
    tier = TensorTier("host", 1 << 22, device=torch.device("cpu"), pinned=False, stream=HostStream(Copier()))
    tier.arena.allocate(4096, 1)
    return tier


def test_slots_are_copied_in_runs_that_are_runs_in_both_tiers() -> None:
    class Counting(HostStream):
        num_copies = 0

        def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
            self.num_copies += 1
            super().copy(dst, src)

    stream = Counting(Copier())
    one, other = make("device"), make("host")
    slots = one.arena.allocate(PAGE, 8)
    places = other.arena.allocate(PAGE, 16)[[0, 1, 2, 5, 6, 7, 8, 15]]
    one.parts(PAGE, 0, 8).copy_(torch.arange(8, dtype=torch.uint8)[:, None].expand(8, PAGE))
    copy_slots(stream, PAGE, one, slots, other, places)
    assert stream.num_copies == 3
    for number, place in enumerate(places.tolist()):
        assert (other.parts(PAGE, place, 1) == number).all()
    copy_slots(stream, PAGE, one, slots[:0], other, places[:0])
    other.buffer.zero_()
    copy_slots(stream, PAGE, one, slots[::-1], other, places[::-1])
    assert stream.num_copies == 6, "in whatever order they are named"
    for number, place in enumerate(places.tolist()):
        assert (other.parts(PAGE, place, 1) == number).all()
    one.close()
    other.close()
