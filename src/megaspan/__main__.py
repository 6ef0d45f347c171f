"""`python -m megaspan` is the command `megaspan`."""

import signal
import sys

if __name__ == "__main__":
    answer = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python loads shows no traceback
    from megaspan.cli import main

    signal.signal(signal.SIGINT, answer)
    sys.exit(main())
