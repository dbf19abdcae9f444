"""`python -m nearline`, and the `nearline` script."""

import sys


def main() -> None:
    """Run the command. Ctrl-C ends it in silence, also while its own modules are still loading."""
    try:
        from nearline.client.cli import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
