"""Program ``python -m benchmarks.vision``: ``linattn bench vision``, with the figures added to those of this machine's card in results/."""

import sys

from benchmarks import bench

if __name__ == "__main__":
    sys.exit(bench("vision", sys.argv[1:]))
