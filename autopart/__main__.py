"""`python -m autopart`, and `torchrun -m autopart`."""

from .cli import main

if __name__ == "__main__":
    main()
