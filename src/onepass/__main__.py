"""`python -m onepass`: the command line."""

from onepass.cli import main

main()
