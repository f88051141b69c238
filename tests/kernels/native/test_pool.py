"""The threads that run plans, in processes of their own: forks, signals, busy neighbours, the end of everything."""

import os
import signal
import subprocess
import sys
import textwrap
import time
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


def start(script: str) -> "subprocess.Popen[str]":
    code = PRELUDE + textwrap.dedent(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Exit code, output and errors."""
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        pytest.fail(f"it does not end: {out}{errors}")
    return process.returncode, out, errors


def failures(script: str) -> str:
    """Return the first line a script `expect`ed and did not print, or its error; empty on success."""
    code, out, errors = finish(start(script))
    return "" if code == 0 else f"exit code {code}: {out}{errors}"


@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_threads_give_the_bits_of_one(num_threads: int) -> None:
    assert (
        failures(f"""
        work = Work({num_threads})
        for _ in range(50):
            expect(work.compute() == EXPECTED, "bits")
    """)
        == ""
    )


def test_a_fork_computes_with_threads_of_its_own() -> None:
    """Also a fork of a fork, and the parent afterwards."""
    assert (
        failures("""
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
    """)
        == ""
    )


def test_a_fork_in_the_middle_of_a_step() -> None:
    """Of a process whose other thread is inside of a plan: new plans work in the child, and the old one ends."""
    assert (
        failures("""
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
    """)
        == ""
    )


def test_plans_that_are_gone_leave_no_threads() -> None:
    assert (
        failures("""
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
    """)
        == ""
    )


def test_plans_may_share_a_pool() -> None:
    assert (
        failures("""
        pool = _native.ThreadPool(3)
        works = [Work(0, pool) for _ in range(5)]
        before = num_threads_alive()
        del pool
        for _ in range(5):
            for work in works:
                expect(work.compute() == EXPECTED, "bits")
            expect(num_threads_alive() == before + 2, "two more threads in all")
            works = works[1:] or works
    """)
        == ""
    )


def test_two_callers_with_pools_of_their_own() -> None:
    assert (
        failures("""
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
    """)
        == ""
    )


@pytest.mark.parametrize("wanted", [signal.SIGINT, signal.SIGTERM])
def test_signals_arrive_while_a_plan_runs(wanted: signal.Signals) -> None:
    process = start("""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work = Work(2)
        print("ready", flush=True)
        try:
            while True:
                expect(work.compute() == EXPECTED, "bits")
        except KeyboardInterrupt:
            expect(work.compute() == EXPECTED, "after the interrupt")
            print("interrupted", flush=True)
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(wanted)
    code, out, errors = finish(process)
    if wanted == signal.SIGINT:
        assert (code, out) == (0, "interrupted\n"), errors
    else:
        assert code == -signal.SIGTERM


def test_handlers_run_in_the_main_thread_between_steps() -> None:
    assert (
        failures("""
        seen = []
        signal.signal(signal.SIGALRM, lambda *_: seen.append(threading.current_thread() is threading.main_thread()))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        work = Work(3)
        deadline = time.monotonic() + 60
        while len(seen) < 50 and time.monotonic() < deadline:
            expect(work.compute() == EXPECTED, "bits")
        signal.setitimer(signal.ITIMER_REAL, 0)
        expect(len(seen) >= 50 and all(seen), f"{len(seen)} alarms")
    """)
        == ""
    )


def test_threads_of_the_pool_take_no_signals() -> None:
    """Else a signal might not interrupt what the main thread waits in."""
    assert (
        failures("""
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
    """)
        == ""
    )


def test_faulthandler_and_small_signal_stacks() -> None:
    """Frames of signals hold the wide registers; a stack for signals that is too small for them is never used by us."""
    assert (
        failures("""
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
    """)
        == ""
    )


def test_busy_processes_beside() -> None:
    """More threads and processes than cores: no thread waits for ever, and nothing changes."""
    spin = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    neighbours = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(4)]
    try:
        assert (
            failures("""
            works = [Work(2), Work(6)]
            for _ in range(100):
                for work in works:
                    expect(work.compute() == EXPECTED, "bits")
                time.sleep(0.0005)  # the threads of one fall asleep now and then
        """)
            == ""
        )
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def test_pauses_of_any_length_between_steps() -> None:
    """Threads that spin, offer their core or sleep: each is woken."""
    assert (
        failures("""
        work = Work(3)
        for pause in (0, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 0.01, 0.06, 0.15):
            for _ in range(5):
                time.sleep(pause)
                expect(work.compute() == EXPECTED, f"after {pause} s")
    """)
        == ""
    )


def test_denormals_are_the_callers_again() -> None:
    """Flushed to zero inside of a plan only."""
    assert (
        failures("""
        work = Work(2)
        work.compute()
        small = np.full(64, 1e-40, np.float32)
        expect((small * np.float32(0.5) > 0).all(), "denormals were switched off for the caller")
    """)
        == ""
    )


def test_the_process_may_end_at_any_moment() -> None:
    """With threads that spin, offer their core, or sleep."""
    for pause in (0.0, 0.0002, 0.1):
        assert (
            failures(f"""
            works = [Work(4), Work(2)]
            for work in works:
                work.compute()
            time.sleep({pause})
        """)
            == ""
        )
