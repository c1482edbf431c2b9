"""`python -m paceline.cli`: the same as the `paceline` command."""

from paceline.cli.main import run

if __name__ == "__main__":
    run()
