"""`python -m nearline`, and the `nearline` script."""

import errno
import os
import sys

INTERRUPTED = 130
NO_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""What is wrong when what is printed finds no place."""


def main() -> None:
    """Run the command. Ctrl-C ends it in silence, also while its own modules are still loading, and a second one too
    while it ends; so does an output that nobody reads. One that cannot be written says so."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the process lives)
    try:
        from nearline.client.cli import app

        app()
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            _leave(INTERRUPTED)
        raise
    except OSError as error:
        if error.errno not in NO_OUTPUT:
            raise
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"error: cannot write the output: {error.strerror}\n")
        _leave(1)


def _leave(status: int) -> None:
    """End at once: joining threads and running exit hooks is where another Ctrl-C would leave a traceback."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, KeyboardInterrupt):
        pass
    os._exit(status)


if __name__ == "__main__":
    main()
