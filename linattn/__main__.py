"""``python -m linattn`` is ``linattn``."""

import sys

from linattn.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
