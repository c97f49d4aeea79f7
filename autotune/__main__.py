"""The command `autotune`, and `python -m autotune`. A Ctrl-C in the half second of its imports is told in a line."""

import sys


def main() -> None:
    try:
        from autotune.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("autotune: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
