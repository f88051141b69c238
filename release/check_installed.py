"""Checks of an installed Quire with nothing but Python's own library, run by its interpreter: see `check_wheels.py`.

The kernels' self-test, `quire doctor`, verbs of the other packages, an answer of the default model, and a server
with one chat.
"""

import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

PROMPT = "Why is the sky blue?"
SLOWEST_START_S = 600
"""Under emulation of another processor everything takes some twenty times as long."""


def main() -> None:
    """Run all checks. Raises: SystemExit with what failed."""
    if importlib.util.find_spec("torch") is not None:
        sys.exit("PyTorch is installed here: this check is of an installation without it")
    from quire import _native

    sets = [
        isa
        for isa in ("scalar", "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx", "neon", "neon_i8mm")
        if _native.isa_supported(isa)
    ]
    failing = {isa: op for isa in sets if (op := _native.self_test(isa))}
    if failing:
        sys.exit(f"the self-test of the kernels failed: {failing}")
    print(
        f"kernels: {_native.isa()} is used, {', '.join(sets)} give the same; notes: {_native.isa_notes()}", flush=True
    )
    print(quire("doctor"), flush=True)
    print(f"quire learn check: {quire('learn', 'check', 'bits', '5')}", flush=True)
    print(f"quire bench: {quire('bench', '--help').splitlines()[2].strip()}", flush=True)
    begin = time.monotonic()
    answer = quire("run", "--temperature", "0", "--max-tokens", "24", PROMPT)
    if "light" not in answer:
        sys.exit(f"an answer about something else: {answer!r}")
    print(f"quire run, {time.monotonic() - begin:.0f} s: {answer}", flush=True)
    print(f"quire serve: {served_answer()}", flush=True)


def quire(*arguments: str) -> str:
    """Return what a verb prints. Raises: SystemExit if it fails."""
    command = [sys.executable, "-m", "quire", *arguments]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"quire {' '.join(arguments)} ended with {result.returncode}: {result.stdout}")
    return result.stdout.strip()


def served_answer() -> str:
    """Return a chat's answer from a server, which is started, and must end well when asked to."""
    port = free_port()
    # A server first computes a prompt of its greatest length, at most 512 tokens: minutes under emulation.
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--max-model-len", "64"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}")
        answer = chat(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        status = server.wait(60)
    if status != 0:
        sys.exit(f"quire serve ended with {status}")
    return answer


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def chat(url: str, key: str = "") -> str:
    """Return the answer of the server at `url` to the prompt."""
    request = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    post = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(request).encode(), headers)
    with urllib.request.urlopen(post, timeout=SLOWEST_START_S) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def status_of(url: str) -> int:
    """Return the status of a GET; 0 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait for the server's health route. Raises: SystemExit if it ends or takes too long."""
    begin = time.monotonic()
    while status_of(f"{url}/health/ready") != 200:
        if server.poll() is not None:
            sys.exit(f"quire serve ended with {server.returncode} before it was ready")
        if time.monotonic() - begin > SLOWEST_START_S:
            sys.exit(f"quire serve was not ready in {SLOWEST_START_S} s")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
