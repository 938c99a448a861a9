"""The `kdabench` command: says what to install where a package of the suite is missing."""

from __future__ import annotations

import sys

INSTALL = "pip install 'kdabench[suite]'"


def main() -> None:
    """Run the command line and end the process with its exit status."""
    try:
        from kdabench import cli  # needs packages of the suite, which may be missing

        cli.main()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("kdabench", "kda_kernels"):
            raise
        print(f"kdabench: {error.name} is not installed: {INSTALL}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
