"""Run the command line with `python -m equilibrate_paper`."""

from equilibrate_paper.cli import run

if __name__ == "__main__":
    run()
