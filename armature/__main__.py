"""Run the command with the package `app` that was installed with this one.

A user's project may have a package `app` too, in the current directory or in a folder of PYTHONPATH, which Python
searches before the installed packages. So `app` is imported by its place.
"""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def run() -> int:
    """Run the command line and return its exit status."""
    import_installed_app()
    from app.__main__ import run as run_command

    return run_command()


def import_installed_app() -> None:
    """Import the package `app` that lies beside this package, whatever else `sys.path` has."""
    folder = Path(__file__).resolve().parent.parent / "app"
    spec = spec_from_file_location("app", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None, "a file of Python has a loader"
    assert spec.loader is not None, "a file of Python has a loader"
    sys.modules["app"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["app"])


if __name__ == "__main__":
    sys.exit(run())
