"""The memory that a training step and a rollout take per device, for `grpo-ext plan`: one formula of a model's sizes.

Prompts and completions have their maximal lengths. Sizes in bytes; weights are float32. `--measure` measures the same.
"""

from dataclasses import dataclass

from ..batching.micro_batches import Form
from ..batching.sizes import ceil_div
from ..forward.tiled_log_probs import TILE

FLOAT32 = 4
QUANTISED = {4: 0.5 + 4 / 64, 8: 1.0}  # bytes of a weight by bits; 4-bit weights have a float32 factor for every 64
_SLACK, _BUFFERS = 0.1, 64 * 2**20  # what an allocator cannot reuse, of the total; and buffers of the libraries


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of parameters, unless the comment says otherwise."""

    parameters: int
    trained: int  # with a gradient
    largest_layer: int  # an engine gathers a whole layer
    outside: int  # of the layers, which FSDP2 gathers for a whole step
    head: int  # trained ones of the language-model head
    active: int  # weights that a token is multiplied with, in all layers
    layers: int
    hidden: int  # width of a layer's input
    vocabulary: int
    cached: int  # keys and values of a token, in all layers
    compute_bytes: int  # of a number in a forward (2: autocast to half precision)
    quantised: int  # stored in `quantised_bytes` each
    quantised_bytes: float
    form: Form  # how completions run through the model
    form_in_words: str  # the form, and why not another one


@dataclass(frozen=True)
class MemoryLayout:
    engine: str  # one of `cli.Engine`
    processes: int  # devices that share what the engine shards
    tokens: int  # in the largest micro-batch, prompts included, over all devices that share it
    sampled_tokens: int  # in one `generate` call at maximal length, prompts included
    sampled_rows: int = 0  # in that call
    accumulates: bool = True  # several micro-batches a step, so that gradients are there while the next one runs
    checkpointing: bool = True  # gradient checkpointing
    reference: bool = False  # a separate reference model is in memory
    teacher: int = 0  # bytes of the teacher's weights
    bitwise: bool = False  # gradients are summed as 64-bit integers
    weights_ahead: int = 0  # copies of the trained weights on this device, to sample ahead
    sequence_parallel_size: int = 1  # devices that share the tokens of a micro-batch

    @property
    def slice_tokens(self) -> int:
        return ceil_div(self.tokens, self.sequence_parallel_size)


def memory_of(model: ModelSizes, layout: MemoryLayout) -> dict[str, float]:
    """Compute the bytes per device by part, with the totals "training" and "rollout"."""
    size, half = model.compute_bytes, model.compute_bytes < FLOAT32
    deepspeed, sharded = layout.engine in ("zero2", "zero3"), layout.engine in ("zero3", "fsdp2")
    # DeepSpeed holds weights and gradients in the half precision, and float32 copies with the optimizer's shards
    width, masters = (size, FLOAT32 * half) if deepspeed else (FLOAT32, 0)
    plain = model.parameters - model.quantised
    weights, teacher = plain * width + model.quantised * model.quantised_bytes, layout.teacher
    # a layer in use and the next one; FSDP2 also gathers what is outside, and holds gradients until they are reduced
    fsdp2 = layout.engine == "fsdp2"
    gathered = (2 * sharded * model.largest_layer + fsdp2 * model.outside) * size
    reduced = fsdp2 * max(model.largest_layer, model.outside) * (size + FLOAT32) * model.trained / model.parameters
    copies = 0 if deepspeed or sharded or model.quantised or not half else plain * size
    added_head = FLOAT32 * layout.accumulates * model.head  # its gradient is made whole, and then added
    holders = 1 if layout.engine == "ddp" else layout.processes  # of gradients and optimizer states
    # the products of a layer's weights with a token and what activation functions keep of them; norms and residuals
    saved = 2 * size * model.active / model.hidden + 6 * FLOAT32 * model.hidden * model.layers
    if layout.checkpointing:  # the inputs of all layers, and one layer that is recomputed
        saved = saved / model.layers + FLOAT32 * model.hidden * model.layers
    logits = min(layout.slice_tokens * model.vocabulary, TILE[0] * TILE[1])  # which the head computes at a time
    parts = {
        "weights": ((1 + layout.reference) * weights + teacher) / (layout.processes if sharded else 1) + gathered,
        "weights that sample": layout.weights_ahead * width * model.trained,
        "half-precision copies": copies,
        "gradients": (width / holders + 8 * layout.bitwise) * model.trained + reduced + added_head,
        "optimizer": (8 + masters) * model.trained / holders,
        "activations": layout.slice_tokens * saved,
        "logits": 3 * FLOAT32 * logits,  # logits and their log-probabilities, float32, and products
        # of the next tokens: logits, what filters leave of them, and random numbers
        "next tokens": 4 * FLOAT32 * layout.sampled_rows * model.vocabulary,
        "keys and values": size * model.cached * layout.sampled_tokens,
    }
    in_training, in_rollout = ("gradients", "activations", "logits"), ("next tokens", "keys and values")
    rollout = sum(parts.values()) - sum(parts[name] for name in in_training) + (layout.engine == "zero3") * weights
    # in training, copies are kept of weights with a gradient, until their own gradient takes their place
    unused = copies * (1 - layout.accumulates * model.trained / model.parameters)
    training = sum(parts.values()) - sum(parts[name] for name in in_rollout) - unused
    if layout.weights_ahead:  # training and sampling at the same time
        training = rollout = rollout + sum(parts[name] for name in in_training)
    slack = {name: _SLACK * total + _BUFFERS for name, total in (("training", training), ("rollout", rollout))}
    totals = {"training": training + slack["training"], "rollout": rollout + slack["rollout"]}
    return {**parts, "slack": max(slack.values()), **totals}
