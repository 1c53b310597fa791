"""GRPO with a tool: `accelerate launch recipes/tools.py [--max_steps 60 ...]`; every field of GRPOConfig is an option.
A tiny model that cannot multiply learns to call a calculator and to answer with its result; nothing is downloaded.
Worth copying: the chat template, how calls are parsed from completions (`RESPONSES`), the tool, and the reward."""

import random
import re
import sys
from typing import Any

from grpo_ext.tools.options import check_options, end_with, kinds_of_options, read_settings

if __name__ == "__main__":
    check_options(sys.argv[1:], kinds_of_options()[1:2])  # now, because what follows takes seconds to import

from grpo_ext.tools import starting  # noqa: F401, isort: skip  (before TRL)

import torch
from accelerate.state import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from grpo_ext import Console, GRPOConfig, GRPOTrainer
from grpo_ext.demo.task import EOS, build_model, build_tokenizer, built_once, cache_folder, demo_config_defaults, fit
from grpo_ext.errors import GrpoExtError
from grpo_ext.runtime.quiet import quiet_libraries
from grpo_ext.tools.report import report_or_reason

MODEL, CALL, ANSWER = "<model>", "<call>", "<answer>"
NAME, ARGUMENT = "calculate", "expression"
SYMBOLS = "0123456789*()=abcdefghijklmnopqrstuvwxyz{}': "
# 37*48<eos><model><call>calculate(expression=37*48)<eos><answer>1776<eos><model>1776<eos>
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}<eos>"
    "{% elif m['role'] == 'tool' %}<answer>{{ m['content'] }}<eos>"
    "{% else %}<model>{% for call in m['tool_calls'] or [] %}<call>{{ call['function']['name'] }}("
    "{% for name, value in call['function']['arguments'].items() %}{{ name }}={{ value }}{% endfor %})"
    "{% endfor %}{{ m['content'] }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)
CALLED = {"type": "function", "function": {"name": "{name}", "arguments": {ARGUMENT: "{content}"}}}
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": MODEL,
    "fields": {
        "tool_calls": {
            "open_pattern": rf"<call>(?P<name>\w+)\({ARGUMENT}=",
            "close_pattern": r"\)(<eos>)?",
            "repeats": True,
            "content": "text",
            "transform": CALLED,
        },
        "content": {"close": EOS, "content": "text"},
    },
}
VERSION = 2  # part of the cached folder's name; raise it when the warm start changes
# the teacher of the warm start calls the tool correctly, forgets a factor in the call, or guesses
SHARES = {"calls": 0.4, "forgets": 0.15, "guesses": 0.45}
STEPS, EXAMPLES = 500, 64  # steps of the warm start, and worked examples in each
POSITIONS = 128  # the model's longest text, in tokens


def calculate(expression: str) -> str:
    """Multiply two numbers.

    Args:
        expression: Two factors, such as 37*48.
    """
    factors = re.fullmatch(r"(\d+)\*(\d+)", expression)
    if factors is None:
        raise ValueError("no product")
    return str(int(factors[1]) * int(factors[2]))


def product_reward(prompts: Any, completions: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    """Return 1 if the last message is the product, digit for digit."""
    texts = [prompt[-1]["content"] for prompt in prompts]
    last = [messages[-1] for messages in completions]
    log_metric("guessed", sum(len(messages) == 1 for messages in completions) / len(completions))
    return [
        float(message["role"] == "assistant" and message["content"] == calculate(text))
        for text, message in zip(texts, last, strict=True)
    ]


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, name and mark."""
    tokenizer = build_tokenizer(SYMBOLS, POSITIONS)
    tokenizer.add_tokens([MODEL, CALL, ANSWER, NAME, ARGUMENT])
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSES
    return tokenizer


def worked_example(rng: random.Random) -> list[tuple[str, bool]]:
    """Return a transcript as (text, whether the model writes it)."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    guess = str(rng.randint(100, 9899)) + EOS
    what = rng.choices(list(SHARES), list(SHARES.values()))[0]
    parts = [(f"{a}*{b}{EOS}{MODEL}", False)]
    if what == "guesses":
        return [*parts, (guess, True)]
    if what == "calls":
        call, result, last = f"{a}*{b}", str(a * b), f"{a * b}{EOS}"
    else:
        call, result, last = rng.choice((f"{a}*", f"*{b}", f"{a}")), "{'error': 'no product'}", guess
    return [
        *parts,
        (f"{CALL}{NAME}({ARGUMENT}={call}){EOS}", True),
        (f"{ANSWER}{result}{EOS}{MODEL}", False),
        (last, True),
    ]


def warm_start() -> tuple[Any, PreTrainedTokenizerFast]:
    """Train a model on worked examples, two in five of them correct, and return it with its tokenizer."""
    tokenizer, rng = tool_tokenizer(), random.Random(0)

    def written() -> list[tuple[int, bool]]:
        return [(i, trained) for text, trained in worked_example(rng) for i in tokenizer(text)["input_ids"]]

    examples = [written() for _ in range(4096)]

    def batch() -> dict[str, torch.Tensor]:
        rows = rng.choices(examples, k=EXAMPLES)
        ids = [torch.tensor([i for i, _ in row]) for row in rows]
        labels = [torch.tensor([i if trained else -100 for i, trained in row]) for row in rows]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
            "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
            "labels": pad(labels, batch_first=True, padding_value=-100),
        }

    return fit(build_model(tokenizer, seed=0, positions=POSITIONS), batch, STEPS), tokenizer


def main(argv: list[str]) -> None:
    training = GRPOConfig(
        **{
            **demo_config_defaults(),
            "output_dir": "runs/tools",
            "max_steps": 60,
            "max_completion_length": 64,
            "max_tool_calling_iterations": 2,
            "tool_timeout": 5.0,
            "learning_rate": 2e-4,
            **read_settings(argv, kinds_of_options()[1:2]),
        }
    )
    if PartialState().device.type == "cpu":
        torch.set_num_threads(1)
    if PartialState().is_main_process and not (cache_folder() / f"tools-{VERSION}").is_dir():
        print("Making the model (one to two minutes, once) ...", flush=True)
    with PartialState().main_process_first():  # it builds the model, and the others find it in the cache
        path = built_once(f"tools-{VERSION}", warm_start)
    rng = random.Random(1)
    rows = [[{"role": "user", "content": f"{rng.randint(10, 99)}*{rng.randint(10, 99)}"}] for _ in range(2048)]
    training.disable_tqdm = True
    trainer = Console().install(
        GRPOTrainer(
            model=str(path),
            reward_funcs=product_reward,
            args=training,
            train_dataset=Dataset.from_dict({"prompt": rows}),
            tools=[calculate],
        )
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    folder = str(training.output_dir)
    trainer.save_model(folder)
    if trainer.accelerator.is_main_process:
        print(f"{report_or_reason(folder)}\nSaved in {folder}: the model and its tokenizer")
    trainer.end()


if __name__ == "__main__":
    quiet_libraries()
    try:
        main(sys.argv[1:])
    except GrpoExtError as error:
        end_with(error)
