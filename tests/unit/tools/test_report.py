"""The report: what it shows is what was logged, whatever the run left behind, and what a model wrote stays text."""

import sys

import pytest

from grpo_ext.errors import ConfigError
from grpo_ext.tools import report as module
from grpo_ext.tools.report import load_run, plots_of, report, report_or_reason
from tests.support.pages import Page, line, make_run, write_rerun


def test_every_plot_holds_exactly_what_was_logged(tmp_path):
    names = {
        "Reward": ("reward", "rewards/letters/mean"),
        "Evaluation": ("eval_pass@1", "eval_math_pass@8", "eval_reward"),
        "Completion length": ("completions/mean_length", "completions/max_length"),
        "Entropy, KL to the reference and the teacher": ("entropy", "kl"),
        "Cut completions, clipped tokens, groups without variance": ("frac_reward_zero_std", "cispo_clip_ratio"),
        "Gradient norm before clipping": ("grad_norm",),
        "Time by phase": ("step_time", "time/rollout"),
    }
    every = [name for together in names.values() for name in together]
    lines = [line(step, **{name: place + 0.1 * step for place, name in enumerate(every)}) for step in (1, 2, 3)]
    plots = plots_of(load_run(make_run(tmp_path / "run", lines))[1])
    assert list(plots) == list(names)
    for title, together in names.items():
        expected = {name: ([1, 2, 3], [each["values"][name] for each in lines]) for name in together}
        assert plots[title][1] == expected


def test_the_page_shows_the_numbers_and_embeds_the_plots(tmp_path):
    lines = [line(1, reward=0.125, entropy=1.5, kl=0.0), line(4, reward=0.875, entropy=0.5, kl=0.0)]
    run = make_run(tmp_path / "run", lines)
    path = report(run)
    assert path == run / "report" / "index.html"
    page = Page(path)
    for text in ("reward, first -> last 0.125 -> 0.875", "entropy 1.5 0.5 0.5 1.5", "peak_memory_mib 101 104 101 104"):
        assert text in page.text
    assert page.tags.count("img") == 2  # kl never changes
    order = [page.text.index(heading) for heading in ("Curves", "What warns", "Completions", "Starts")]
    assert order == sorted(order)
    assert all(value.startswith("data:") for _, name, value in page.attributes if name in ("src", "href"))


def test_a_run_killed_in_a_line_is_shown_up_to_that_line(tmp_path):
    run = make_run(tmp_path / "run", [line(1, reward=0.25), line(2, reward=0.5), line(3, reward=0.75)])
    (run / "steps.jsonl").write_text((run / "steps.jsonl").read_text()[:-30])
    shown = "steps 2 of 4 state not finished: it is still running, or was killed reward, first -> last 0.25 -> 0.5"
    assert shown in Page(report(run)).text


def test_a_folder_without_a_run_is_a_clear_error(tmp_path):
    for folder, said in ((tmp_path / "none", "is not the output_dir of a run"), (tmp_path, "has no log yet")):
        with pytest.raises(ConfigError, match=said):
            load_run(folder)
        (tmp_path / "steps.jsonl").touch()


def test_a_failed_report_is_a_sentence(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", [line(1)])
    for name in ("matplotlib.figure", "jinja2"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            reason = report_or_reason(run)
            assert f"No report was written: the report needs {name}; run `pip install " in reason
    monkeypatch.setattr(module, "plots_of", lambda series: 1 / 0)
    assert "ZeroDivisionError" in report_or_reason(run)


def test_a_page_of_another_kind_is_not_overwritten(tmp_path):
    run = make_run(tmp_path / "run", [line(1)])
    page = report(run)
    assert report(run) == page  # its own page is replaced
    page.write_text("mine")
    with pytest.raises(ConfigError, match="is not a report and would be overwritten"):
        report(run)
    assert page.read_text() == "mine"


def test_a_report_stays_in_the_folder_and_says_what_is_in_its_way(tmp_path):
    run, elsewhere = make_run(tmp_path / "run", [line(1)]), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "report").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"index\.html is a link to .*elsewhere/index\.html"):
        report(run)
    assert not [*elsewhere.iterdir()]
    (run / "report").unlink()
    (run / "report").touch()
    with pytest.raises(ConfigError, match=r"index\.html cannot be written \(.*\); move what is there elsewhere"):
        report(run)


@pytest.mark.parametrize("damaged", ["7", '{"step": 3', '{"step": ' + "[" * 100_000, '{"text": "no step"}'])
def test_a_damaged_step_that_was_run_again_is_named(tmp_path, damaged):
    run = make_run(tmp_path / "run", [line(1)])
    write_rerun(run / "rerun" / "step-12", [])
    (run / "rerun" / "step-12" / "step.jsonl").write_text(f"{damaged}\n")
    with pytest.raises(ConfigError, match=r"step\.jsonl: line 1 is not as it was written"):
        report(run)
