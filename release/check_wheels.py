"""Checks of release wheels in bare roots, for `make wheel-check`: Debian with Python and nothing else.

Those for ARM run under qemu-user. Needs root, and on Debian: debootstrap qemu-user-static binfmt-support.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOTS = ROOT / "build" / "roots"
SUITES = {"cp311": "bookworm", "cp312": "trixie"}
"""The Debian whose Python loads a wheel: 3.11, and for the stable ABI 3.13."""
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}
DEBIAN_NAMES = {"x86_64": "amd64", "aarch64": "arm64"}
PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(36, 16, -1)), "manylinux2014")
"""Tags of the wheels that bookworm's glibc, which is the older one, loads."""
SITE = Path("opt", "quire")


def main() -> None:
    """Install each wheel that the arguments name into a root of its own, and check it there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--model", type=Path, default=default_cache(), help="a cache directory with the default model")
    arguments = parser.parse_args()
    check_tools("wheel-check", arguments.model)
    for wheel in arguments.wheels:
        tag, arch = wheel.stem.split("-")[2], wheel.stem.rsplit("manylinux_", 1)[1].split("_", 2)[2]
        print(f"== {wheel.name} in {SUITES[tag]}", flush=True)
        root = make_root(SUITES[tag], arch)
        install(wheel, root, PYTHONS[SUITES[tag]], arch)
        shutil.rmtree(root / "root" / ".cache", ignore_errors=True)
        shutil.copytree(arguments.model / "pypi", root / "root" / ".cache" / "quire" / "pypi")
        shutil.copy(ROOT / "release" / "check_installed.py", root / SITE)
        run_inside(root, "python3", f"/{SITE}/check_installed.py")


def check_tools(target: str, cache: Path) -> None:
    """Raise SystemExit unless a target of make that needs roots can run, with the model of `cache`."""
    if os.geteuid() != 0:
        sys.exit(f"a root of another system needs root: sudo make {target}")
    if shutil.which("debootstrap") is None:
        sys.exit("debootstrap is not here: on Debian, apt-get install debootstrap")
    if not (cache / "pypi").is_dir():
        sys.exit(f"{cache} has no model: run `quire pull` first")


def default_cache() -> Path:
    """Return Quire's cache directory."""
    return Path(os.environ.get("QUIRE_CACHE_DIR", Path.home() / ".cache" / "quire"))


def make_root(suite: str, arch: str, package: str = "python3") -> Path:
    """Return a directory with Debian's smallest system and a package, for which the empty name stands for none."""
    root = ROOTS / f"{suite}-{arch}{'' if package else '-smallest'}"
    if root.exists():
        return root
    if os.uname().machine != arch and not Path(f"/proc/sys/fs/binfmt_misc/qemu-{arch}").exists():
        sys.exit(f"programs for {arch} do not start here: on Debian, apt-get install qemu-user-static binfmt-support")
    unfinished = root.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    # In a mount namespace: what an interrupted debootstrap has mounted would be deleted with the unfinished root.
    options = (f"--arch={DEBIAN_NAMES[arch]}", "--variant=minbase", *([f"--include={package}"] if package else ()))
    run("unshare", "--mount", "debootstrap", *options, suite, str(unfinished))
    return unfinished.rename(root)


def install(wheel: Path, root: Path, python: str, arch: str) -> None:
    """Install `wheel` and what it needs with this machine's pip, because the root has none."""
    target = root / SITE
    shutil.rmtree(target, ignore_errors=True)
    platforms = [f"--platform={name}_{arch}" for name in PLATFORMS]
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    constraints = ("-c", str(ROOT / "constraints.txt"))
    only = ("--only-binary=:all:", "--implementation=cp", f"--python-version={python}")
    run(*pip, *constraints, *only, *platforms, "--target", str(target), str(wheel))


def run_inside(root: Path, *command: str) -> None:
    """Run `command` with `root` as its root, and with nothing of this program's environment."""
    mount = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"'
    environment = ["env", "-i", "PATH=/usr/bin:/bin", "HOME=/root", "LANG=C.UTF-8", f"PYTHONPATH=/{SITE}"]
    run("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", mount, str(root), *environment, *command)


def run(*command: str) -> None:
    """Run `command`. Raises: SystemExit if it fails."""
    result = subprocess.run(command, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command[:3])} … ended with {result.returncode}")


if __name__ == "__main__":
    main()
