"""`python -m kvboost_hf`: the `kvboost-hf` command."""

import sys

from kvboost_hf.cli import main

if __name__ == "__main__":
    sys.exit(main())
