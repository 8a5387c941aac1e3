"""`python -m dormouse_bench`: the `bench` command where its script is not installed."""

from dormouse_bench.cli import main

if __name__ == "__main__":
    main()
