"""`python -m clew`."""

from clew.cli.main import main

if __name__ == "__main__":
    main()
