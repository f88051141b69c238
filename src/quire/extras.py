"""`install_command`: how to install what an extra of Quire adds, wherever Quire itself came from."""

import functools


@functools.cache
def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, with the versions that the installed Quire asks for.

    It names the packages and not `quire[…]`: an index need not have Quire, or may have another project of this name.
    """
    return " ".join(["pip install", *(f"'{package}'" for package in _requirements(extra) or [f"quire[{extra}]"])])


def _requirements(extra: str) -> list[str]:
    from importlib.metadata import PackageNotFoundError, requires  # 8 ms that few processes need

    try:
        known = requires("quire") or []
    except PackageNotFoundError:  # run from its source
        return []
    found = []
    for requirement in known:
        package, _, condition = (part.strip() for part in requirement.partition(";"))
        if condition.replace("'", '"') == f'extra == "{extra}"':
            inner = package.removeprefix("quire[").removesuffix("]") if package.startswith("quire[") else None
            found += [package] if inner is None else _requirements(inner)
    return found
