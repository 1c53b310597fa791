"""The parts of `python -m tests.gpu.measure`: what each runs, and its share of the time.

A set of parts takes at most twenty minutes: "tests" says whether the package is right on this GPU, "figures" how fast
it is beside others, "processes" what needs several processes or vLLM. What finds most comes first. `expected_seconds`
and `SCRIPT_SECONDS` are the arithmetic of the shares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from grpo_ext.tools.stock import OURS, STOCK
from tests.bench.shapes import Shape
from tests.support.gpu import TEST_PARTS

from .steps import BATCHED, MODELS, WARM_UP_TOKENS, Run

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
# its seconds are of the whole step, its memory is what the allocator reserves (`peak_reserved_mib`); frozen weights are
# float32 here
SOURCE = "prime-rl, baselines of 15 January 2026: one H100, torch.compile, FlashAttention 3, full recomputation"
SOURCE_LORA = f"{SOURCE}, --max-concurrent-runs 4"
LONG_RUNS = tuple(
    Run(
        pair,
        who,
        model,
        model=model,
        micro=1,
        published={
            "source": SOURCE_LORA if pair.lora else SOURCE,
            "seconds": seconds,
            "peak_reserved_gib": gib,
        }
        if who == OURS
        else {},
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

# ---- TRL's pull request 6092 measures its asynchronous trainer: 4 micro-batches of 14,922 tokens. The lengths of its
# rows are estimated: padded micro-batches of 4 rows had about 6,112 tokens there, so a row about 1,500
ROWS = Shape("40 rows of 1,492 tokens", 1, 1491, 1491, groups=4, group=10, checkpointing=True)
TRLS = "huggingface/trl#6092, asynchronous trainer, one process, gradient checkpointing, hardware unstated"
TRLS_RUNS = tuple(
    Run(
        ROWS,
        who,
        "qwen3-1.7b",
        model="qwen3-1.7b",
        micro=micro,
        rounds=2,
        published={"source": f"{TRLS}, {rows}", "tokens_per_second": rate, "peak_gb": peak},
    )
    for who, micro, rows, rate, peak in (
        (OURS, 10, "rows without padding, at most 16,384 tokens", 7282, 37.1),
        (STOCK, 4, "4 padded rows", 5538, 37.0),
    )
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

# ---- of 64 rows one in three times ends before 1,024 tokens: one token of the vocabulary ends a row, and each is as
# likely. A few tokens before those that count initialise what samples
SAMPLED = tuple(
    Shape(f"sampling, {8 * groups} rows of 1,024 tokens", 64, 1024, 1024, groups=groups, sample=True)
    for groups in (8, 32)
)
SAMPLERS = (
    (OURS, "", {}),
    (STOCK, "generate", {}),
    (STOCK, "continuous batching", {BATCHED: True}),
)
SAMPLING_RUNS = tuple(Run(shape, *who, rounds=1) for shape in SAMPLED for who in SAMPLERS)

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
        Part("1.7B", 120, TRLS_RUNS, ratios={"stock TRL / grpo_ext, 1.7B": (TRLS_RUNS[1].name, TRLS_RUNS[0].name)}),
        Part("sampling speed", 340, SAMPLING_RUNS),
    ),
    "processes": (
        Part("two ranks", 150, script="two_ranks"),
        Part("vLLM", 330, script="vllm_step"),
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
# seconds for a token of all rows, by sampler: about 700 launches; `generate` also converts weights under autocast
DECODE = {"": 0.02, "generate": 0.035, "continuous batching": 0.03}
# scripts: starts of processes, and a few seconds of work in each; four of vLLM's engines take about a minute each
SCRIPT_SECONDS = {"step_profile": 2 * START + 25, "two_ranks": 4 * START + 40, "vllm_step": START + 4 * 70}
SLOWER = {OURS: 1.0, STOCK: 1.5}  # where prompts are not shared; what sharing saves is in the tokens


def expected_seconds(run: Run) -> float:
    """What a run takes on an H100, by arithmetic."""
    shape, steps = run.shape, run.warm_up + run.rounds
    if shape.sample:
        return START + DECODE[run.note] * (run.rounds * shape.longest + run.warm_up * WARM_UP_TOKENS)
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
