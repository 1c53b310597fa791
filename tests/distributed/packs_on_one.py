"""Run by test_two_processes.py on two processes: packs go wrong, or are not taken, on the second one alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.forward import forms
from grpo_ext.forward.attention import TakesNoPacks
from grpo_ext.tools.check.worker import leave
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer


def main(folder: Path, what: str) -> None:
    trainer = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=letter_reward,
        args=GRPOConfig(**config_kwargs(folder / "out", bf16=True, num_iterations=2)),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    build = forms.build_pack

    def refused(*args):
        raise TakesNoPacks("the second process takes none")

    def changed(*args):
        pack = build(*args)
        pack.positions_N[:] = range(len(pack.positions_N))
        return pack

    if trainer.accelerator.process_index == 1:
        if what == "refusal":
            forms.build_pack = refused
        else:
            forms.build_pack = changed
    trainer.train()
    padding = [line["layout/padding_share"] for line in trainer.state.log_history if "layout/padding_share" in line]
    (folder / f"rank_{trainer.accelerator.process_index}.json").write_text(json.dumps({"padding": padding}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    leave(Path(sys.argv[1]))
