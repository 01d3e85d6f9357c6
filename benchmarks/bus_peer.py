"""The peer of `benchmarks.bus_processes`: PyPI's transferqueue, with producer and consumer in Ray actors of their own.

    PYTHON benchmarks/bus_peer.py          commands come as JSON lines, answers go back the same way

Runs in an environment that has it (and torch, ray, tensordict); of this project it needs the folder only. It gets the best that we found:
polling mode (its controller sleeps in its only thread otherwise), and a word over a socket from the producer when a put is done, so that it
neither polls nor waits. Tensors are batched before the clock starts.
"""

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parent))

from bus_rows import Load, anonymous_bytes, touch

DEADLINE_S = 60.0
"""Of one load."""
FIELDS = {"tensors": ["tensor"]}
TOKEN_FIELDS = ["token_ids", "behaviour_logprobs", "mask"]


def batched(rows: list[dict[str, Any]], ragged: bool) -> Any:
    """Rows as one TensorDict: stacked, or jagged."""
    import torch
    from tensordict import TensorDict

    def join(name: str) -> Any:
        cells = [torch.from_numpy(row[name].copy()) for row in rows]
        return torch.nested.as_nested_tensor(cells, layout=torch.jagged) if ragged else torch.stack(cells)

    return TensorDict({name: join(name) for name in rows[0]}, batch_size=len(rows))


class Side:
    """What producer and consumer share: a client of the queue, and one word per put between them."""

    def __init__(self) -> None:
        import transfer_queue

        gc.freeze()
        gc.set_threshold(20_000, 10, 20)  # as on the other side
        transfer_queue.init()
        self.client = transfer_queue.get_client()

    def memory(self) -> int:
        return anonymous_bytes()


class Producer(Side):
    def prepare(self, load: dict[str, Any]) -> None:
        self.load = Load(**load)
        self.shares = [
            [batched(rows, self.load.kind == "ragged") for rows in portions] for portions in self.load.shares()
        ]

    async def write(self, run: str, path: str) -> list[float]:
        """The moment at which each put began, in the order of clients and portions."""
        reader, writer = await asyncio.open_unix_connection(path)
        seen = [asyncio.Semaphore(0) for _ in self.shares]

        async def listen() -> None:
            while line := await reader.readline():
                seen[int(line)].release()

        listening = asyncio.ensure_future(listen())

        async def put(client: int) -> list[float]:
            began = []
            for data in self.shares[client]:
                began.append(time.perf_counter())
                await self.client.async_put(data=data, partition_id=f"{run}-{client}")
                writer.write(f"{client}\n".encode())
                if self.load.kind == "small":
                    await seen[client].acquire()
            return began

        began = await asyncio.gather(*map(put, range(len(self.shares))))
        writer.write_eof()
        await listening  # the other side closes when it has everything
        writer.close()
        return [moment for moments in began for moment in moments]


class Consumer(Side):
    async def read(self, run: str, path: str, load: dict[str, Any], sizes: list[list[int]]) -> dict[str, Any]:
        """The moment at which the rows of each put were here, in the same order, and the bytes that were seen. Keeps everything."""
        self.kept: list[Any] = []
        fields = FIELDS.get(load["kind"], TOKEN_FIELDS)
        ready = [asyncio.Semaphore(0) for _ in sizes]
        done = asyncio.Event()
        streams: list[asyncio.StreamWriter] = []

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            streams.append(writer)
            while line := await reader.readline():
                ready[int(line)].release()
            await done.wait()
            writer.close()

        async def take(client: int) -> list[float]:
            moments = []
            for size in sizes[client]:
                await ready[client].acquire()
                meta = await self.client.async_get_meta(
                    data_fields=fields, batch_size=size, partition_id=f"{run}-{client}", mode="fetch", task_name="read"
                )
                data = await self.client.async_get_data(meta)
                if load["kind"] != "small":
                    self.kept.append(data)
                self.seen += sum(touch_tensor(data[name]) for name in fields)
                moments.append(time.perf_counter())
                if load["kind"] == "small":
                    streams[0].write(f"{client}\n".encode())
            return moments

        self.seen = 0
        server = await asyncio.start_unix_server(listen, path)
        moments = await asyncio.gather(*map(take, range(len(sizes))))
        done.set()
        server.close()
        return {"moments": [moment for some in moments for moment in some], "seen": self.seen}

    async def clear(self, run: str, clients: int) -> None:
        self.kept = []
        for client in range(clients):
            await self.client.async_clear_partition(f"{run}-{client}")


def touch_tensor(tensor: Any) -> int:
    return touch((tensor.values() if tensor.is_nested else tensor).contiguous().numpy())


def serve() -> None:
    import ray
    import transfer_queue
    from omegaconf import OmegaConf

    real, sys.stdout = sys.stdout, sys.stderr
    ray.init(
        num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False, _node_ip_address="127.0.0.1"
    )
    transfer_queue.init(
        OmegaConf.create(
            {"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"num_data_storage_units": 2}}}
        )
    )
    producer = ray.remote(num_cpus=0.1)(Producer).remote()
    consumer = ray.remote(num_cpus=0.1)(Consumer).remote()
    print(json.dumps({"ready": True}), file=real, flush=True)
    for number, line in enumerate(sys.stdin):
        load = json.loads(line)
        answer = move(ray, producer, consumer, load, f"run{number}")
        print(json.dumps(answer), file=real, flush=True)
    transfer_queue.close()
    ray.shutdown()


def move(ray: Any, producer: Any, consumer: Any, load: dict[str, Any], run: str) -> dict[str, Any]:
    sizes = [[len(rows) for rows in portions] for portions in Load(**load).shares()]
    ray.get(producer.prepare.remote(load))
    before = memory(ray, producer, consumer)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/words"
        reading = consumer.read.remote(run, path, load, sizes)
        began = time.monotonic()
        while not os.path.exists(path):  # another process makes it, and tells nobody
            if time.monotonic() - began > DEADLINE_S:
                raise TimeoutError(f"the consumer of {load} was not ready in {DEADLINE_S} s")
            time.sleep(0.01)
        writing = producer.write.remote(run, path)
        done, late = ray.wait([writing, reading], num_returns=2, timeout=DEADLINE_S)
        if late:
            raise TimeoutError(f"{load} did not end in {DEADLINE_S} s; {len(done)} of 2 sides did")
        started, result = ray.get([writing, reading])
    held = memory(ray, producer, consumer) - before
    ray.get(consumer.clear.remote(run, len(sizes)))
    return {"began": started, "memory": held, **result}


def memory(ray: Any, *sides: Any) -> int:
    """Of producer, consumer, storage units and controller."""
    own = sum(ray.get([side.memory.remote() for side in sides]))
    others = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text()
            if "SimpleStorage" in command or "TransferQueueController" in command:
                others += anonymous_bytes(path.parent.name)
        except OSError:
            continue
    return own + others


if __name__ == "__main__":
    serve()
