"""`python -m equilibrate` is `equilibrate`."""

from equilibrate.cli import main

main()
