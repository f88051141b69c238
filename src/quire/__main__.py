"""`python -m quire`: the same as the `quire` command. Next to read: `cli/entry.py`."""

from quire.cli.entry import main

if __name__ == "__main__":
    main()
