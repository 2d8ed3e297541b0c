"""`python -m gaudi_bert` is the same as `gaudi-bert`."""

from gaudi_bert.cli import main

if __name__ == "__main__":
    main()
