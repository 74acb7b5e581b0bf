"""Program ``python -m benchmarks.train``: ``linattn bench train``, with the figures added to those of this machine's card in results/."""

import sys

from benchmarks import bench

if __name__ == "__main__":
    sys.exit(bench("train", sys.argv[1:]))
