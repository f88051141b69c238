"""Check of deploy/Dockerfile without Docker, for `make container-check`: its steps are performed in bare roots.

The last stage must be small, have no compiler, and start as its user: a key is needed, a chat is answered, the health
check succeeds, and the stop signal ends it. Needs root, debootstrap, a wheel in dist/ and the default model.
"""

import argparse
import glob
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from check_installed import SLOWEST_START_S, chat, free_port, status_of
from check_wheels import ROOT, ROOTS, check_tools, default_cache, make_root, run
from dockerfile import Stage, read_stages

MAX_BYTES = 250_000_000
BASE = "debian:bookworm-slim"
LEFT_OUT = ("doc", "info", "lintian", "linda", "locale", "man")
"""Folders of /usr/share that Debian's slim images lack, now and when a package is installed."""
SETTINGS = {
    "dpkg/dpkg.cfg.d/slim": "\n".join(f"path-exclude /usr/share/{name}/*" for name in LEFT_OUT) + "\n",
    "apt/apt.conf.d/slim": 'Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache ""; Dir::Cache::archives "/tmp";\n',
}
"""Files of /etc that make it so; apt keeps no package."""
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "make", "ld")
KEY = "a-key-of-the-check"
INSIDE = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$@"'
"""$0 is the root."""


def main() -> None:
    """Build the last stage of the Dockerfile and check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=default_cache(), help="a cache directory with the default model")
    parser.add_argument("--context", type=Path, default=ROOT, help="the folder that Docker would be given")
    arguments = parser.parse_args()
    check_tools("container-check", arguments.model)
    stages = read_stages((ROOT / "deploy" / "Dockerfile").read_text())
    for stage in stages:
        build(stage, arguments.context)
    image, root = stages[-1], root_of(stages[-1])
    check_files(root)
    shutil.copytree(arguments.model / "pypi", root / "models" / "quire" / "pypi")
    run("chown", "-R", f"{image.user}:{image.user}", str(root / "models"))
    check_server(image, root)


def root_of(stage: Stage) -> Path:
    """Return the folder that a stage is built in."""
    return ROOTS / f"container-{stage.name or 'last'}"


def build(stage: Stage, context: Path) -> None:
    """Perform the steps of a stage on a copy of its base."""
    if stage.base != BASE:
        sys.exit(f"the Dockerfile starts from {stage.base}, which release/check_container.py cannot make")
    base, root = make_root("bookworm", os.uname().machine, package=""), root_of(stage)
    shutil.rmtree(root, ignore_errors=True)
    run("cp", "-a", "--reflink=auto", str(base), str(root))
    for name, text in SETTINGS.items():
        (root / "etc" / name).write_text(text)
    for name in (*(f"usr/share/{name}" for name in LEFT_OUT), "var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(root / name, ignore_errors=True)
    for word, rest in stage.steps:
        print(f"{stage.name or 'last stage'}: {word} {rest[:90]}", flush=True)
        if word == "COPY":
            copy(rest.split(), root, context)
        else:
            run_step(root, rest)


def copy(words: list[str], root: Path, context: Path) -> None:
    """Copy files of the context, or of the stage that `--from` names."""
    source = context
    if words[0].startswith("--from="):
        source = ROOTS / f"container-{words.pop(0).removeprefix('--from=')}"
    *patterns, target = words
    (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        files = glob.glob(str(source / pattern.lstrip("/")))
        if not files:
            sys.exit(f"COPY {pattern}: no such file in {source}; `make wheel` builds the wheels")
        for file in files:
            inside = f"{file}/." if Path(file).is_dir() else file
            run("cp", "-a", inside, str(root / target.lstrip("/")))


def run_step(root: Path, command: str) -> None:
    """Run a command of the Dockerfile in the root, with the network and the certificates of this machine."""
    authorities, copied = Path("/etc/ssl/certs/ca-certificates.crt"), root / "run" / "authorities.crt"
    environment = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    if authorities.exists():
        shutil.copy(authorities, copied)
        environment["PIP_CERT"] = "/run/authorities.crt"
    for name in ("resolv.conf", "hosts"):
        shutil.copy(Path("/etc", name), root / "etc" / name)
    environment |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"}
    finish(start(root, environment, "root", ["sh", "-c", command]), command)
    copied.unlink(missing_ok=True)


def start(root: Path, environment: dict[str, str], user: str, command: list[str]) -> "subprocess.Popen[bytes]":
    """Start `command` in `root` as `user`, with this environment alone, as the first process of its namespace."""
    settings = ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]
    chroot = [f"--userspec={user}:{user}", str(root), *settings, *command]
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", INSIDE, str(root)]
    return subprocess.Popen([*unshare, *chroot], stdin=subprocess.DEVNULL)


def finish(process: "subprocess.Popen[bytes]", command: str) -> None:
    """Wait for the end. Raises: SystemExit if it fails."""
    if status := process.wait(SLOWEST_START_S):
        sys.exit(f"{command[:100]} ended with {status}")


def stop(process: "subprocess.Popen[bytes]") -> int:
    """Send SIGTERM to the first process of the namespace, as Docker does; return its exit code."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGTERM)
    return process.wait(60)


def check_files(root: Path) -> None:
    """Raise SystemExit if the image is large or has a compiler."""
    paths = [path.lstat() for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum({status.st_ino: status.st_size for status in paths}.values())
    print(f"the image has {size / 1e6:.0f} MB in {len(paths)} files", flush=True)
    if size > MAX_BYTES:
        sys.exit(f"that is more than {MAX_BYTES / 1e6:.0f} MB")
    if found := [name for name in COMPILERS if (root / "usr" / "bin" / name).exists()]:
        sys.exit(f"the image has {', '.join(found)}: nothing is compiled in it")


def check_server(image: Stage, root: Path) -> None:
    """Start the image without a key, which it must refuse, and with one, and let it answer."""
    environment = image.environment | {"HOME": image.workdir, "QUIRE_PORT": str(free_port())}
    if start(root, environment, image.user, image.entrypoint).wait(SLOWEST_START_S) == 0:
        sys.exit("the image served on a public address without a key")
    url = f"http://127.0.0.1:{environment['QUIRE_PORT']}"
    begin = time.monotonic()
    server = start(root, environment | {"QUIRE_API_KEY": KEY}, image.user, image.entrypoint)
    try:
        while status_of(f"{url}/health/ready") != 200:
            if server.poll() is not None or time.monotonic() - begin > SLOWEST_START_S:
                sys.exit("the server of the image did not become ready")
            time.sleep(0.2)
        print(f"ready after {time.monotonic() - begin:.1f} s", flush=True)
        finish(start(root, environment, image.user, image.healthcheck), "the health check")
        if (status := status_of(f"{url}/v1/models")) != 401:
            sys.exit(f"a request without the key got {status}, not 401")
        print(f"answer: {chat(url, KEY)}", flush=True)
    except BaseException:
        server.kill()
        raise
    if status := stop(server):
        sys.exit(f"the server ended with {status} after SIGTERM")


if __name__ == "__main__":
    main()
