"""Draw a run's loss over its tokens as an SVG, from the metrics.jsonl that training wrote.

    python examples/plot_loss.py runs/llama3_tiny/metrics.jsonl docs/images/llama3_tiny.svg

Training draws the same picture beside its metrics when it ends; this is for a run that still goes on,
or one that was killed. Training loss is a line, validation a dot, unigrams and bigrams of the training
data (on the very validation tokens of the last evaluation) are dashed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mt_megatron.training.logging.picture import write_picture


def main() -> int:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", type=Path)
    parser.add_argument("svg", type=Path)
    args = parser.parse_args()
    try:
        write_picture(args.metrics, args.svg)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
