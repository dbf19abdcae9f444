"""`python -m nearline`, and the `nearline` script."""

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command. Ctrl-C ends it in silence, also while its own modules are still loading, and a second one too
    while it ends."""
    try:
        from nearline.client.cli import app

        app()
    except KeyboardInterrupt:
        _leave()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            _leave()
        raise


def _leave() -> None:
    """End at once: joining threads and running exit hooks is where another Ctrl-C would leave a traceback."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, KeyboardInterrupt):
        pass
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
