"""`python -m coterie`."""

from coterie.cli import main

main()
