"""What vLLM's workers load from us: a fix for tied embeddings on the CPU, and weights received over gloo.

The server is started with this file's copy on its path and ``--worker-extension-cls``. It runs in the
server's Python, so it imports vLLM and torch and nothing of rlkit. Written for vLLM 0.32.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory


class WorkerExtension:
    """Its methods become methods of every worker, callable through ``/collective_rpc``."""

    def repack_tied_embeddings(self) -> int:
        """Pack the output layer anew where it shares the input embedding; returns how many layers that were.

        On the CPU vLLM multiplies with a packed copy of each weight. A reload packs the linear layers again,
        but not
        an embedding that also serves as output layer: its copy would silently keep the old weights.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        stale = [
            module
            for module in self.model_runner.get_model().modules()
            if isinstance(module, VocabParallelEmbedding)
            and hasattr(module, "cpu_linear")
            and module.weight.numel() > 0
        ]
        for module in stale:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        return len(stale)


# ---- the protocol of vLLM's NCCL engine, over gloo: the same dialogue, without a GPU


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine):
    """Receives every tensor as one broadcast from rank 0, the trainer."""

    init_info_cls, update_info_cls = GlooInitInfo, GlooUpdateInfo
    group = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        patience = timedelta(seconds=300)
        store = TCPStore(
            init_info.master_address, init_info.master_port, init_info.world_size, False, patience
        )
        self.group = ProcessGroupGloo(store, rank, init_info.world_size, patience)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([tensor], BroadcastOptions()).wait()
            self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
