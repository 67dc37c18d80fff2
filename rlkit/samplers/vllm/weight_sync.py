"""How the policy's weights reach a running vLLM server: two classes, both with ``send(model)``.

shm: a checkpoint in /dev/shm that the server reads; for any device. nccl: a broadcast from the trainer's GPU
to the server's, with vLLM in the trainer's Python. gloo: the same dialogue with vLLM's CPU build, without a
GPU.

The server is paused meanwhile and its prefix cache emptied: it holds keys and values of the old weights.
Names
are those of the checkpoint format: vLLM's own loader fuses what vLLM keeps fused (such as q, k and v).
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import socket
import threading
from concurrent.futures import Future, wait
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlkit.samplers.base import WAYS
from rlkit.samplers.vllm.checkpoint import checkpoint_tensors, memory_folder, release, write_weights

PATIENCE = 300  # seconds for the other side to join or to receive


def choose_way(
    wanted: str, *, server_on_cpu: bool, policy_gpu: int | None, server_gpu: int, vllm_importable: bool
) -> tuple[str, str]:
    """(way, reason): "auto" is nccl between two GPUs where the trainer can import vLLM, else shm.

    policy_gpu: None for a policy on the CPU. reason: why shm takes the wanted way's place, or "".
    """
    if wanted not in WAYS:
        raise ValueError(f"weight_sync: got {wanted!r}, expected one of {', '.join(WAYS)}")
    two_gpus = not server_on_cpu and policy_gpu not in (None, server_gpu)
    lacks = {"gloo": "" if server_on_cpu else "gloo is for vLLM's CPU build"}
    lacks["nccl"] = "" if vllm_importable else "nccl needs vLLM in the trainer's Python"
    if not two_gpus:
        lacks["nccl"] = "nccl needs the policy and the server on two different GPUs"
    if wanted == "auto":
        return ("shm" if lacks["nccl"] else "nccl"), ""
    reason = lacks.get(wanted, "")
    return ("shm" if reason else wanted), reason


def make_sync(way: str, server, device: str = "cpu", folder: str | Path | None = None):
    """The object behind a way's name, for a policy on ``device``."""
    return SharedMemorySync(server, folder) if way == "shm" else BroadcastSync(server, way, device)


class SharedMemorySync:
    """A checkpoint in memory: written by the trainer, read by the server, replaced by the next one.

    folder: where it lies, and stays: a server that is started again on this folder has the weights sent last.
    """

    def __init__(self, server, folder: str | Path | None = None):
        self.server, self.own = server, folder is None
        self.folder = Path(folder) if folder else None

    def send(self, model) -> None:
        if self.folder is None:
            self.folder = memory_folder(model)
            self.server.remove_if_orphaned(self.folder)
        write_weights(model, self.folder)
        arguments = {"weights_path": str(self.folder)}
        self.server.post("collective_rpc", {"method": "reload_weights", "kwargs": arguments})

    def close(self) -> None:
        if self.own and self.folder is not None:
            release(self.folder)


class BroadcastSync:
    """The trainer on ``device``, rank 0, broadcasts every parameter to the server's workers by NCCL or gloo.

    A request that makes the workers join or receive returns when they have: it waits in a thread meanwhile.
    """

    def __init__(self, server, way: str, device: str = "cpu"):
        self.server, self.way, self.device = server, way, device
        world = 1 + server.get("get_world_size")["world_size"]
        address = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": world}
        info = {"init_info": address | {"rank_offset": 1, "packed": False}}
        joining = _in_thread(server.post, "init_weight_transfer_engine", info)
        group = _in_thread(_nccl if way == "nccl" else _gloo, address, device)
        while not group.done():
            _check(joining, 0.05)  # if the server refuses, no worker will join
        self.broadcast: Any = group.result()
        _check(joining, PATIENCE, must=True)

    def send(self, model) -> None:
        tensors = {name: tensor.detach() for name, tensor in checkpoint_tensors(model).items()}
        types = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
        shapes = [list(tensor.shape) for tensor in tensors.values()]
        info = {"update_info": {"names": list(tensors), "dtype_names": types, "shapes": shapes}}
        self.server.post("start_weight_update")
        receiving = _in_thread(self.server.post, "update_weights", info)
        try:
            with _current(self.device):
                for tensor in tensors.values():
                    _check(receiving)
                    self.broadcast(tensor.contiguous())
        except Exception:  # of the transport, which only notices that nobody answers
            _check(receiving, 5)  # the request's error names the cause, such as ServerDied
            raise
        _check(receiving, PATIENCE, must=True)
        self.server.post("finish_weight_update")

    def close(self) -> None:
        """Leave the group, also when the other side is gone and a broadcast waits for it."""
        leave, self.broadcast = getattr(self.broadcast, "leave", None), None
        if leave is not None:
            leave()


def _current(device: str):
    """The policy's GPU as the current one, which is the one vLLM's transfers use."""
    import torch

    return torch.cuda.device(device) if str(device).startswith("cuda") else nullcontext()


def _nccl(address: dict, device: str):
    """``broadcast(tensor)`` on the current CUDA device's stream, by vLLM's communicator as in the workers."""
    import torch
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    with _current(device):
        group = trainer_init(address)
    if getattr(group, "disabled", False):
        raise RuntimeError("weight sync: vLLM's NCCL is off here (VLLM_DISABLE_PYNCCL?), it sends nothing")

    def broadcast(tensor):
        group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())

    broadcast.leave = group.destroy  # aborts what waits for a peer that is gone
    return broadcast


def _gloo(address: dict, device: str):
    from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

    patience, (host, port, world) = timedelta(seconds=PATIENCE), address.values()
    store = TCPStore(host, port, world, True, patience, wait_for_workers=False)
    group = ProcessGroupGloo(store, 0, world, patience)
    return lambda tensor: group.broadcast([tensor.cpu()], BroadcastOptions()).wait()


def _in_thread(function, *arguments) -> Future:
    """A call in a thread of its own, which does not keep the interpreter from ending (a pool's would)."""
    future: Future = Future()

    def run():
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _check(future: Future, patience: float = 0, must: bool = False) -> None:
    """Raise what the call raised within ``patience`` seconds; RuntimeError if it must return by then."""
    if wait([future], patience).done:
        future.result()
    elif must:
        raise RuntimeError(f"weight sync: no answer within {patience} s")


def free_port(port: int = 0) -> int:
    """The TCP port of the loopback interface if nobody listens on it, else OSError; for 0 any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return probe.getsockname()[1]
