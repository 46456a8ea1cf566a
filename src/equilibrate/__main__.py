"""Run the command line with `python -m equilibrate`."""

from equilibrate.cli import main

if __name__ == "__main__":
    main()
