"""`python -m localbatch`, and the command `localbatch`."""

import signal
import sys


def start() -> None:
    """Run the command line; Ctrl-C before it can answer is no traceback either."""
    try:
        from localbatch.cli import main

        main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more ends at once
        sys.exit(130)


if __name__ == "__main__":
    start()
