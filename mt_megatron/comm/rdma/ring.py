"""Bookkeeping of one directed edge's ring of slots: what may be written, what has arrived, what is owed.

The ring lies in the receiver's memory. The sender holds as many credits as there are slots; a fragment costs
one, and the receiver gives it back after it has copied the fragment out. Counts only ever grow, and travel
as their low ``COUNT_BITS`` bits, so a credit message that is repeated or merged with a later one changes
nothing.
"""

from __future__ import annotations

from mt_megatron.comm.errors import MessageMismatch

COUNT_BITS = 16
"""Of a count of fragments in an immediate value of 32 bits."""

MOST_SLOTS = 1 << (COUNT_BITS - 2)
"""Slots of a ring: far fewer than counts, so that low bits tell all possible counts apart."""

_MASK = (1 << COUNT_BITS) - 1


class SendRing:
    """The sender's side. Not locked: its edge is."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.sent = 0
        """Fragments written so far."""

        self.credited = 0
        """Fragments of these that the receiver has copied out."""

        self._unacknowledged = [0] * slots
        """Writes from each slot's staging memory that have no completion yet."""

    def free(self) -> bool:
        """Whether the next slot may be written: the receiver has emptied it, and the previous write from its
        staging memory is complete."""
        return self.sent - self.credited < self.slots and not self._unacknowledged[self.sent % self.slots]

    def take(self, writes: int) -> int:
        """The next slot, from which ``writes`` writes start; ``free`` must be true."""
        if not self.free():
            raise AssertionError("no slot is free")
        slot = self.sent % self.slots
        self._unacknowledged[slot] = writes
        self.sent += 1
        return slot

    def acknowledge(self, slot: int) -> None:
        """One write from ``slot`` is complete."""
        self._unacknowledged[slot] -= 1

    def credit(self, low_bits: int) -> int:
        """Take note of the receiver's count, given by its low bits; the number of slots that became free.

        Raises MessageMismatch for a count of fragments that were never sent.
        """
        gained = (low_bits - self.credited) & _MASK
        if gained > self.sent - self.credited:
            raise MessageMismatch(
                f"the receiver gave back {gained} slots of {self.sent - self.credited} that are in use; both "
                "ranks must run the same version of mt_megatron"
            )
        self.credited += gained
        return gained

    def delivered(self) -> bool:
        """True where every fragment has reached the receiver's memory. One that was copied out there has,
        also where its acknowledgement comes late: the peer's farewell may overtake it."""
        return self.credited == self.sent or not any(self._unacknowledged)


class ReceiveRing:
    """The receiver's side. Not locked: its edge is."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.arrived = 0
        self.consumed = 0
        self._owed = 0

    def arrive(self, slot: int) -> None:
        """A fragment lies in ``slot``. Raises MessageMismatch for one that is not the next, or not empty."""
        if slot != self.arrived % self.slots or self.arrived - self.consumed >= self.slots:
            raise MessageMismatch(
                f"a fragment arrived in slot {slot}; expected slot {self.arrived % self.slots} with "
                f"{self.arrived - self.consumed} of {self.slots} slots in use; both ranks must run the same "
                "version of mt_megatron"
            )
        self.arrived += 1

    def next_slot(self) -> int | None:
        """The slot of the oldest fragment that was not copied out; None: there is none."""
        return None if self.consumed == self.arrived else self.consumed % self.slots

    def consume(self) -> None:
        """The oldest fragment was copied out."""
        if self.consumed == self.arrived:
            raise AssertionError("no fragment has arrived")
        self.consumed += 1
        self._owed += 1

    def credit_due(self, *, more_follows: bool) -> int | None:
        """Low bits of the count to send now; None: nothing is owed, or ``more_follows`` and less than a
        quarter of the ring is owed, so that one message returns several slots."""
        if not self._owed or (more_follows and 4 * self._owed < self.slots):
            return None
        self._owed = 0
        return self.consumed & _MASK
