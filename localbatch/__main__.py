"""`python -m localbatch`."""

from localbatch.cli import main

if __name__ == "__main__":
    main()
