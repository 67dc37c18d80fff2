"""The versions this package asks for, by its own metadata, and those that are installed."""

import re
from importlib.metadata import PackageNotFoundError, requires, version

DISTRIBUTION = "rlkit-workbook"


def requirements() -> dict:
    """{extra or "": {name: packaging Requirement}} of this package's metadata."""
    from packaging.requirements import Requirement

    found = {"": {}, "test": {}, "cpu-vllm": {}, "gpu": {}, "hub": {}}
    try:
        texts = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return found
    for text in texts:
        requirement = Requirement(text)
        extra = re.search(r'extra\s*==\s*["\']([\w-]+)', text)
        if extra is None or extra[1] in found:
            found[extra[1] if extra else ""][requirement.name] = requirement
    return found


def fits(requirement, installed: str) -> bool:
    """A local build such as 2.13.0+cpu counts as 2.13.0."""
    return requirement.specifier.contains(installed.split("+")[0], prereleases=True)


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
