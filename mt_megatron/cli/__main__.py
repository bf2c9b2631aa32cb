"""``python -m mt_megatron.cli`` is ``mt-megatron``."""

import sys

from mt_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
