"""`python -m localbatch`, and the command `localbatch`."""

import signal


def start() -> None:
    """Run the command line.

    While there is nothing to save, Ctrl-C ends the process as it ends any program: Python's
    `KeyboardInterrupt` would be a traceback, or get lost, in the middle of an import.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from localbatch.cli import main

    main()


if __name__ == "__main__":
    start()
