"""Adding a variant is one file, and one line in the registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_one_file_and_one_line(tmp_path: Path) -> None:
    """A copy of the kernels, in it a copy of a variant under another name; see added_variant.py."""
    package = tmp_path / "kernels" / "kda_kernels"
    shutil.copytree(
        ROOT / "kernels" / "kda_kernels", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(package / "variants" / "wide.py", package / "variants" / "added.py")
    registry, line = package / "variants" / "__init__.py", '    "stock": "kda_kernels.stock",\n'
    text = registry.read_text()
    assert text.count(line) == 1
    registry.write_text(
        text.replace(line, f'{line}    "KdaAdded": "kda_kernels.variants.added",\n')
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "kernels", ROOT, ROOT / "tests"))),
        "KDA_KERNELS_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "added_variant.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
