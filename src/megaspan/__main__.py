"""`python -m megaspan` is the command `megaspan`."""

import sys

from megaspan.cli import main

if __name__ == "__main__":
    sys.exit(main())
