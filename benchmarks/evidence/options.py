"""What the commands of this folder have in common: where the recorded traces lie. They are not in this repository."""

import argparse
from pathlib import Path

NEEDED = "directory of recorded traces, one folder per source: azure_llm_2023, lengths, vtc, ssjf, azure_functions"


def data_directory(about: str | None) -> Path:
    """Read `--data DIRECTORY` from the command line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIRECTORY", help=NEEDED)
    directory: Path = parser.parse_args().data
    return directory
