"""torchrun without its traceback where a process has said why it ended, and with that process's code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run ``torch.distributed.run`` with ``argv``. Returns 0, or the exit code of the first process that
    failed by itself; torchrun's own code is 1 for all. Nodes that do not meet end with one line and 1. Raises
    torchrun's ``ChildFailedError`` where a signal ended that process, which says nothing then."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.run import main as torchrun

    # Its line names the process and its code; the one below does as well.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun(list(argv))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode <= 0:
            raise
        print(
            f"mt-megatron launch: process {failure.local_rank} of this machine ended with "
            f"{failure.exitcode}; it says why above",
            file=sys.stderr,
        )
        return int(failure.exitcode)
    except RendezvousConnectionError as error:
        sys.exit(
            "mt-megatron launch: this node cannot meet the others: "
            f"{str(error.__cause__ or error).splitlines()[0]}; expected a --master-port that is free on the "
            "first node, and a first node that all of them reach"
        )
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
