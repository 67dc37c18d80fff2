"""Loaded by vLLM's workers: a fix for tied embeddings on the CPU, and weights received over gloo.

The server has a copy of this file on its path, named by ``--worker-extension-cls``. It runs in the server's
Python, so it imports vLLM and torch and nothing of rlkit. Written for vLLM 0.32.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


class WorkerExtension:
    """Its methods become methods of every worker, callable through ``/collective_rpc``."""

    def repack_tied_embeddings(self) -> int:
        """Pack the output layer anew where it shares the input embedding; returns how many layers that were.

        On the CPU vLLM multiplies with a packed copy of each weight. A reload packs the linear layers again,
        but not an embedding that is also the output layer: its copy would silently keep the old weights.
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        modules = self.model_runner.get_model().modules()
        tied = [m for m in modules if isinstance(m, VocabParallelEmbedding) and hasattr(m, "cpu_linear")]
        stale = [module for module in tied if module.weight.numel() > 0]
        for module in stale:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        return len(stale)


class GlooEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine with broadcasts over gloo: the same dialogue, without a GPU. Rank 0: the trainer."""

    def init_transfer_engine(self, init_info) -> None:
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        patience, world = timedelta(seconds=300), init_info.world_size
        store = TCPStore(init_info.master_address, init_info.master_port, world, False, patience)
        self.model_update_group = ProcessGroupGloo(store, rank, world, patience)

    def receive_weights(self, update_info) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.model_update_group.broadcast([tensor], BroadcastOptions()).wait()
            self.model.load_weights([(name, tensor)])

    def shutdown(self) -> None:
        self.model_update_group = None


WeightTransferEngineFactory.register_engine("gloo", GlooEngine)
