"""The parts of `python -m tests.gpu.measure`: what each runs, and its share of the time.

A set of parts takes at most twenty minutes: "tests" says whether the package is right on this GPU, "figures" how fast
it is beside others. What finds most comes first. `expected_seconds` is the arithmetic of the shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from grpo_ext.tools.stock import OURS, STOCK
from tests.bench.shapes import Shape
from tests.support.gpu import TEST_PARTS

from .steps import BATCHED, MODELS, Run

MINUTES = 20


@dataclass(frozen=True)
class Part:
    """Runs of steps, or a script of tests/gpu, or else the tests of this name in `tests.support.gpu.TEST_PARTS`."""

    name: str
    share: float  # seconds; what a part leaves goes to those after it
    runs: tuple[Run, ...] = ()
    script: str | None = None
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # names of two runs, whose seconds are divided


FULL = Shape("full, long prompt", 1024, 128, 1024, groups=8, checkpointing=True)
LORA = Shape("LoRA, ragged answers", 128, 64, 1792, skewed=True, groups=8, checkpointing=True, lora=True)
PACKED, ROUNDED = {"forward": "packed"}, {"forward": "packed", "float32_weight_gradients": False}
TRAINERS = (
    (OURS, "packed", PACKED),
    (OURS, "packed, rounded weight gradients", ROUNDED),
    (STOCK, "", {}),
)
FORMS = tuple(Run(FULL, OURS, form, {"forward": form}) for form in ("prefix", "padded"))

# ---- prime-rl's workload: two sequences of 16,384 random ids, one a micro-batch, all of it in the loss. Here a prompt
# has at least one token, and two completions with unlike rewards have advantages other than zero
PAIR = Shape("two sequences of 16,384 tokens", 1, 16383, 16383, groups=1, group=2, checkpointing=True)
PAIR_LORA = replace(PAIR, name=f"{PAIR.name}, LoRA", lora=True)
# as many tokens in rows of prompt and completion
EIGHT = Shape("8 completions of one prompt", 2048, 2048, 2048, groups=1, checkpointing=True)
EIGHT_LORA = replace(EIGHT, name=f"{EIGHT.name}, LoRA", lora=True)
SOURCE = "prime-rl, baselines of 15 January 2026: one H100, torch.compile, FlashAttention 3, full recomputation"
LONG_RUNS = tuple(
    Run(
        pair,
        who,
        model,
        model=model,
        micro=1,
        published={"source": SOURCE, "seconds": seconds, "peak_gib": gib} if who == OURS else {},
    )
    for pair, model, seconds, gib in (
        (PAIR, "qwen3-0.6b", 1.99, 12.5),
        (PAIR_LORA, "qwen3-0.6b", 2.45, 5.1),
        (PAIR_LORA, "qwen3-4b", 5.26, 23.3),
    )
    for who in (OURS, STOCK)
)
# micro-batches of about 16,384 tokens, as above: stock TRL computes a prompt with each of its completions
SHARED_RUNS = tuple(
    Run(shape, who, model, model=model, micro=8 if who == OURS else 4)
    for shape, model in ((EIGHT, "qwen3-0.6b"), (EIGHT_LORA, "qwen3-0.6b"), (EIGHT_LORA, "qwen3-4b"))
    for who in (OURS, STOCK)
)
AGAINST_STOCK = {
    f"stock TRL / grpo_ext, {ours.shape.name}, {ours.model}": (stock.name, ours.name)
    for runs in (LONG_RUNS, SHARED_RUNS)
    for ours, stock in zip(runs[::2], runs[1::2], strict=True)
}

# ---- TRL's pull request 5349 measures its asynchronous trainer with a sequence of 8,192 tokens
HALF = Shape("two sequences of 8,192 tokens", 1, 8191, 8191, groups=1, group=2, checkpointing=True)
TRLS = {"source": "TRL's asynchronous trainer, hardware unstated", "tokens_per_second": 7282, "peak_gb": 37.1}
TRLS_RUNS = tuple(
    Run(HALF, who, "qwen3-1.7b", model="qwen3-1.7b", micro=1, published=TRLS if who == OURS else {})
    for who in (OURS, STOCK)
)

# ---- canonical units are groups, so micro-batches of a group have the same shapes
MODES = (
    Run(FULL, OURS, "as large as fits", PACKED),
    Run(FULL, OURS, "micro-batches of a group", PACKED, micro=8),
    Run(FULL, OURS, "bitwise mode", {"bitwise_invariant": True}, micro=8),
)
MODE_RATIOS = {
    "bitwise / default": (MODES[2].name, MODES[0].name),
    "bitwise / default with micro-batches of a group": (MODES[2].name, MODES[1].name),
}

# ---- no row ends before 1,024 tokens
SAMPLED = tuple(
    Shape(f"sampling, {8 * groups} rows of 1,024 tokens", 64, 1024, 1024, groups=groups, sample=True)
    for groups in (8, 32)
)
SAMPLERS = (
    (OURS, "", {}),
    (STOCK, "generate", {}),
    (STOCK, "continuous batching", {BATCHED: True}),
)
SAMPLING_RUNS = tuple(Run(shape, *who, rounds=1, warm_up=0) for shape in SAMPLED for who in SAMPLERS)

SETS = {
    "tests": (
        Part("head", 60),
        Part("kernels", 60),
        Part("dropout", 60),
        Part("sampling", 60),
        Part("bits", 90),
        Part("training", 220),
        Part("matrix", 180),
        Part("users", 190, tuple(Run(shape, *who) for shape in (FULL, LORA) for who in TRAINERS)),
        Part("other forms", 70, FORMS),
        Part("flex attention", 150),
    ),
    "figures": (
        Part("long sequences", 310, LONG_RUNS, ratios=AGAINST_STOCK),
        Part("shared prompt", 260, SHARED_RUNS, ratios=AGAINST_STOCK),
        Part("bitwise cost", 95, MODES, ratios=MODE_RATIOS),
        Part("profile", 75, script="step_profile"),
        Part("two ranks", 70, script="two_ranks"),
        Part("1.7B", 90, TRLS_RUNS, ratios={"stock TRL / grpo_ext, 1.7B": (TRLS_RUNS[1].name, TRLS_RUNS[0].name)}),
        Part("sampling speed", 260, SAMPLING_RUNS),
        Part("vLLM", 40, script="vllm_step"),
    ),
}
PARTS = tuple(part for parts in SETS.values() for part in parts)
assert {part.name for part in PARTS if not part.runs and part.script is None} == {*TEST_PARTS}


def chosen(text: str) -> list[Part]:
    """The parts that a comma-separated list of parts and sets names, in the order in which they run."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SETS and name not in {part.name for part in PARTS}:
            known = ", ".join([*SETS, *(part.name for part in PARTS)])
            raise ValueError(f"there is no part {name!r}; there are {known}")
    whole = {part.name for name in names for part in SETS.get(name, ())}
    return [part for part in PARTS if part.name in {*names} | whole]


START = 20.0  # seconds until a process has its trainer on the device
RATE = 150e12  # operations a second: prime-rl has 11% (0.6B) to 22% (4B) of an H100's 989e12
DECODE = 0.02  # seconds for a token of all rows: about 700 launches
SLOWER = {OURS: 1.0, STOCK: 1.5}  # where prompts are not shared; what sharing saves is in the tokens


def expected_seconds(run: Run) -> float:
    """What a run takes on an H100, by arithmetic."""
    shape, steps = run.shape, run.warm_up + run.rounds
    if shape.sample:
        return START + steps * DECODE * shape.longest
    sizes, rows = MODELS[run.model], shape.groups * shape.group
    width, inner, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    heads, keys = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    inside = heads * sizes.get("head_dim", width // heads)
    weights = layers * (2 * width * inside * (1 + keys / heads) + 3 * width * inner)
    completion = sum(map(sum, shape.lengths()))
    prompts = shape.prompt * (shape.groups if run.who == OURS else rows)
    length = shape.prompt + completion / rows
    pairs = rows * (length**2 - shape.prompt**2) / 2 + prompts * shape.prompt / 2
    products = 8 * weights * (prompts + completion) + 6 * sizes["vocab_size"] * width * completion
    return START + steps * SLOWER[run.who] * (products + 16 * layers * inside * pairs) / RATE
