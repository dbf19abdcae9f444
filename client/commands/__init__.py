"""The verbs of the `nearline` command, one file per noun."""
