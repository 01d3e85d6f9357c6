"""`python -m relax.services.cli` is `relax`."""

from relax.services.cli import main

main()
