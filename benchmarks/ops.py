"""Program ``python -m benchmarks.ops``: ``linattn bench ops``, with the figures added to those of this machine's card in results/."""

import sys

from benchmarks import bench

if __name__ == "__main__":
    sys.exit(bench("ops", sys.argv[1:]))
