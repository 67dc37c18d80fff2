"""The messages of a weight transfer over NCCL, read by vLLM's own classes: run in a Python that has vLLM.

No GPU is needed: where the transfer would touch one, stand-ins note their arguments. This checks that the
classes, functions and fields that `weight_sync` uses exist in this vLLM, and that the worker can read the
messages.
"""

import threading
from types import SimpleNamespace
from unittest import mock

import torch
from vllm.distributed.weight_transfer import nccl_common, nccl_engine

from rlkit.samplers.vllm import weight_sync

torch.manual_seed(0)
MODEL = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).to(torch.bfloat16)
PARAMETERS = dict(MODEL.named_parameters())


class Server:
    """Notes every request; the receiving one is answered when all tensors have arrived, as vLLM does."""

    url = "http://127.0.0.1:9"

    def __init__(self):
        self.asked, self.arrived = [], threading.Event()

    def get(self, path):
        return {"world_size": 2}

    def post(self, path, body=None):
        self.asked.append((path, body))
        if path == "update_weights" and not self.arrived.wait(10):
            raise RuntimeError("no tensors came")
        return {}


def nccl():
    server, sent, left = Server(), [], []

    def broadcast(tensor, src, stream):
        sent.append(tensor)
        if len(sent) == len(PARAMETERS):
            server.arrived.set()

    group = SimpleNamespace(broadcast=broadcast, destroy=lambda: left.append(True))
    with (
        mock.patch.object(nccl_common, "stateless_init_process_group", return_value=group) as joined,
        mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
        mock.patch.object(torch.cuda, "current_stream", return_value="stream"),
    ):
        sync = weight_sync.BroadcastSync(server, "nccl", "cpu")
        sync.send(MODEL)
        sync.close()
    (path, body), *update = server.asked
    info = nccl_engine.NCCLWeightTransferEngine.init_info_cls(**body["init_info"])
    assert path == "init_weight_transfer_engine" and info.rank_offset == 1 and not info.packed
    assert joined.call_args.args[:4] == (info.master_address, info.master_port, 0, 3) and info.world_size == 3
    assert [path for path, _ in update] == ["start_weight_update", "update_weights", "finish_weight_update"]
    told = nccl_engine.NCCLWeightTransferEngine.update_info_cls(**update[1][1]["update_info"])
    assert told.names == list(PARAMETERS) and set(told.dtype_names) == {"bfloat16"} and left == [True]
    assert all(
        torch.equal(a, b) and list(a.shape) == shape
        for a, b, shape in zip(sent, PARAMETERS.values(), told.shapes, strict=True)
    )


if __name__ == "__main__":
    nccl()
    print("ok")
