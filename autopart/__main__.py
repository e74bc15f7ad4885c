"""`python -m autopart`, and `torchrun -m autopart`."""

from autopart.cli.entry import main

if __name__ == "__main__":
    main()
