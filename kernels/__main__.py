"""`python -m nearline.kernels`: compile the CPU library ahead of the first engine."""

import sys

from nearline.kernels import build


def main() -> int:
    """Compile and say where; a machine without a compiler is told so and still works, slower."""
    try:
        path = build.library()
    except build.BuildFailed as failure:
        sys.stderr.write(f"CPU kernels not compiled, plain torch ops will be used: {failure}\n")
        return 0
    sys.stdout.write(f"CPU kernels: {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
