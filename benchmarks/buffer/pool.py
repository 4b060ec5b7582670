"""Producer and consumer processes of one store, the same for every store.

`python -m benchmarks.buffer.pool MODULE` runs in the environment of the store that it measures, so this file imports the standard library and
numpy only. It answers JSON lines on stdin with JSON lines on stdout: first the address (the database's URI and a folder), then orders.

Four producers and one consumer are started once and used by every measurement, since importing a peer takes seconds. Before the clock starts they
connect, make their samples and convert them to the store's own type. The clock is the machine's monotonic clock, which all processes share. The
first token of an experience is its key: every end-to-end measurement compares the keys that arrived with those that were written.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness.store import Store
from benchmarks.harness.workload import GROUP_SIZE, make_samples

NUM_PRODUCERS = 4
_PACE_S = 0.05


def _work(module: str, address: dict[str, Any], orders: Any) -> None:
    """Be a producer or consumer: connect once, then carry out orders."""
    store: Store | None = None
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        try:
            if store is None:
                store = importlib.import_module(module).STORE(address)
            orders.send({"result": _DUTIES[order.pop("duty")](store, orders, **order)})
        except Exception as error:  # noqa: BLE001 - an error of a peer is its result
            traceback.print_exc()
            orders.send({"error": f"{type(error).__name__}: {error}"[:500]})


def _create(store: Store, orders: Any, space: str) -> None:
    store.create(space)


def _close(store: Store, orders: Any, space: str) -> None:
    store.close(space)


def _produce(
    store: Store, orders: Any, space: str, seed: int, first_key: int, num: int, batch: int, pause_s: float
) -> dict[str, Any]:
    store.open(space)
    samples = make_samples(num, seed=seed, first_key=first_key)
    num_bytes = sum(sample.num_bytes for sample in samples)
    batches = [store.convert(samples[i : i + batch]) for i in range(0, num, batch)]
    del samples
    _wait_for_go(orders)
    started, done = time.monotonic(), []
    for one in batches:
        if pause_s:
            time.sleep(pause_s)
        store.put(one)
        done.append(time.monotonic())
    return {"started": started, "done": done, "num_bytes": num_bytes}


def _consume(store: Store, orders: Any, space: str, num: int, batch: int) -> dict[str, Any]:
    store.open(space)
    _wait_for_go(orders)
    arrived: list[tuple[float, list[int]]] = []
    seen = 0
    while seen < num:
        keys = list(store.take(batch))
        arrived.append((time.monotonic(), keys))
        seen += len(keys)
    return {"arrived": arrived}


def _wait_for_go(orders: Any) -> None:
    orders.send("ready")
    orders.recv()


_DUTIES: dict[str, Callable[..., Any]] = {"create": _create, "close": _close, "produce": _produce, "consume": _consume}


class StoreError(Exception):
    """A store failed, or took too long."""


class Pool:
    """The producer and consumer processes of one store."""

    def __init__(self, module: str, address: dict[str, Any]) -> None:
        self._module, self._address = module, address
        # Forked from a process that has imported the peer and has no connection: five imports of torch would take a minute.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([module])
        self._processes: list[tuple[Any, Any]] = []
        self._spaces = 0

    def write(self, *, num: int, batch: int, producers: int, first_key: int, limit_s: float) -> dict[str, Any]:
        """Measure experiences and bytes a second, from the first producer's start to the last one's end."""
        space = self._space(limit_s)
        written = self._run(self._production(space, num, batch, producers, first_key), limit_s)
        seconds = max(w["done"][-1] for w in written) - min(w["started"] for w in written)
        self._each([{"duty": "close", "space": space}] * producers, limit_s)
        return {"experiences_per_s": num / seconds, "bytes_per_s": sum(w["num_bytes"] for w in written) / seconds}

    def end_to_end(self, *, num: int, batch: int, producers: int, first_key: int, limit_s: float) -> dict[str, Any]:
        """Measure experiences a second, from the first producer's start until the consumer has decoded the last one."""
        written, arrived = self._through(num, batch, producers, first_key, 0.0, limit_s)
        return {"experiences_per_s": num / (arrived[-1][0] - min(w["started"] for w in written))}

    def latency(self, *, num: int, batch: int, first_key: int, limit_s: float) -> dict[str, Any]:
        """Measure milliseconds from the return of each paced write until its last experience is decoded."""
        written, arrived = self._through(num, batch, 1, first_key, _PACE_S, limit_s)
        when = {key: at for at, keys in arrived for key in keys}
        delays = [
            1000 * (max(when[first_key + i * batch + j] for j in range(batch)) - done)
            for i, done in enumerate(written[0]["done"])
        ]
        return {"ms": delays}

    def _through(
        self, num: int, batch: int, producers: int, first_key: int, pause_s: float, limit_s: float
    ) -> tuple[list[dict[str, Any]], list[tuple[float, list[int]]]]:
        space = self._space(limit_s)
        orders = self._production(space, num, batch, producers, first_key, pause_s)
        orders += [None] * (NUM_PRODUCERS - producers)  # the consumer is the last process
        orders += [{"duty": "consume", "space": space, "num": num, "batch": batch}]
        *written, consumed = self._run(orders, limit_s)
        keys = [key for _, some in consumed["arrived"] for key in some]
        if sorted(keys) != list(range(first_key, first_key + num)):
            raise StoreError(f"{len(keys)} experiences arrived, {len(set(keys))} different ones, of {num}")
        self._each([{"duty": "close", "space": space} if order else None for order in orders], limit_s)
        return written, consumed["arrived"]

    def _production(
        self, space: str, num: int, batch: int, producers: int, first_key: int, pause_s: float = 0.0
    ) -> list[dict[str, Any] | None]:
        share = num // producers
        assert share * producers == num and share % GROUP_SIZE == 0, "producers get whole groups, and equally many"
        return [
            {
                "duty": "produce",
                "space": space,
                "seed": first_key + i,
                "first_key": first_key + i * share,
                "num": share,
                "batch": batch,
                "pause_s": pause_s,
            }
            for i in range(producers)
        ]

    def _space(self, limit_s: float) -> str:
        self._spaces += 1
        space = f"space{self._spaces}"
        self._each([{"duty": "create", "space": space}], limit_s)
        return space

    def _run(self, orders: Sequence[dict[str, Any] | None], limit_s: float) -> list[dict[str, Any]]:
        """Send orders, wait until all processes are prepared, start all at once; return the results of processes with an order."""
        return self._each(orders, limit_s, wait_until_ready=True)

    def _each(
        self, orders: Sequence[dict[str, Any] | None], limit_s: float, *, wait_until_ready: bool = False
    ) -> list[dict[str, Any]]:
        if not self._processes:
            self._processes = [self._start() for _ in range(NUM_PRODUCERS + 1)]
        deadline = time.monotonic() + limit_s
        busy = [(connection, order) for (_, connection), order in zip(self._processes, orders, strict=False) if order]
        try:
            for connection, order in busy:
                connection.send(order)
            if wait_until_ready:
                for connection, _ in busy:
                    self._answer(connection, deadline, limit_s)
                for connection, _ in busy:
                    connection.send("go")
            # Report the first failure: other processes may wait for the failed one without end.
            waiting, results = dict.fromkeys(connection for connection, _ in busy), {}
            while waiting:
                ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                for connection in ready or list(waiting)[:1]:
                    results[connection] = self._answer(connection, deadline, limit_s)["result"]
                    del waiting[connection]
            return [results[connection] for connection, _ in busy]
        except (StoreError, EOFError, OSError):
            self.close()  # the next measurement begins with new processes
            raise

    def _answer(self, connection: Any, deadline: float, limit_s: float) -> Any:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            raise StoreError(f"no answer within {limit_s:.0f} s")
        try:
            answer = connection.recv()
        except EOFError as error:
            raise StoreError("one of its processes ended") from error
        if isinstance(answer, dict) and "error" in answer:
            raise StoreError(answer["error"])
        return answer

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = multiprocessing.Pipe()
        process = self._context.Process(target=_work, args=(self._module, self._address, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def close(self) -> None:
        for process, connection in self._processes:
            connection.close()
            process.join(0.5)
            if process.is_alive():
                process.kill()
        self._processes = []


def answer_orders() -> int:
    """Read an address, then orders, one JSON line each; print the answers."""
    module = sys.argv[1]
    # Libraries print to stdout, so answers use a copy of the descriptor.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = importlib.import_module(module).STORE
    address = store.start(json.loads(sys.stdin.readline()))
    pool = Pool(module, address)
    try:
        print(json.dumps({"result": {"version": _version(store.package)}}), file=answers, flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            try:
                answer = {"result": getattr(pool, order.pop("measure"))(**order)}
            except (StoreError, EOFError, OSError) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        pool.close()
        with contextlib.suppress(Exception):
            store.stop()
    return 0


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package) if package else None
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(answer_orders())
