"""Run by test_vllm_weights.py on two processes: the weights of a model that FSDP2 shards, whole on each of them."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from grpo_ext.sampling.vllm_weights import Generation
from tests.support.vllm_weights import adapted, generation, sent


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, model = sent(adapted("lora"), Generation), adapted("lora")
    for module in (*model.get_base_model().model.layers, model):
        fully_shard(module, mesh=mesh)
    before = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    sharded = generation(model)
    sharded._dist.fsdp_version = 2
    weights = dict(sharded._iter_named_params())
    assert list(weights) == list(whole)
    assert all(torch.equal(weights[name], value) for name, value in whole.items())
    assert all(torch.equal(parameter.to_local(), before[name]) for name, parameter in model.named_parameters())
    sharded.save_adapter(folder, writes=dist.get_rank() == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
