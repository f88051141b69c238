"""The threads that run plans, in processes of their own: forks, signals, busy neighbours, the end of everything."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIMIT_S = 120
"""Far more than anything here takes: what does not end would never end."""
PRELUDE = """
import gc, os, signal, sys, threading, time
import numpy as np
from quire import _native
from tests.kernels.native.packed_weights import Packed, run

IDS = np.arange(40) * 7 % 50


class Work:
    \"\"\"A plan of a look-up and three products; `compute` gives the same bytes every time, in every process.\"\"\"

    def __init__(self, num_threads, pool=None):
        random = np.random.default_rng(0)
        self.keep = []
        self.plan = _native.Plan(num_threads if pool is None else pool, 40, 1)
        rows = self.rows(96)
        self.plan.embed(self.weight(random, 50, 96), rows[1])
        for width in (160, 96, 64):
            out = self.rows(width)
            self.plan.gemm(self.weight(random, width, rows[0].shape[1]), 0, rows[1], out[1])
            rows = out
        self.out = rows[0]

    def rows(self, width):
        memory = np.zeros((40, width), np.float32)
        self.keep.append(memory)
        return memory, _native.Rows(memory.ctypes.data, memory.strides[0], _native.RowType.f32)

    def weight(self, random, outputs, inputs):
        values = random.standard_normal((outputs, inputs)).astype(np.float32)
        self.keep.append(Packed("f32", outputs, inputs).add_rows("F32", values.view(np.uint8)))
        return self.keep[-1].weight

    def compute(self):
        self.out[:] = 0
        run(self.plan, IDS)
        return self.out.tobytes()


def num_threads_alive():
    return len(os.listdir("/proc/self/task"))


def expect(condition, what):
    if not condition:
        print("wrong:", what, flush=True)
        os._exit(3)


EXPECTED = Work(1).compute()
expect(np.frombuffer(EXPECTED, np.float32).any(), "results are not zero")
"""
RUN_SCRIPTS = """
import json

for name, script in json.loads(sys.argv[1]).items():
    pid = os.fork()
    if pid == 0:
        exec(script)
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    print("end", name, os.waitstatus_to_exitcode(status), flush=True)
"""
SCRIPTS = {
    "threads give the bits of one": """
        for num_threads in (2, 3, 7):
            work = Work(num_threads)
            for _ in range(50):
                expect(work.compute() == EXPECTED, f"bits of {num_threads} threads")
    """,
    # Also a fork of a fork, and the parent afterwards.
    "a fork computes with threads of its own": """
        work = Work(2)
        expect(work.compute() == EXPECTED, "before")

        def child(depth):
            pid = os.fork()
            if pid == 0:
                expect(num_threads_alive() == 1, "a fork has one thread")
                for _ in range(3):
                    expect(work.compute() == EXPECTED, "in the fork")
                expect(num_threads_alive() == 2, "a thread of its own")
                if depth:
                    child(depth - 1)
                gc.collect()
                sys.exit(0)
            _, status = os.waitpid(pid, 0)
            expect(status == 0, f"exit of the fork: {status}")

        for _ in range(3):
            child(1)
            expect(work.compute() == EXPECTED, "after")
    """,
    # Of a process whose other thread is inside of a plan: new plans work in the child, and the old one ends.
    "a fork in the middle of a step": """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        busy, done = Work(2), threading.Event()

        def compute():
            while not done.is_set():
                expect(busy.compute() == EXPECTED, "in the thread")

        thread = threading.Thread(target=compute)
        thread.start()
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                expect(Work(2).compute() == EXPECTED, "in the fork")
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            expect(status == 0, f"exit of the fork: {status}")
        done.set()
        thread.join()
    """,
    "plans that are gone leave no threads": """
        before = num_threads_alive()
        for _ in range(60):
            work = Work(4)
            expect(work.compute() == EXPECTED, "bits")
            expect(num_threads_alive() >= before + 3, "they are threads")
        Work(4)  # never used: it has none
        del work
        gc.collect()
        deadline = time.monotonic() + 60
        while num_threads_alive() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        expect(num_threads_alive() == before, f"{num_threads_alive()} threads, {before} before")
    """,
    "plans may share a pool": """
        pool = _native.ThreadPool(3)
        works = [Work(0, pool) for _ in range(5)]
        before = num_threads_alive()
        del pool
        for _ in range(5):
            for work in works:
                expect(work.compute() == EXPECTED, "bits")
            expect(num_threads_alive() == before + 2, "two more threads in all")
            works = works[1:] or works
    """,
    "two callers with pools of their own": """
        works = [Work(2) for _ in range(3)]
        wrong = []

        def compute(work):
            for _ in range(100):
                if work.compute() != EXPECTED:
                    wrong.append(work)

        threads = [threading.Thread(target=compute, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expect(not wrong, "bits")
    """,
    "handlers run in the main thread between steps": """
        seen = []
        signal.signal(signal.SIGALRM, lambda *_: seen.append(threading.current_thread() is threading.main_thread()))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        work = Work(3)
        deadline = time.monotonic() + 60
        while len(seen) < 50 and time.monotonic() < deadline:
            expect(work.compute() == EXPECTED, "bits")
        signal.setitimer(signal.ITIMER_REAL, 0)
        expect(len(seen) >= 50 and all(seen), f"{len(seen)} alarms")
    """,
    # Else a signal might not interrupt what the main thread waits in.
    "threads of the pool take no signals": """
        def blocked(task):
            with open(f"/proc/self/task/{task}/status") as status:
                return next(int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))

        before = {task: blocked(task) for task in os.listdir("/proc/self/task")}
        work = Work(3)
        work.compute()
        for task in os.listdir("/proc/self/task"):
            if task in before:
                expect(blocked(task) == before[task], "the caller's signals are as before")
            else:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
                    expect(blocked(task) >> (number - 1) & 1, f"{number} is blocked in a thread of the pool")
    """,
    # Frames of signals hold the wide registers; a stack for signals that is too small for them is never used by us.
    "faulthandler and small signal stacks": """
        import ctypes, faulthandler

        class Stack(ctypes.Structure):
            _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

        libc = ctypes.CDLL(None, use_errno=True)
        size = 2048
        while True:
            memory = ctypes.create_string_buffer(size)
            stack = Stack(ctypes.cast(memory, ctypes.c_void_p), 0, size)
            if libc.sigaltstack(ctypes.byref(stack), None) == 0:
                break
            size *= 2
            expect(size < 2**20, "no size is accepted")
        work = Work(2)
        for _ in range(20):
            expect(work.compute() == EXPECTED, "with a small stack")
        faulthandler.enable(file=open(os.devnull, "w"))
        faulthandler.register(signal.SIGUSR1, file=open(os.devnull, "w"), all_threads=True)
        for _ in range(100):
            os.kill(os.getpid(), signal.SIGUSR1)
            expect(work.compute() == EXPECTED, "with signals")
    """,
    # Threads that spin, offer their core or sleep: each is woken.
    "pauses of any length between steps": """
        work = Work(3)
        for pause in (0, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 0.01, 0.06, 0.15):
            for _ in range(5):
                time.sleep(pause)
                expect(work.compute() == EXPECTED, f"after {pause} s")
    """,
    # Flushed to zero inside of a plan only.
    "denormals are the callers again": """
        work = Work(2)
        work.compute()
        small = np.full(64, 1e-40, np.float32)
        expect((small * np.float32(0.5) > 0).all(), "denormals were switched off for the caller")
    """,
    # More threads and processes than cores: no thread waits for ever, and nothing changes.
    "busy processes beside": """
        parent = os.getpid()

        def start_neighbour():
            pid = os.fork()
            while pid == 0 and os.getppid() == parent:
                pass
            if pid == 0:
                os._exit(0)
            return pid

        neighbours = [start_neighbour() for _ in range(3)]
        works = [Work(2), Work(6)]
        for _ in range(30):
            for work in works:
                expect(work.compute() == EXPECTED, "bits")
            time.sleep(0.0005)  # the threads of one fall asleep now and then
        for neighbour in neighbours:
            os.kill(neighbour, signal.SIGKILL)
            os.waitpid(neighbour, 0)
    """,
    # With threads that spin, offer their core, or sleep.
    **{
        f"the process may end {pause} s after a step": f"""
        works = [Work(4), Work(2)]
        for work in works:
            work.compute()
        time.sleep({pause})
    """
        for pause in (0.0, 0.0002, 0.1)
    },
}


def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE + textwrap.dedent(code), *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and output."""
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        pytest.fail(f"it does not end: {out}")
    return process.returncode, out


def test_every_script_ends_well() -> None:
    """Each script runs in a fork of a process without threads."""
    scripts = {name: textwrap.dedent(script) for name, script in SCRIPTS.items()}
    code, out = finish(start(RUN_SCRIPTS, json.dumps(scripts)))
    assert out.splitlines() == [f"end {name} 0" for name in SCRIPTS]
    assert code == 0


@pytest.mark.parametrize("wanted", [signal.SIGINT, signal.SIGTERM])
def test_signals_arrive_while_a_plan_runs(wanted: signal.Signals) -> None:
    process = start("""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work = Work(2)
        try:
            print("ready", flush=True)
            while True:
                expect(work.compute() == EXPECTED, "bits")
        except KeyboardInterrupt:
            expect(work.compute() == EXPECTED, "after the interrupt")
            print("interrupted", flush=True)
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(wanted)
    code, out = finish(process)
    if wanted == signal.SIGINT:
        assert (code, out) == (0, "interrupted\n")
    else:
        assert code == -signal.SIGTERM
