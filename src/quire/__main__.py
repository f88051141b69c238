"""`python -m quire`: the same as the `quire` command. Next to read: `cli/main.py`."""

from quire.cli.main import main

if __name__ == "__main__":
    main()
