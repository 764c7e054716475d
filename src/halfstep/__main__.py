"""`python -m halfstep`."""

from halfstep.cli import main

if __name__ == "__main__":
    main()
